"""Whether a model fits a machine that is described, beside what a run on such tiers refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, ConfigError
from ptm_accel.fitting import GPU, OPTIMIZERS, RAM, SSD, Budgets, Fit, Fitting, fitting, optimizer_memory_named
from ptm_accel.hardware.cards import KERNEL_SHARE
from ptm_accel.hardware.described import Hardware, described
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.model.forecast import ShapeSpec
from ptm_accel.outlook import Work
from ptm_accel.schedule.bound import Resource
from ptm_accel.speeds import CPU_SHARE
from ptm_accel.units import MIB
from tests.mock_device import MockDevice
from tests.tiers import PAGE, config

CONFIG = LlamaConfig(hidden_size=64, intermediate_size=176, num_hidden_layers=8, vocab_size=512, num_attention_heads=4)
BATCH = {name: ShapeSpec((2, 24)) for name in ("input_ids", "labels")}
AMPLE = 1 << 40


def model() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(CONFIG).train()


def work(**more: Any) -> Work:
    return Work(**{"model": model(), "batch": BATCH, "page_size": PAGE, **more})


def machine(**given: str) -> Hardware:
    asked: dict[str, str | None] = dict.fromkeys(("gpu", "ram", "ssd", "link", "cpu"))
    found = described(**{**asked, **given})
    assert found is not None
    return found


ON_GPU = machine(gpu="4090", ram="64GB", ssd="1TB@5GB/s")
ON_CPU = machine(ram="64GB", ssd="1TB@5GB/s", cpu="0.2TFLOPS")


def held(gpu: int | None, ram: int, ssd: int = 0, hardware: Hardware | None = None) -> Fitting:
    hardware = hardware or (ON_CPU if gpu is None else ON_GPU)
    return fitting(work(), hardware, Budgets(gpu, ram, ssd))


def test_there_are_three_answers() -> None:
    for hardware in (ON_GPU, ON_CPU):
        found = fitting(work(), hardware)
        assert found.found is not None
        assert (found.fit, found.found.in_bytes, found.written_a_day_bytes) == (Fit.STAYS, 0, 0)
        assert found.found.bound[1] is Resource.COMPUTE
    needs = work().estimate()
    moves = held(needs.least_bytes + 3 * MIB, AMPLE)
    assert (moves.fit, moves.tiers[SSD].pages_bytes, moves.written_a_day_bytes) == (Fit.MOVES, 0, 0)
    assert moves.found is not None
    assert moves.found.in_bytes > moves.found.out_bytes > 0
    assert held(MIB // 2, AMPLE).fit is Fit.NOT


def test_what_does_not_fit_ram_is_on_the_ssd_and_passes_it_once_a_step() -> None:
    needs = work().estimate()
    gpu, ram = needs.least_bytes + 3 * MIB, needs.below_bytes // 2
    assert held(gpu, ram).fit is Fit.NOT
    spills = held(gpu, ram, AMPLE)
    assert (spills.fit, spills.tiers[RAM].pages_bytes) == (Fit.MOVES, ram)
    assert 0 < spills.tiers[SSD].pages_bytes <= work().grouped(gpu).below_bytes - ram
    assert spills.found is not None
    missing = spills.tiers[SSD].pages_bytes
    assert spills.found.cost.written_bytes == missing < spills.found.out_bytes
    assert spills.found.cost.read_bytes == missing < spills.found.in_bytes
    assert spills.found.step_s > spills.found.link_s + spills.found.disk_s
    assert spills.found.cost.host_s == 0, "updates on the CPU would wait for the disk"
    day = missing * 86400 / spills.found.step_s
    assert spills.written_a_day_bytes == pytest.approx(day)
    roomy = held(gpu, AMPLE)
    assert roomy.found is not None
    assert roomy.found.step_s < spills.found.step_s


def refused_by_a_run(memory: Capacities, device: Any) -> str | None:
    """What a run says of the model on such tiers; None where it takes it."""
    torch.manual_seed(0)
    opened = build_memory(memory, device)
    try:
        model = LlamaForCausalLM(CONFIG)
        engine = Engine.attach(model, config(), memory=opened)
        engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        engine.close()
    except BudgetError as refused:
        return str(refused)
    finally:
        opened.close()
    return None


@pytest.mark.usefixtures("exact_figures")
def test_a_run_refuses_the_same_of_host_memory(tmp_path: Path) -> None:
    least = work().estimate().least_bytes
    for nbytes, fits in ((least, True), (least - PAGE, False)):
        found = held(None, nbytes, AMPLE)
        assert (found.fit is not Fit.NOT) is fits
        tiers = Capacities(page_bytes=PAGE, host_bytes=nbytes, disk_paths=[tmp_path])
        said = refused_by_a_run(tiers, torch.device("cpu"))
        assert (said is None) is fits
    assert said is not None
    figure = re.search(r"host_memory to at least (\d+)B", said)
    assert figure is not None, said
    assert found.remedies[0] == {RAM: least}
    # A file system that refuses direct transfers needs no bounce buffers.
    assert least - int(figure[1]) in (0, 4 * PAGE)


@pytest.mark.parametrize("disk_pages", [0, 64])
def test_a_run_refuses_the_same_below_a_device(disk_pages: int, tmp_path: Path) -> None:
    needs, gpu = work().estimate(), 4 * MIB
    assert needs.least_bytes + MIB < gpu < needs.whole_bytes
    disk = disk_pages * PAGE
    short = held(gpu, PAGE * 32, disk)
    missing = short.remedies[0][RAM]
    for nbytes, fits in ((missing, True), (missing - PAGE, False)):
        found = held(gpu, nbytes, disk)
        assert (found.fit is not Fit.NOT) is fits
        tiers = Capacities(
            page_bytes=PAGE,
            host_bytes=nbytes,
            device_bytes=gpu,
            disk_bytes=disk or None,
            disk_paths=[tmp_path] if disk else [],
        )
        said = refused_by_a_run(tiers, MockDevice())
        assert (said is None) is fits, said


@pytest.mark.parametrize(
    "hardware",
    [
        machine(gpu="5MB@165TFLOPS"),
        machine(gpu="5MB@165TFLOPS", ram="2MB"),
        machine(gpu="5MB@165TFLOPS", ram="2MB", ssd="1MB@5GB/s"),
        machine(gpu="100KB@165TFLOPS", ram="64GB"),
        machine(gpu="100KB@165TFLOPS", ram="1MB", ssd="1MB@5GB/s"),
        machine(ram="510MB", cpu="1TFLOPS"),
        machine(ram="100MB", cpu="1TFLOPS"),
        machine(ram="503MB", ssd="1MB@5GB/s", cpu="1TFLOPS"),
    ],
    ids=str,
)
@pytest.mark.parametrize("processes", [1, 2])
def test_what_would_make_it_fit_does(hardware: Hardware, processes: int) -> None:
    from ptm_accel.commands.forecasting import answer, remedies_of

    asked = work(processes=processes)
    short = fitting(asked, hardware)
    assert short.fit is Fit.NOT
    ways = remedies_of(short, hardware, processes)
    assert ways
    said = answer(short, hardware, processes, smaller="")
    assert said.startswith("It does not fit: the ")
    for way in ways:
        assert way in said
        given = re.findall(r"--(\w+) (\S+)", way)
        options = {"gpu": None, "ram": None, "ssd": None, "link": None, "cpu": None, **dict(given)}
        if hardware.gpu is None:
            options["cpu"] = "1TFLOPS"
        options["ram"] = options["ram"] or "1GB"
        options["gpu"] = options["gpu"] or (None if hardware.gpu is None else "5MB@165TFLOPS")
        new = described(**options)
        assert new is not None
        names = {name for name, _ in given}
        changed = replace(
            hardware,
            gpu=new.gpu if "gpu" in names else hardware.gpu,
            ram_bytes=new.ram_bytes if "ram" in names else hardware.ram_bytes,
            ssd_bytes=new.ssd_bytes if "ssd" in names else hardware.ssd_bytes,
            ssd=new.ssd if "ssd" in names else hardware.ssd,
        )
        assert fitting(asked, changed).fit is not Fit.NOT, way


def test_compute_takes_a_share_of_the_published_rate() -> None:
    found = fitting(work(), ON_GPU).found
    assert found is not None
    assert ON_GPU.gpu is not None
    touched = work().touched()
    operations = touched.flops(backward=False) + touched.flops(backward=True)
    assert found.cost.forward_s + found.cost.backward_s == pytest.approx(operations / (165e12 * KERNEL_SHARE))


def test_a_cpu_also_takes_time_for_memory_and_gradients() -> None:
    found = fitting(work(), ON_CPU).found
    assert found is not None
    touched = work().touched()
    operations = touched.flops(backward=False) + touched.flops(backward=True)
    products = operations / (0.2e12 * CPU_SHARE)
    assert products < found.cost.forward_s + found.cost.backward_s < 20 * products
    # Beside transfers updates are slower than alone.
    tight = held(None, work().estimate().least_bytes + 2 * MIB, AMPLE).found
    assert tight is not None
    assert tight.cost.update_s > 2 * found.cost.update_s


def test_several_processes_keep_less_each_and_wait_for_one_another() -> None:
    one, two = (fitting(work(processes=count), ON_GPU) for count in (1, 2))
    assert two.needs.states_bytes < one.needs.states_bytes
    assert one.found is not None
    assert two.found is not None
    assert one.found.cost.network_s == 0 < two.found.cost.network_s == two.needs.network_bytes / ON_GPU.network_bytes_s
    assert two.found.step_s >= two.found.cost.network_s


def test_one_pass_is_followed_and_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forecast takes grows with the number of operations of one pass, not with the size of the model."""
    passes = []
    forward = LlamaForCausalLM.forward

    def counted(self: nn.Module, **batch: Any) -> Any:
        passes.append(batch["input_ids"].shape)
        return forward(self, **batch)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    large = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, vocab_size=128256, num_attention_heads=64
    )
    with torch.device("meta"):
        huge = LlamaForCausalLM(large).to(torch.bfloat16).train()
    batch = {name: ShapeSpec((1, 2048)) for name in ("input_ids", "labels")}
    found = fitting(Work(model=huge, batch=batch), machine(gpu="4090", ram="128GB"))
    assert found.fit is Fit.MOVES
    assert passes == [(1, 2048)]
    assert all(param.device.type == "meta" for param in huge.parameters())


@pytest.mark.parametrize(("name", "states"), [("adamw", 2), ("adamw_torch_fused", 2), ("SGD", 0), ("adagrad", 1)])
def test_optimizers_by_name(name: str, states: int) -> None:
    assert optimizer_memory_named(name).state_tensors == states


def test_an_optimizer_that_is_not_known() -> None:
    said = f"optim: 'lamb' is not known here; write one of {', '.join(OPTIMIZERS)}."
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        optimizer_memory_named("lamb")


def test_tiers_of_the_answer() -> None:
    assert list(fitting(work(), ON_GPU).tiers) == [GPU, RAM, SSD]
    assert list(fitting(work(), ON_CPU).tiers) == [RAM, SSD]
