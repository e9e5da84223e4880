"""The README and the documentation: their Python runs, and nothing that a reader looks for is missing."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments

import ptm_accel
from ptm_accel import config as options
from ptm_accel import errors
from ptm_accel.config import DiskConfig, PTMConfig
from ptm_accel.engine import Engine
from tests.zoo import ENTRIES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "examples" / "README.md", *DOCS.glob("*.md")])
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_PYTHON = [page for page in PAGES if _PYTHON.search(page.read_text(encoding="utf-8"))]


@pytest.fixture
def what_readers_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that snippets take for granted, tiny; snippets run in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ssd").mkdir()
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    rows = [{"input_ids": list(range(i, i + 8)), "labels": list(range(i, i + 8))} for i in range(16)]
    model = LlamaForCausalLM(config)
    model.save_pretrained("my-model")
    words = {word: number for number, word in enumerate(["<pad>", "<end>", *"abcdefghijklmnop"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    texts = ["a b c d e f", "e f g h i", "i j k l m n", "m n o p"] * 2
    yield {
        "model": model,
        "data": Dataset.from_list(rows),
        "texts": Dataset.from_dict({"text": texts}),
        "preferences": Dataset.from_list([{"prompt": t[:3], "chosen": t[3:], "rejected": t[:5]} for t in texts]),
        "tokenizer": PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>"),
        "args": TrainingArguments(
            "outputs/run", max_steps=2, save_steps=1, per_device_train_batch_size=2, report_to="none", use_cpu=True
        ),
    }
    ptm_accel.disable()


def test_the_pages_have_snippets() -> None:
    assert {"README.md", "docs/index.md", "docs/trainer.md", "docs/numbers.md"} <= {_name(p) for p in WITH_PYTHON}


@pytest.mark.parametrize("page", WITH_PYTHON, ids=_name)
def test_snippets_run(page: Path, what_readers_have: dict[str, Any], tmp_path: Path) -> None:
    """All Python of a page runs, one snippet after another, as a reader would type it."""
    names = {**what_readers_have, "__name__": "snippet"}
    for number, code in enumerate(_PYTHON.findall(page.read_text(encoding="utf-8"))):
        # What depends on the reader's machine: the folder of the SSD, and how much memory there is to give.
        local = code.replace("/mnt/ssd", str(tmp_path / "ssd")).replace('"8GiB"', '"256MiB"')
        # That it runs is shown by two steps of a larger model as well as by more.
        local = local.replace("max_steps=5,", "max_steps=2,")
        exec(compile(local, f"{_name(page)}, snippet {number + 1}", "exec"), names)


def test_every_option_is_documented() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    table = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert table == {field.name for field in fields(PTMConfig)}
    for field in fields(DiskConfig):
        assert f"{field.name}:" in text, f"disk.{field.name} is not shown in docs/configuration.md"


def test_every_default_is_the_documented_one() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    defaults = {line.split("`")[1]: line.rsplit("|", 2)[1].strip() for line in text.splitlines() if line[:3] == "| `"}
    assert defaults["page_size"] == f"`{PTMConfig().page_size}`"
    assert defaults["update"] == f"`{PTMConfig().update}`"
    assert defaults["shard"] == f"`{PTMConfig().shard}`"
    assert defaults["host_memory"].startswith(options.HOST_SHARE)
    assert defaults["device_memory"].startswith(options.DEVICE_SHARE)
    assert f"limit {options.DISK_SHARE}" in defaults["disk"]


def test_every_error_is_in_troubleshooting() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^## (\w+Error)$", text, re.MULTILINE))
    classes = {
        name for name, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, errors.PTMError)
    }
    assert headings == classes


def test_every_tested_model_is_in_the_table() -> None:
    table = re.sub(r"[^a-z0-9|]", "", (DOCS / "compatibility.md").read_text(encoding="utf-8").lower())
    missing = [name for name in ENTRIES if re.sub(r"-tied$|-", "", name) not in table]
    assert not missing


def _strings_of_the_source() -> set[str]:
    """All texts in the package's code; of an f-string, its fixed parts."""
    files = [*(ROOT / "ptm_accel").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    constants = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {text for text in constants if isinstance(text, str)}


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "troubleshooting.md"], ids=_name)
def test_quoted_messages_are_those_of_the_code(page: Path) -> None:
    """Readers find a message by its text, so a message that changed must change there as well."""
    strings = _strings_of_the_source()
    tables = re.findall(r"^\| message \|.*\n\|.*\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    cells = [line.split(" | ")[0] for table in tables for line in table.splitlines()]
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]
    assert len(quotes) > 4
    for quote in quotes:
        for part in filter(None, (piece.strip() for piece in quote.split("..."))):
            assert any(part in text for text in strings), f"{_name(page)}: `{quote}` is in no message of the code"


def test_every_public_name_is_documented() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    missing = [name for name in ptm_accel.__all__ if not name.startswith("__") and name not in text]
    assert not missing


def test_every_log_key_is_documented(tmp_path: Path) -> None:
    text = (DOCS / "trainer.md").read_text(encoding="utf-8")
    engine = Engine.attach(nn.Linear(8, 8), PTMConfig(host_memory="64MiB", page_size=4096, disk=str(tmp_path)))
    keys = set(engine.metrics.since_last())
    engine.close()
    assert "ptm_peak_disk_gib" in keys
    assert not [key for key in keys if f"`{key}`" not in text]


def test_every_benchmark_is_linked() -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    pages = {page.name for page in (DOCS / "benchmarks").glob("*.md")}
    assert pages
    table = text[text.index("## All pages") :]
    assert set(re.findall(r"\(benchmarks/([\w.-]+\.md)\)", table)) == pages


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if target.startswith("http"):
            continue
        file = page if not target else (page.parent / target).resolve()
        assert file.exists(), f"{_name(page)}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{_name(page)}: {link}"


def test_the_readme_has_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert 'pip install -e ".[examples]" && python examples/pretrain_clm.py' in lines
    assert 'pip install -e ".[test]" && pytest' in lines


def test_the_changelog_knows_this_version() -> None:
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", ptm_accel.__version__]


def test_the_chart_has_the_figures_of_its_page() -> None:
    chart = runpy.run_path(str(ROOT / "tests" / "benchmarks" / "headline_chart.py"))
    assert (DOCS / "img" / "peers.svg").read_text(encoding="utf-8") == chart["drawn"]()


def test_the_figure_is_well_formed() -> None:
    figures = list((DOCS / "img").glob("*.svg"))
    assert figures
    for figure in figures:
        root = ElementTree.parse(figure).getroot()
        assert root.find("{http://www.w3.org/2000/svg}title") is not None
