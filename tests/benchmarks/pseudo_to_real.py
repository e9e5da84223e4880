"""Pseudo-to-Real beside the real model from the start: the same wall time, states of four times the budget.

    OMP_WAIT_POLICY=passive python tests/benchmarks/pseudo_to_real.py DIRECTORY_ON_AN_SSD [--seconds 300] [--seeds 3]

Llama of 12 layers on bytes of Python's own sources. Each run trains for so many seconds of its own clock, which stands
while it is evaluated, and delinks after 30% of them. Runs of one seed follow one another. Writes `curves.svg` and
`result.json` into the directory, and prints the result as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import MOMENTS, PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.recipes.delinking import delink
from ptm_accel.recipes.linking import link

LENGTH, ROWS = 128, 1
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "num_attention_heads": 4}
LINKED_PART = 0.3
EVALUATIONS = 20
HELD_OUT = 32
WARM_UP = 50
RATE = 1e-3


def text() -> torch.Tensor:
    """Rows of bytes of the standard library's modules; the last ones are held out."""
    files = sorted(Path(os.__file__).parent.glob("**/*.py"))
    octets = b"".join(
        path.read_bytes() for path in files if "test" not in str(path) and "site-packages" not in str(path)
    )
    ids = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def build(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **SIZES))


class Run:
    """One training.

    Args:
        moments: what becomes of optimizer state at delinking; None for the real model from the start.
        seed: of the model and the data.
        seconds: of training.
        rows: the text.
        folder: for pages.
        budget: of host memory, in bytes.
    """

    def __init__(
        self, moments: str | None, seed: int, seconds: float, rows: torch.Tensor, folder: Path, budget: int
    ) -> None:
        self.moments, self.seconds, self.seed = moments, seconds, seed
        self.rows, self.held_out = rows[:-HELD_OUT].long(), rows[-HELD_OUT:].long()
        self.model = build(seed)
        config = PTMConfig(host_memory=budget, disk=str(folder), page_size="256KiB")
        self.engine = Engine.attach(self.model, config)
        if moments is not None:
            link(self.model)
        params = self.model.parameters()
        self.optimizer = self.engine.bind_optimizer(torch.optim.AdamW(params, lr=RATE, weight_decay=0.1, fused=True))
        self.curve: list[tuple[float, int, float]] = []

    def evaluate(self, spent: float, step: int) -> None:
        self.model.eval()
        with torch.no_grad():
            losses = [self.model(input_ids=part, labels=part).loss.item() for part in self.held_out.split(8)]
        self.model.train()
        self.curve.append((spent, step, sum(losses) / len(losses)))

    def train(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)
        spent, step, linked_steps, linked = 0.0, 0, 0, self.moments is not None
        while spent < self.seconds:
            if spent >= len(self.curve) * self.seconds / EVALUATIONS:
                self.evaluate(spent, step)
            begin = time.perf_counter()
            if linked and spent >= LINKED_PART * self.seconds:
                assert self.moments is not None
                delink(self.model, self.optimizer, moments=self.moments)
                linked, linked_steps = False, step
            for group in self.optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
            chosen = self.rows[torch.randint(len(self.rows), (ROWS,), generator=generator)]
            self.model(input_ids=chosen, labels=chosen).loss.backward()
            self.engine.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            step += 1
            spent += time.perf_counter() - begin
        self.engine.settle()
        self.evaluate(spent, step)
        self.engine.close()
        name = self.moments or "real"
        return {"kind": name, "seed": self.seed, "curve": self.curve, "steps": step, "linked_steps": linked_steps}


COLOURS = {"real": "#444444", "copy": "#1f77b4", "scale": "#2ca02c", "reset": "#d62728"}


def picture(runs: list[dict[str, Any]], seconds: float) -> str:
    """The mean over the seeds of each kind, as an SVG."""
    width, height, left, top = 640, 360, 60, 20
    curves = {}
    for kind in COLOURS:
        of_kind = [run["curve"] for run in runs if run["kind"] == kind]
        curves[kind] = [statistics.mean(point[2] for point in points) for points in zip(*of_kind, strict=False)]
    shown = {kind: values[2:] for kind, values in curves.items()}
    least, most = min(map(min, shown.values())), max(map(max, shown.values()))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 120} {height + 60}" '
        'font-family="sans-serif" font-size="12">',
        "<title>Loss on held-out text: the real model from the start, and Pseudo-to-Real</title>",
    ]
    lines.append(f'<rect width="{width + 120}" height="{height + 60}" fill="white"/>')
    for part in range(5):
        value = least + (most - least) * part / 4
        y = top + height - 20 - (height - 40) * part / 4
        lines.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{value:.2f}</text>')
        lines.append(f'<line x1="{left}" x2="{width}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
    for number, (kind, values) in enumerate(shown.items()):
        points = []
        for at, value in enumerate(values):
            x = left + (width - left) * (at + 2) / EVALUATIONS
            points.append(f"{x:.1f},{top + height - 20 - (height - 40) * (value - least) / (most - least):.1f}")
        lines.append(f'<polyline fill="none" stroke="{COLOURS[kind]}" stroke-width="2" points="{" ".join(points)}"/>')
        lines.append(f'<text x="{width + 10}" y="{40 + 18 * number}" fill="{COLOURS[kind]}">{kind}</text>')
    x = left + (width - left) * LINKED_PART
    lines.append(f'<line x1="{x}" x2="{x}" y1="{top}" y2="{top + height - 20}" stroke="#888888" stroke-dasharray="4"/>')
    lines.append(f'<text x="{x + 4}" y="{top + 10}">delinked</text>')
    lines.append(
        f'<text x="{width / 2}" y="{height + 40}" text-anchor="middle">seconds of training, of {seconds:g}</text>'
    )
    lines.append(f'<text x="{left}" y="{top - 6}">loss on held-out text, mean of the seeds</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    rows = text()
    parameters = sum(param.numel() for param in build(0).parameters())
    budget = parameters * 16 // 4
    runs = []
    for seed in range(asked.seeds):
        kinds = [None, *MOMENTS]
        # No kind is always the first.
        for moments in kinds[seed % 4 :] + kinds[: seed % 4]:
            runs.append(Run(moments, seed, asked.seconds, rows, asked.directory, budget).train())
            (asked.directory / "result.json").write_text(json.dumps(runs), encoding="utf-8")
            print(runs[-1]["kind"], seed, runs[-1]["steps"], runs[-1]["curve"][-1], flush=True)
    (asked.directory / "curves.svg").write_text(picture(runs, asked.seconds), encoding="utf-8")
    command = f"OMP_WAIT_POLICY=passive python tests/benchmarks/pseudo_to_real.py DIRECTORY --seconds {asked.seconds:g}"
    print(f"# Pseudo-to-Real\n\n{facts(command + f' --seeds {asked.seeds}')}")
    print(
        f"* model: Llama, 12 layers, {parameters / 1e6:.1f}M parameters, fp32, batch {ROWS} x {LENGTH}; states "
        f"{parameters * 16 >> 20} MiB, host_memory {budget >> 20} MiB; delinked after {LINKED_PART:.0%} of the time\n"
    )
    print("| | steps | of them linked | held-out loss, by seed | mean |\n| --- | --- | --- | --- | --- |")
    for kind in COLOURS:
        mine = [run for run in runs if run["kind"] == kind]
        losses = [run["curve"][-1][2] for run in mine]
        steps = round(statistics.mean(run["steps"] for run in mine))
        linked = round(statistics.mean(run["linked_steps"] for run in mine))
        shown = ", ".join(f"{loss:.3f}" for loss in losses)
        print(f"| {kind} | {steps} | {linked} | {shown} | **{statistics.mean(losses):.3f}** |")


if __name__ == "__main__":
    main()
