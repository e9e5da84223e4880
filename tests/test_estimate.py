"""What a model will need, beside what it then does need."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config
from typer.testing import CliRunner

from ptm_accel import cli
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, ConfigError
from ptm_accel.estimate import estimate
from ptm_accel.memory.budget import Tag, Tier
from ptm_accel.memory.disk import bounce_bytes
from ptm_accel.memory.transfer import round_up
from ptm_accel.model.forecast import ShapeSpec
from ptm_accel.model.kept import Kept
from ptm_accel.units import format_bytes
from tests.figures import FIGURE, named_bytes
from tests.tiers import PAGE

CONFIG = LlamaConfig(hidden_size=64, intermediate_size=176, num_hidden_layers=3, vocab_size=512, num_attention_heads=4)
BATCH = {"input_ids": ShapeSpec((2, 24)), "labels": ShapeSpec((2, 24))}


def model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).to(dtype)


@pytest.mark.usefixtures("exact_figures")
@pytest.mark.parametrize(("dtype", "masters"), [(torch.float32, None), (torch.bfloat16, "fp32")])
def test_the_least_is_what_training_is_refused_below(dtype: torch.dtype, masters: str | None, tmp_path: Path) -> None:
    with torch.device("meta"):
        meta = LlamaForCausalLM(CONFIG).to(dtype)
    found = estimate(meta, BATCH, master_weights=masters is not None, page_size=PAGE)
    assert found.parameters == found.trainable == sum(p.numel() for p in meta.parameters())
    assert found.least_bytes < found.states_bytes < found.whole_bytes

    def attach(nbytes: int) -> Engine:
        config = PTMConfig(host_memory=nbytes, page_size=PAGE, disk=str(tmp_path), master_weights=masters)
        return Engine.attach(model(dtype), config, device=torch.device("cpu"))

    with pytest.raises(BudgetError, match="cannot train under less than") as refused:
        attach(found.least_bytes - PAGE)
    figure = named_bytes(f"at least {FIGURE}", refused.value)
    engine = attach(figure)
    # A file system that refuses direct transfers needs no bounce buffers.
    staging = engine.memory.budgets[Tier.HOST].used_by_tag().get(Tag.STAGING, 0)
    assert staging in (0, bounce_bytes(1, PAGE))
    assert figure - staging == found.least_bytes - bounce_bytes(1, PAGE)
    assert engine.needs.floor.states_bytes - staging == found.states_bytes
    engine.close()


def test_activations_grow_with_the_batch_and_frozen_parameters_need_less() -> None:
    whole = model()
    small, large = (estimate(whole, {name: ShapeSpec((rows, 24)) for name in BATCH}, page_size=PAGE) for rows in (2, 8))
    assert small.pass_bytes is not None
    assert large.pass_bytes is not None
    assert 2 * small.pass_bytes < large.pass_bytes < 5 * small.pass_bytes
    assert estimate(whole, page_size=PAGE).pass_bytes is None
    for param in whole.model.parameters():
        param.requires_grad_(False)
    frozen = estimate(whole, BATCH, page_size=PAGE)
    assert frozen.trainable == whole.lm_head.weight.numel()
    assert frozen.states_bytes < small.states_bytes
    assert whole.lm_head.weight.device.type == "cpu", "unchanged"


@pytest.mark.parametrize("extra", [[], ["--checkpointing"], ["--bf16"], ["--dtype", "bfloat16"]])
def test_on_the_command_line(extra: list[str], tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    arguments = ["estimate", str(tmp_path), "--batch_size", "2", "--length", "24", *extra]
    shown = CliRunner().invoke(cli.app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "a batch of 2 x 24" in shown.output
    told = json.loads(CliRunner().invoke(cli.app, [*arguments, "--json"]).output)
    assert told["parameters"] == sum(p.numel() for p in model().parameters())
    assert told["pass_bytes"] > 0
    # Three layers and an output of 2 x 24 tokens, 64 wide.
    assert told["border_bytes"] == 4 * 2 * 24 * 64 * (2 if "bfloat16" in extra else 4)
    said = f"kept with micro_batches: by_layer {format_bytes(told['border_bytes'])} for each micro-batch of a step"
    assert said in " ".join(shown.output.split())


def test_each_of_several_processes_keeps_a_part() -> None:
    found = [estimate(model(), BATCH, page_size=PAGE, processes=count) for count in (1, 2, 4)]
    one, two, four = found
    assert [each.processes for each in found] == [1, 2, 4]
    assert [each.parameters for each in found] == [one.parameters] * 3
    assert [each.pass_bytes for each in found] == [one.pass_bytes] * 3, "each has a batch of its own"
    assert one.gathered_bytes == one.network_bytes == 0 < two.gathered_bytes
    params = list(model().parameters())
    for found_of, count in ((one, 1), (two, 2), (four, 4)):
        # A range begins at a multiple of 64 elements; norms are small, and whole everywhere.
        ranges = [p.numel() if p.dim() == 1 else round_up(-(-p.numel() // count), 64) for p in params]
        each = sum(round_up(4 * numel) for numel in ranges)
        assert found_of.kept == Kept(each, each, 0, 2 * each)
        assert 0 <= found_of.states_bytes - 4 * each <= PAGE, "buffers"
    # Two gathers and a reduction of all but the range that a process has.
    large = sum(p.nbytes for p in model().parameters() if p.dim() > 1)
    assert two.network_bytes == 3 * large // 2
    assert four.network_bytes == 3 * large * 3 // 4
    wide = estimate(model(torch.bfloat16), master_weights=True, page_size=PAGE, processes=2).kept
    assert wide.masters_bytes == wide.gradients_bytes == wide.optimizer_bytes // 2


def test_processes_too_many_for_ranges_have_all_of_it() -> None:
    most = max(p.numel() for p in model().parameters())
    one, many = (estimate(model(), page_size=PAGE, processes=count) for count in (1, most))
    assert many.kept.parameters_bytes == sum(round_up(p.nbytes) for p in model().parameters())
    assert many.states_bytes == one.states_bytes
    assert many.network_bytes == 0


@pytest.mark.parametrize("processes", [0, -2])
def test_no_processes(processes: int) -> None:
    said = f"processes: got {processes}; write how many train one model together, 1 or more."
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        estimate(model(), page_size=PAGE, processes=processes)


def test_processes_on_the_command_line(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    arguments = ["estimate", str(tmp_path), "--page_size", "4096"]
    alone = CliRunner().invoke(cli.app, arguments).output
    assert CliRunner().invoke(cli.app, [*arguments, "--processes", "1"]).output == alone
    assert "of 1 processes" not in alone
    assert "by_layer" in alone
    told = json.loads(CliRunner().invoke(cli.app, [*arguments, "--processes", "2", "--json"]).output)
    found = estimate(model(), BATCH, page_size=PAGE, processes=2)
    assert told["kept"] == asdict(found.kept)
    assert (told["processes"], told["least_bytes"]) == (2, found.least_bytes)
    shown = CliRunner().invoke(cli.app, [*arguments, "--processes", "2"]).output
    kept, least, below = found.kept, 2 * found.least_bytes, 2 * found.below_bytes
    said = [
        "each of 2 processes with shard: full; figures of the largest one",
        f"its states {format_bytes(found.states_bytes)} of these parameters {format_bytes(kept.parameters_bytes)}, "
        f"optimizer state {format_bytes(kept.optimizer_bytes)}, gradients {format_bytes(kept.gradients_bytes)} all in",
        f"of the least, for whole layers {format_bytes(found.gathered_bytes)}, without those in use",
        f"2 on one machine at least {format_bytes(least)} of memory, and {format_bytes(below)} of disk",
        f"over the network {format_bytes(found.network_bytes)} to each process in a micro-batch",
    ]
    for row in said:
        assert row in " ".join(shown.split())
    assert "by_layer" not in shown


def test_smaller_pages_need_less(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    told = [
        json.loads(CliRunner().invoke(cli.app, ["estimate", str(tmp_path), "--json", *extra]).output)["least_bytes"]
        for extra in ([], ["--page_size", "4MiB"], ["--page-size", "64KiB"])
    ]
    # By the bounce buffers, and by what is kept whole since it is small beside a page.
    assert told[0] == told[1] >= told[2] + bounce_bytes(1, (4 << 20) - (64 << 10))
    with pytest.raises(ConfigError, match="page_size: '3MiB' is"):
        CliRunner().invoke(cli.app, ["estimate", str(tmp_path), "--page_size", "3MiB"], catch_exceptions=False)


def test_other_kinds_of_models(tmp_path: Path) -> None:
    sizes = {"d_model": 256, "d_ff": 512, "num_layers": 2, "num_heads": 4, "d_kv": 64, "vocab_size": 512}
    T5Config(**sizes, architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    told = json.loads(CliRunner().invoke(cli.app, ["estimate", str(tmp_path), "--length", "8", "--json"]).output)
    assert told["pass_bytes"] > 0
    assert told["border_bytes"] is None, "an encoder-decoder is not run so"


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no configuration that can be read"):
        CliRunner().invoke(cli.app, ["estimate", str(tmp_path)], catch_exceptions=False)
    with pytest.raises(ConfigError, match="dtype: 'int8' is unknown"):
        CliRunner().invoke(cli.app, ["estimate", str(tmp_path), "--dtype", "int8"], catch_exceptions=False)
