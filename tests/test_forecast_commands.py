"""`estimate` and `plan` for machines that are described."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, ViTConfig
from typer.testing import CliRunner

from ptm_accel import cli, speeds
from ptm_accel.errors import BudgetError, ConfigError, PTMError, UnsupportedError
from ptm_accel.hardware.profile import LinkRates

RUNNER = CliRunner()
ASKED = ("--page_size", "4096", "--batch_size", "2", "--length", "24")
ON_GPU = ("--gpu", "5MB@165TFLOPS", "--ram", "64MB")

LOADED = """
import gc, json, sys
from ptm_accel import cli
try:
    cli.main(sys.argv[1:])
finally:
    unneeded = {
        "datasets", "pandas", "peft", "ptm_accel.engine", "ptm_accel.integrations.accelerate", "ptm_accel.pages",
        "ptm_accel.training", "scipy", "sklearn", "torch._inductor.compile_fx", "torch.utils.tensorboard",
        "torchvision", "transformers.data", "transformers.trainer", "transformers.training_args", "trl",
    }
    found = {"unneeded": sorted(unneeded & sys.modules.keys()), "left out of collections": gc.get_freeze_count()}
    print(json.dumps(found))
"""
"""A command in a process of its own, which tells what it has loaded."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=8, vocab_size=512, num_attention_heads=4
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is described is not looked for here."""

    def refuse(*given: Any, **more: Any) -> Any:
        raise AssertionError(f"this machine was measured: {given}")

    monkeypatch.setattr(speeds, "measured_speeds", refuse)
    monkeypatch.setattr("ptm_accel.fitting.products_s", refuse)


def said(*words: str) -> str:
    found = RUNNER.invoke(cli.app, [words[0], words[1], *ASKED, *words[2:]])
    assert found.exit_code == 0, (found.output, found.exception)
    return re.sub(r"\s+", " ", found.output)


def refused(*words: str) -> PTMError:
    found = RUNNER.invoke(cli.app, [words[0], words[1], *ASKED, *words[2:]])
    assert isinstance(found.exception, PTMError), (found.output, found.exception)
    return found.exception


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_the_answer_comes_first(command: str, model: str) -> None:
    assert said(command, model, "--gpu", "4090", "--ram", "64GB").startswith(
        "It fits: all of it stays in the GPU, and nothing moves. step (forecast) "
    )
    moves = said(command, model, *ON_GPU)
    assert re.match(r"It fits\. Each step moves [\d.]+ MB in and [\d.]+ MB out between GPU and RAM\. step", moves)
    assert re.search(r"step \(forecast\) [\d.]+ (us|ms|s), [\d,]+ tokens/s", moves)
    assert re.search(r"time on compute [\d.]+ (us|ms), link [\d.]+ (us|ms)", moves)
    bounds = "compute|the link (to|from) the GPU|updates on the CPU, which begin after the backward"
    assert re.search(rf"bound by ({bounds}): [\d.]+ (us|ms) at the least", moves)
    assert "assuming 45% of 165 TFLOPS, link 26.5 GB/s each way, RAM 60.0 GB/s" in moves
    assert re.search(r"GPU [\d.]+ MB of pages, [\d.]+ MB of batch and activations; limit for pages 4.50 MB", moves)
    assert re.search(r"RAM [\d.]+ MB of pages; limit for pages 51.2 MB \(80% of it\)", moves)
    spills = said(command, model, "--gpu", "5MB@165TFLOPS", "--ram", "3MB", "--ssd", "1TB@5GB/s")
    assert "between GPU, RAM and SSD" in spills
    assert re.match(r"It fits\. .* A day of training writes [\d.]+ [TG]B to the SSD\. ", spills)
    enough = re.search(r"faster with --ram (\S+) nothing goes to the SSD: ([\d.]+ [mu]?s, [\d,]+ tokens/s) ", spills)
    assert enough is not None, spills
    with_enough = said(command, model, "--gpu", "5MB@165TFLOPS", "--ram", enough[1])
    assert "writes" not in with_enough
    assert f"step (forecast) {enough[2]} " in with_enough
    assert f"step (forecast) {enough[2]} " not in spills
    on_cpu = said(command, model, "--ram", "512MB", "--ssd", "1TB@5GB/s", "--cpu", "0.1TFLOPS")
    assert "assuming 85% of 0.1 TFLOPS, RAM 60.0 GB/s, SSD 5.00 GB/s" in on_cpu
    assert "SSD 0 B of pages; limit for pages 900 GB (90% of it)" in on_cpu


def test_what_does_not_fit_is_an_answer_of_estimate_and_an_error_of_plan(model: str) -> None:
    short = ("--gpu", "5MB@165TFLOPS", "--ram", "3MB")
    answer = said("estimate", model, *short)
    assert answer.startswith("It does not fit: the RAM has to hold ")
    ways = re.search(r"It would with --ram (\S+), or --ssd (\S+)\.", answer)
    assert ways is not None, answer
    assert str(refused("plan", model, *short)) in answer
    assert said("estimate", model, *short[:2], "--ram", ways[1]).startswith("It fits")
    assert said("estimate", model, *short, "--ssd", ways[2]).startswith("It fits")
    tiny = said("estimate", model, "--gpu", "100KB@165TFLOPS", "--ram", "64MB")
    assert re.search(r"It would with --gpu \S+@165TFLOPS, or with a smaller batch or --checkpointing\.", tiny), tiny


@pytest.mark.parametrize("processes", ["1", "2"])
def test_what_it_needs_comes_first_and_suffices(processes: str, model: str) -> None:
    given = ("--processes", processes)
    text = said("estimate", model, *given)
    gpu, gpus = ("a GPU", "a GPU") if processes == "1" else ("2 GPUs", "GPUs")
    size = r"([\d.]+[KMGT]?B)"
    first = re.match(
        rf"It needs {gpu} of at least {size}, and {size} of RAM; with {gpus} of {size} nothing moves\. Without {gpus} "
        rf"it needs at least {size} of RAM, and {size} on an SSD; with {size} of RAM nothing moves\. parameters ",
        text,
    )
    assert first is not None, text
    gpu, ram, whole, ram_alone, ssd, ram_whole = first.groups()
    cpu = ("--cpu", "1TFLOPS")
    assert said("estimate", model, *given, "--gpu", f"{gpu}@165TFLOPS", "--ram", ram).startswith("It fits. Each step")
    assert said("estimate", model, *given, "--gpu", f"{whole}@165TFLOPS").startswith("It fits: all of it stays")
    assert said("estimate", model, *given, "--ram", ram_alone, "--ssd", f"{ssd}@5GB/s", *cpu).startswith(
        "It fits. Each step"
    )
    assert said("estimate", model, *given, "--ram", ram_whole, *cpu).startswith("It fits: all of it stays")


def test_plan_tells_what_stays(model: str) -> None:
    text = said("plan", model, *ON_GPU)
    stay, leave, part = (
        re.search(rf"{name} (\S+)", text) for name in ("parameters that stay", "that leave", "in part")
    )
    assert stay is not None
    assert leave is not None
    numbers = [set(re.findall(r"\d+", each[1])) for each in (stay, leave, part) if each is not None]
    assert sum(map(len, numbers)) == len(set().union(*numbers)), "a layer is named once"
    assert said("plan", model, "--gpu", "4090", "--ram", "1GB", "--device_memory", "5MB").startswith(
        "It fits. Each step moves "
    )
    budgets = said("plan", model, *ON_GPU, "--host_memory", "40MB", "--device_memory", "4MB")
    assert "limit for pages 4.00 MB" in budgets
    assert "limit for pages 40.0 MB" in budgets


def test_adapters_need_less(model: str) -> None:
    found = [json.loads(said("estimate", model, *ON_GPU, "--json", *lora)) for lora in ((), ("--lora", "r=4"))]
    assert found[1]["trainable"] < found[0]["trainable"] / 4
    assert found[1]["states_bytes"] < found[0]["states_bytes"] / 2
    without = json.loads(said("estimate", model, "--json", "--lora", "r=4"))
    assert without["trainable"] == found[1]["trainable"]


def test_optimizers_and_processes(model: str) -> None:
    adamw, sgd = (json.loads(said("estimate", model, *ON_GPU, "--json", "--optim", name)) for name in ("adamw", "sgd"))
    assert sgd["states_bytes"] < adamw["states_bytes"]
    assert sgd["below_bytes"] < adamw["below_bytes"]
    two = json.loads(said("estimate", model, *ON_GPU, "--json", "--processes", "2"))
    assert two["processes"] == 2
    assert two["budgets"]["ram"] == adamw["budgets"]["ram"] // 2
    assert two["tokens_s"] == pytest.approx(2 * 48 / two["step_s"])
    shown = said("estimate", model, *ON_GPU, "--processes", "2", "--network", "100Gb/s")
    assert "GPU of each process" in shown
    assert "RAM 60.0 GB/s, other processes 12.5 GB/s" in shown
    slow = json.loads(said("estimate", model, *ON_GPU, "--json", "--processes", "2", "--network", "1MB/s"))
    assert slow["network_s"] > 100 * two["network_s"]
    assert slow["bound"] == "network"


@pytest.mark.process
def test_a_forecast_loads_what_it_needs(model: str) -> None:
    """The half of its time goes into imports; in a new process, as this one has imported everything."""
    words = ["estimate", model, *ASKED, *ON_GPU]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *words], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("It fits. ")
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["unneeded"] == []
    assert told["left out of collections"] > 100_000, "what was imported is looked through for garbage again and again"


def test_for_programs(model: str) -> None:
    told = json.loads(said("estimate", model, *ON_GPU, "--json"))
    assert (told["fits"], told["fit"], told["remedies"]) == (True, "moves", [])
    assert set(told["tiers"]) == {"gpu", "ram", "ssd"}
    assert set(told["tiers"]["gpu"]) == {"pages_bytes", "pass_bytes", "budget_bytes"}
    assert told["hardware"]["gpu"]["flops"] == 165e12
    assert told["step_s"] >= told["bound_s"] > 0
    assert told["tokens_s"] == pytest.approx(48 / told["step_s"])
    assert told["bound"] in {"compute", "CPU", "link in", "link out"}
    assert told["ssd_written_a_day_bytes"] == 0
    assert {"parameters", "trainable", "states_bytes", "least_bytes", "whole_bytes", "pass_bytes", "kept"} <= set(told)
    planned = json.loads(said("plan", model, *ON_GPU, "--json"))
    assert {name: told[name] for name in planned} == planned
    assert "parameters that stay" in planned["standing"]
    assert told["step_in_ram_s"] is None
    # Without any RAM as well.
    with_ssd = ("--ssd", "1TB@5GB/s", "--json")
    for ram in (("--ram", "3MB"), ()):
        spills = json.loads(said("estimate", model, *ON_GPU[:2], *ram, *with_ssd))
        assert spills["step_in_ram_s"] == told["step_s"] < spills["step_s"]
    short = json.loads(said("estimate", model, "--gpu", "5MB@165TFLOPS", "--json"))
    assert (short["fits"], short["fit"], short["step_s"], short["tokens_s"]) == (False, "not", None, None)
    assert re.fullmatch(r"--ram \S+B", short["remedies"][0])


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("--gpu", "0GB"), "gpu: '0GB' is not a size above 0; write one such as 24GB@165TFLOPS."),
        (("--gpu", "24"), "gpu: '24' has no unit; write 24GB@165TFLOPS, or the name of a card."),
        (("--gpu", "409O"), "gpu: no card '409O' is known; did you mean 4090?"),
        (("--gpu", "4090", "--ram", "64"), "ram: '64' has no unit; write a size such as 64GB."),
        (("--gpu", "4090", "--link", "-5GB/s"), "link: '-5GB/s' is no rate above 0; write one such as 25GB/s."),
        (("--ssd", "1TB"), "ssd: it belongs to a described machine;"),
        ((*ON_GPU, "--processes", "2", "--network", "fast"), "network: 'fast' is no rate above 0; write one such as"),
        ((*ON_GPU, "--network", "100Gb/s"), "network: it is between processes; write --processes beside it, or leave"),
        ((*ON_GPU, "--lora", "r=0"), "lora: 'r=0' is not a rank of 1 or more; write one such as r=16."),
        ((*ON_GPU, "--optim", "adamz"), "optim: 'adamz' is not known here; write one of adamw, adam,"),
    ],
)
def test_what_cannot_be_read(command: str, given: tuple[str, ...], text: str, model: str) -> None:
    error = refused(command, model, *given)
    assert isinstance(error, ConfigError)
    assert str(error).startswith(text)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (
            ("--device_memory", "24GB"),
            ConfigError,
            "device_memory: this machine has no GPU; describe one, such as --gpu 24GB@165TFLOPS --ram 64GB, or --gpu",
        ),
        (("--processes", "2"), ConfigError, "processes: they are only planned for a described machine;"),
        ((*ON_GPU, "--disk", "/scratch"), ConfigError, "disk: it is a folder of this machine; for a described machine"),
        (
            (*ON_GPU, "--device_memory", "6MB"),
            BudgetError,
            "device_memory: asked 5.72 MiB, the described machine",
        ),
        (
            ("--ram", "1GB", "--cpu", "1TFLOPS", "--device_memory", "6MB"),
            ConfigError,
            "device_memory: the described machine",
        ),
    ],
)
def test_plans_that_cannot_be(given: tuple[str, ...], kind: type[PTMError], text: str, model: str) -> None:
    error = refused("plan", model, *given)
    assert isinstance(error, kind)
    assert str(error).startswith(text)


def test_a_step_is_forecast_for_text(tmp_path: Path) -> None:
    config = ViTConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(tmp_path)
    error = refused("estimate", str(tmp_path), *ON_GPU)
    assert isinstance(error, UnsupportedError)
    assert str(error).startswith("a step is forecast for text only, and ViTForImageClassification takes pixel_values;")


def test_a_plan_on_a_gpu_here_counts_what_ram_lacks(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, disk = LinkRates(2e9, 2e9, 4e9), LinkRates(1e9, 1e9, 1e9)
    found = speeds.Speeds(1e12, 1e9, link, host_params=1e9)
    monkeypatch.setattr(speeds, "measured_speeds", lambda *given, **more: found)
    monkeypatch.setattr("ptm_accel.opening.default_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: SimpleNamespace(total_memory=8 << 20))
    monkeypatch.setattr("ptm_accel.hardware.rates.disk_rates", lambda paths: [disk for _ in paths])
    asked = ("plan", model, *ASKED, "--json", "--device_memory", "5MB", "--host_memory")
    roomy = json.loads(RUNNER.invoke(cli.app, [*asked, "64MiB"]).output)
    little = RUNNER.invoke(cli.app, [*asked, "4MiB"])
    assert isinstance(little.exception, BudgetError)
    said = re.fullmatch(
        r"host_memory lacks (\S+ MiB) for .* give --disk .* --host_memory at least (\S+)\.", str(little.exception)
    )
    assert said is not None
    assert RUNNER.invoke(cli.app, [*asked, said[2]]).exit_code == 0
    spills = json.loads(RUNNER.invoke(cli.app, [*asked, "4MiB", "--disk", str(tmp_path)]).output)
    missing = float(said[1].split()[0]) * 2**20
    assert spills["step_s"] > roomy["step_s"] + missing / 1e9
