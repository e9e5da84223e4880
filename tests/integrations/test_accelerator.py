"""The Accelerator on pages, without a Trainer: a loop as accelerate's documentation writes it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from ptm_accel.integrations.accelerate import PagedGradScaler, PTMAccelerator
from ptm_accel.integrations.accelerate import accelerator as accelerator_module
from torch import nn

from ptm_accel.engine import engine_of
from ptm_accel.errors import UnsupportedError
from tests.prepared import run_prepared

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(params=["roomy", "tight"])
def ptm_options(request: pytest.FixtureRequest, tiny: ModuleType, tmp_path: Path) -> dict[str, Any]:
    return tiny.budget(request.param, tmp_path)


def _loop(accelerator: Accelerator, tiny: ModuleType, *, by_value: float | None = None, steps: int = 6) -> Any:
    model = tiny.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    # The optimizer first, as nothing forbids.
    optimizer, model, schedule = accelerator.prepare(optimizer, model, schedule)
    seen = []
    for row in tiny.data(steps):
        with accelerator.accumulate(model):
            loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and by_value is None:
                seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            elif accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), by_value)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen.append(loss.item())
    return seen, tiny.weights(accelerator.unwrap_model(model)), accelerator.get_state_dict(model)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}])
@pytest.mark.parametrize("by_value", [None, 1e-3])
def test_a_loop_gives_the_same_numbers(
    changes: dict[str, Any], by_value: float | None, tiny: ModuleType, ptm_options: dict[str, Any]
) -> None:
    plain = _loop(Accelerator(cpu=True, **changes), tiny, by_value=by_value)
    ours = _loop(PTMAccelerator(cpu=True, ptm_config=ptm_options, **changes), tiny, by_value=by_value)
    assert ours[0] == plain[0]
    assert tiny.same(ours[1], plain[1])
    assert tiny.same(ours[2], plain[2])


_SHOWN = """
import logging
from ptm_accel.integrations.accelerate import PTMAccelerator
from torch import nn
accelerator = PTMAccelerator(cpu=True, ptm_config={"host_memory": "64MiB"})
%s
model = accelerator.prepare(nn.Linear(8, 8))
accelerator.prepare(model)
"""


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("setup", "prefix"),
    [
        ("", "[ptm_accel] "),
        ("logging.basicConfig(level=logging.INFO)", "INFO:ptm_accel.opening:"),
        ("PTMAccelerator.is_main_process = False", None),
    ],
)
def test_the_options_are_shown_once_unless_the_script_logs_in_its_own_way(
    setup: str, prefix: str | None, tmp_path: Path
) -> None:
    done = run_prepared("-c", _SHOWN % setup, cwd=tmp_path)
    assert done.code == 0, done.err
    lines = [line for line in done.err.splitlines() if "host_memory: 64.00 MiB (given)" in line]
    assert lines == ([] if prefix is None else [f"{prefix}host_memory: 64.00 MiB (given)"])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_steps_of_a_loop_are_counted(accumulation: int, tiny: ModuleType, ptm_options: dict[str, Any]) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config=ptm_options, gradient_accumulation_steps=accumulation)
    model = tiny.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for row in tiny.data(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss)
            optimizer.step()
            optimizer.zero_grad()
    engine = engine_of(model)
    assert engine is not None
    steps = 6 // accumulation
    assert engine.metrics.steps == steps
    assert engine.metrics.summary().startswith(f"{steps} steps")


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def _scaled(scaler: Any, accelerator: Accelerator, tiny: ModuleType, fused: bool) -> Any:
    """Six steps under loss scaling; the third loss is infinite."""
    accelerator.scaler = scaler
    # What fp16 is on CUDA: gradients are unscaled before they are clipped.
    accelerator.native_amp = True
    model = tiny.model()
    # Not the model's, as a loss may have it.
    temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([temperature, *model.parameters()], lr=1e-3, fused=fused)
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = []
    for number, row in enumerate(tiny.data(6)):
        loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss * temperature
        accelerator.backward(loss * float("inf") if number == 2 else loss)
        if number % 2:
            seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        seen += [loss.item(), accelerator.scaler.get_scale(), optimizer.step_was_skipped, temperature.item()]
        if number == 2:
            # Nothing has used them.
            seen += [float(param.grad.isfinite().all()) for param in model.parameters()]
        optimizer.zero_grad()
    engine = engine_of(model)
    assert engine is None or engine.metrics.steps == 6, "those that are skipped move as much"
    return seen, tiny.weights(model)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("fused", [False, True])
def test_loss_scaling_skips_the_same_steps(
    fused: bool, tiny: ModuleType, ptm_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accelerator, "mixed_precision", "fp16")
    options = {"init_scale": 256.0, "growth_interval": 2}
    plain = _scaled(torch.amp.GradScaler("cpu", **options), Accelerator(cpu=True), tiny, fused)
    paged = PTMAccelerator(cpu=True, ptm_config=ptm_options)
    ours = _scaled(PagedGradScaler("cpu", **options), paged, tiny, fused)
    assert ours[0] == plain[0]
    assert (True in plain[0]) is not fused
    assert tiny.same(ours[1], plain[1])


@pytest.mark.parametrize("make", [_momentum, _adamw])
@pytest.mark.parametrize("memory", [200_000, 100_000_000])
def test_zeros_that_zero_grad_leaves_for_a_layer_that_is_skipped(make: Any, memory: int, tmp_path: Path) -> None:
    def loop(accelerator: Accelerator) -> list[Any]:
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
        model, optimizer = accelerator.prepare(layers, make(layers))
        seen = []
        for step in range(5):
            x = torch.ones(2, 64)
            for number, layer in enumerate(model):
                x = layer(x) if number != 3 or step == 0 else x
            accelerator.backward(x.square().mean())
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 3)
            seen += [param.detach().sum().item() for param in model.parameters()]
            seen += [param.grad is None for param in model.parameters()]
        return seen

    ptm_options = {"host_memory": memory, "page_size": 4096, "disk": str(tmp_path)}
    assert loop(PTMAccelerator(cpu=True, ptm_config=ptm_options)) == loop(Accelerator(cpu=True))


@pytest.mark.parametrize("forgets", ["optimizer", "model", "by hand", "nobody"])
def test_gradients_that_torch_would_use_once_more_are_told_of(
    forgets: str, tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config=tiny.budget("tight", tmp_path))
    model = tiny.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for row in tiny.data(3):
        accelerator.backward(model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss)
        optimizer.step()
        if forgets in ("optimizer", "model"):
            (optimizer if forgets == "optimizer" else model).zero_grad()
        elif forgets == "by hand":
            for param in model.parameters():
                param.grad = None
    assert caplog.text.count("was used up by the last step, and zero_grad() has not been called since") == (
        forgets == "nobody"
    )


def test_fp16_gradients_are_refused(tiny: ModuleType) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config={"host_memory": "64MiB"})
    accelerator.scaler = PagedGradScaler("cpu")
    model = nn.Linear(64, 64, dtype=torch.float16)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    accelerator.backward(model(torch.ones(1, 64, dtype=torch.float16)).float().mean())
    with pytest.raises(UnsupportedError, match=r"Attempting to unscale FP16 gradients \(of shape \(64, 64\)\)"):
        optimizer.step()


def test_the_scaler_of_fp16_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Accelerator.__init__

    def with_scaler(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
    monkeypatch.setattr("accelerate.Accelerator.__init__", with_scaler)
    accelerator = PTMAccelerator(cpu=True, kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    assert isinstance(accelerator.scaler, PagedGradScaler)
    assert accelerator.scaler.state_dict()["scale"] == 8.0


def test_a_gradient_scaler_for_an_optimizer_that_is_not_on_pages() -> None:
    weight = nn.Parameter(torch.ones(4))
    runs = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=4.0), PagedGradScaler("cpu", init_scale=4.0)):
        param = nn.Parameter(weight.detach().clone())
        optimizer = torch.optim.SGD([param], lr=0.5)
        scaler.scale((param * 3).sum()).backward()
        scaler.step(optimizer)
        runs.append(param.tolist())
    assert runs[0] == runs[1] == [-0.5] * 4


def test_an_optimizer_without_its_model_is_refused(tiny: ModuleType) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config={"host_memory": "64MiB"})
    stray = tiny.model()
    with pytest.raises(
        UnsupportedError, match=r"the optimizer SGD holds 30 parameters, and none of them is of a model"
    ):
        accelerator.prepare(torch.optim.SGD(stray.parameters(), lr=0.1))


def test_an_optimizer_of_another_accelerator_is_refused(tiny: ModuleType) -> None:
    model = tiny.model()
    prepared = Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator = PTMAccelerator(cpu=True, ptm_config={"host_memory": "64MiB"})
    with pytest.raises(UnsupportedError, match=r"the optimizer SGD was prepared by an Accelerator without pages"):
        accelerator.prepare(model, prepared)


def test_several_optimizers_of_one_model(tiny: ModuleType, tmp_path: Path) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config=tiny.budget("tight", tmp_path))
    model = tiny.model()
    body, head = torch.optim.AdamW(model.model.parameters(), lr=1e-3), torch.optim.SGD(model.lm_head.parameters())
    model, body = accelerator.prepare(model, body)
    accelerator.prepare(body.optimizer.inner)
    with pytest.raises(UnsupportedError, match="LBFGS cannot run on pages"):
        accelerator.prepare(torch.optim.LBFGS(model.parameters()))
    accelerator.prepare(head)
    with pytest.raises(UnsupportedError, match="one optimizer a parameter group for each"):
        body.step()
    with pytest.raises(UnsupportedError, match=r"the state of this optimizer \(AdamW\) was given up, when another"):
        accelerator.prepare(body)


def test_several_models_each_with_its_optimizer(tiny: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config=tiny.budget("roomy", Path()))
    one, other = tiny.model(), tiny.model(seed=1)
    prepared = accelerator.prepare(one, other, *(torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)))
    assert len(prepared) == 4
    assert not caplog.records


def test_others_are_clipped_as_ever(tiny: ModuleType) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config={"host_memory": "64MiB"})
    model = tiny.model()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    row = tiny.data(1)[0]
    accelerator.backward(model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss)
    foreign = nn.Parameter(torch.zeros(2))
    foreign.grad = torch.tensor([3.0, 4.0])
    assert accelerator.clip_grad_norm_([foreign], 1.0) == 5.0
    accelerator.clip_grad_value_([foreign], 0.25)
    assert foreign.grad.tolist() == [0.25, 0.25]


def test_free_memory_keeps_gradients_and_lets_go(tiny: ModuleType) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config={"host_memory": "64MiB"})
    model = accelerator.prepare(tiny.model())
    row = tiny.data(1)[0]
    accelerator.backward(model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss)
    engine = engine_of(model)
    assert engine is not None
    assert engine.gradients is not None
    before = [param.grad.clone() for param in model.parameters()]
    accelerator.free_memory()
    assert len(engine.gradients.present()) == len(before) == 30
    # As without pages.
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), before, strict=True))
    gone = weakref.ref(model)
    del model, engine
    gc.collect()
    assert gone() is None


def test_only_pages_of_others_are_collected_for(tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    collections: list[int] = []
    monkeypatch.setattr(accelerator_module.gc, "collect", lambda: collections.append(1) or 0)
    accelerator = PTMAccelerator(cpu=True, ptm_config={"host_memory": "64MiB"})
    first, second = tiny.model(), tiny.model()
    accelerator.attach(first)
    assert not collections, "a collection goes through all objects of the process, and there was nothing to find"
    accelerator.attach(second)
    assert collections


@pytest.mark.parametrize(
    ("switch", "name"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_MEGATRON_LM", "Mega"),
    ],
)
def test_other_plugins_are_refused(switch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, "true")
    with pytest.raises(
        UnsupportedError, match=rf"{name}.* is switched on \(by the environment variable {switch}=true\)"
    ):
        PTMAccelerator(cpu=True)


def test_plugins_as_arguments_are_refused() -> None:
    plugin: Any = SimpleNamespace()
    with pytest.raises(
        UnsupportedError, match=r"FSDP is switched on \(by the argument fsdp_plugin\) and so is ptm_acc"
    ):
        PTMAccelerator(cpu=True, fsdp_plugin=plugin)


def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "device", torch.device("mps"))
    with pytest.raises(UnsupportedError, match=r"was given the device mps; it has pages for CUDA and for the CPU only"):
        PTMAccelerator(cpu=True)
