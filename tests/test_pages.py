"""The site in a browser, in a wide window and on a phone, light and dark: nothing is cut or runs off a page."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (1400, 390)
SCHEMES = ("default", "slate")

# A page per frame, one after the other. Media queries of a frame see the width of the frame.
_MEASURE = """<!doctype html><body style="margin:0"><pre id="found"></pre><script>
const found = [], wait = ms => new Promise(done => setTimeout(done, ms));
const text = element => element.innerText.slice(0, 80);
const channels = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = color => channels(color).reduce((sum, value) => sum + value, 0) / 765;
async function measured(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  const loaded = new Promise(done => frame.onload = done);
  frame.src = page;
  document.body.append(frame);
  await loaded;
  await wait(100);
  const inner = frame.contentWindow, page_document = inner.document;
  for (const scheme of SCHEMES) {
    page_document.body.setAttribute("data-md-color-scheme", scheme);
    await wait(20);
    const style = inner.getComputedStyle(page_document.body);
    const all = selector => [...page_document.querySelectorAll(selector)];
    found.push({
      page, width, scheme,
      inner: inner.innerWidth,
      scroll: page_document.scrollingElement.scrollWidth,
      contrast: Math.abs(light(style.color) - light(style.backgroundColor)),
      paper: light(style.backgroundColor),
      styled: all(".md-content h1").length,
      cut: all("pre > code").filter(code => code.scrollWidth > code.clientWidth + 1).map(text),
      broken: all("td code, th code").filter(code => code.getClientRects().length > 1).map(text),
    });
  }
  frame.remove();
}
(async () => {
  for (const page of PAGES) for (const width of WIDTHS) await measured(page, width);
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script></body>"""


def _browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser to look at the pages with ({', '.join(BROWSERS)})")
    return found


def _built(site: Path) -> list[str]:
    """Builds the site, and names its pages; of the many of benchmarks, the one with most tables."""
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip('the site is built with ".[docs]"')
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
        timeout=120,
    )
    names = [path.stem for path in sorted((ROOT / "docs").glob("*.md"))]
    return ["index.html" if name == "index" else f"{name}/index.html" for name in [*names, "benchmarks/peers"]]


def _looked_at(browser: str, site: Path, pages: list[str]) -> list[dict[str, Any]]:
    """What the browser finds on each page, at each width and in each scheme."""
    script = f"const PAGES = {pages}, WIDTHS = {list(WIDTHS)}, SCHEMES = {list(SCHEMES)};"
    (site / "measure.html").write_text(_MEASURE.replace("<script>", f"<script>{script}"), encoding="utf-8")
    # Frames of other files may be looked into, and what the page waits for takes no time.
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--window-size=1500,1000"]
    flags += [f"--user-data-dir={site.parent / 'browser'}", "--virtual-time-budget=120000", "--dump-dom"]
    done = subprocess.run(
        [browser, *flags, (site / "measure.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text is not None, done.stderr[-3000:]
    assert text.group(1), "the browser has not come to the last page"
    found: list[dict[str, Any]] = json.loads(html.unescape(text.group(1)))
    return found


@pytest.mark.process
def test_nothing_runs_off_a_page(tmp_path: Path) -> None:
    browser = _browser()
    pages = _built(tmp_path / "site")
    found = _looked_at(browser, tmp_path / "site", pages)
    assert len(found) == len(pages) * len(WIDTHS) * len(SCHEMES)
    for look in found:
        where = f"{look['page']}, {look['width']} pixels, {look['scheme']}"
        assert look["inner"] == look["width"], where
        assert look["styled"] == 1, where
        assert look["scroll"] <= look["inner"], where
        assert (look["paper"] > 0.5) == (look["scheme"] == "default"), where
        assert look["contrast"] > 0.5, where
        assert not look["broken"], where
        if look["width"] == max(WIDTHS):
            assert not look["cut"], where
