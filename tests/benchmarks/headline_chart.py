"""The chart of docs/benchmarks.md, drawn from the first table of docs/benchmarks/peers.md.

    python tests/benchmarks/headline_chart.py    # writes docs/img/peers.svg

Tokens per second of one model under a memory limit of the kernel's, by contender. A test compares the file with what
this script draws.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[2] / "docs"
TOKENS = 4 * 128
"""Of a step of that table."""

LEFT, WIDTH, BAR, GAP = 300, 880, 20, 8
PIXELS_PER_TOKEN = 1.35
NAMES = {
    "plain Trainer": "plain Trainer",
    "ptm_accel, masters": "ptm_accel",
    "ptm_accel, masters, no clipping": "ptm_accel, no clipping",
    "DeepSpeed ZeRO-Infinity": "DeepSpeed ZeRO-Infinity",
    "memory-mapped script": "memory-mapped script, no clipping",
}


class Row(NamedTuple):
    """A contender under a limit; no step where the kernel killed it."""

    name: str
    limit: str
    step_s: float | None


def rows() -> list[Row]:
    """Those of the first table, in its order."""
    lines = (DOCS / "benchmarks" / "peers.md").read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("| contender |")) + 2
    found = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        step = cells[4]
        found.append(Row(NAMES[cells[0]], cells[2], float(step.removesuffix(" s")) if step.endswith(" s") else None))
    return found


def _bar(row: Row, y: int) -> list[str]:
    label = f'  <text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{row.name}</text>'
    if row.step_s is None:
        return [label, f'  <text x="{LEFT + 4}" y="{y + 15}">killed: out of memory</text>']
    rate = TOKENS / row.step_s
    width = rate * PIXELS_PER_TOKEN
    kind = "ours" if row.name.startswith("ptm_accel") else "other"
    return [
        label,
        f'  <rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.0f}" height="{BAR}" rx="3"/>',
        f'  <text x="{LEFT + width + 8:.0f}" y="{y + 15}">{rate:.0f}</text>',
    ]


def drawn() -> str:
    """The chart as SVG, readable on light and on dark paper."""
    body: list[str] = []
    y = 30
    for limit in dict.fromkeys(row.limit for row in rows()):
        title = "no limit" if limit == "none" else f"limit of {limit} MiB"
        body.append(f'  <text class="group" x="10" y="{y + 15}">{title}</text>')
        for row in (row for row in rows() if row.limit == limit):
            body += _bar(row, y)
            y += BAR + GAP
        y += 12
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" aria-labelledby="title"'
        " font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">",
        '  <title id="title">Tokens per second of 222M parameters under a memory limit, on 2 CPU cores</title>',
        "  <style>",
        "    text { font-size: 13px; fill: #7b8087 } .group { font-weight: 600 }",
        "    .ours { fill: #2f74b5 } .other { fill: #9aa0a6 }",
        "  </style>",
        f'  <text class="group" x="{LEFT}" y="18">tokens per second; more is better</text>',
    ]
    return "\n".join([*head, *body, "</svg>", ""])


if __name__ == "__main__":
    (DOCS / "img" / "peers.svg").write_text(drawn(), encoding="utf-8")
