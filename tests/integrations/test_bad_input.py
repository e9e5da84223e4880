"""What can be wrong is said through `Trainer(...)`: what failed, the numbers, what to set; and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed
import transformers
from ptm_accel.integrations.transformers import Trainer
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from ptm_accel.engine import engine_of
from ptm_accel.errors import BudgetError, CheckpointError, ConfigError, DiskError, UnsupportedError
from tests import capping
from tests.figures import FIGURE
from tests.prepared import run_prepared

CHILD = Path(__file__).with_name("trainer_child.py")


def build(tiny: ModuleType, folder: Path, options: Any, model: nn.Module | None = None, **changes: Any) -> Any:
    optimizers = changes.pop("optimizers", (None, None))
    callbacks = changes.pop("callbacks", None)
    return Trainer(
        model=tiny.model() if model is None else model,
        args=tiny.arguments(folder, **changes),
        train_dataset=tiny.data(),
        ptm_config=options,
        optimizers=optimizers,
        callbacks=callbacks,
    )


def assert_still_trains(tiny: ModuleType, model: Any, folder: Path) -> None:
    """A refused model is what it was: the plain Trainer trains it to the same weights as a new one."""
    runs = []
    for each in (model, tiny.model()):
        plain = transformers.Trainer(
            model=each, args=tiny.arguments(folder, max_steps=2), train_dataset=tiny.data(), callbacks=[]
        )
        plain.train()
        runs.append(tiny.digest(each))
    assert runs[0] == runs[1]


# ---- the options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_memroy": "1GB"}, r"unknown key 'host_memroy'; did you mean 'host_memory'\?"),
        ({"disk": {"path": "/tmp"}}, r"disk: unknown key 'path'; did you mean 'paths'\?"),
        ({"host_memory": "lots"}, r"host_memory: 'lots' is not a byte count; use .* like \"10GB\""),
        ({"host_memory": "1MiB"}, r"host_memory: 1\.00 MiB cannot hold one page of 4\.00 MiB; raise host_memory, or"),
        ({"update": "later"}, r"update: got 'later'; write update: exact or"),
    ],
    ids=["unknown", "nested", "size", "contradiction", "update"],
)
def test_options_are_refused_at_once(options: dict[str, Any], message: str, tiny: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tiny, tmp_path, options)


def _no_folder(folder: Path) -> tuple[dict[str, Any], type[Exception], str]:
    return (
        {"disk": str(folder / "none")},
        ConfigError,
        r"disk: no file can be made in .*none \(No such file.*set disk\.paths",
    )


def _no_permission(folder: Path) -> tuple[dict[str, Any], type[Exception], str]:
    # Nobody, not even root, makes files there.
    return {"disk": "/proc/self"}, ConfigError, r"disk: no file can be made in /proc/\d+.*set disk\.paths"


def _more_than_the_machine(folder: Path) -> tuple[dict[str, Any], type[Exception], str]:
    return {"host_memory": "900TB"}, BudgetError, r"host_memory: asked .* TiB, .* is .*; set host_memory to at most"


def _below_the_floor(folder: Path) -> tuple[dict[str, Any], type[Exception], str]:
    options = {"host_memory": "100KiB", "page_size": 4096, "disk": str(folder)}
    # The figure, and the tensor that is the reason.
    return (
        options,
        BudgetError,
        r"cannot train under less than .*embed_tokens\.weight.*Set host_memory to at least [\d.]+KiB",
    )


def _no_tier_below(folder: Path) -> tuple[dict[str, Any], type[Exception], str]:
    options = {"host_memory": "1MiB", "page_size": 4096}
    return options, BudgetError, r"no tier below for what does not fit\. Set disk to a directory on an SSD, or host_mem"


@pytest.mark.parametrize("case", [_no_folder, _no_permission, _more_than_the_machine, _below_the_floor, _no_tier_below])
def test_memory_that_is_not_there_is_refused_before_the_first_step(
    case: Callable[[Path], tuple[dict[str, Any], type[Exception], str]], tiny: ModuleType, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options, error, message = case(scratch)
    trainer = build(tiny, tmp_path / "run", options)
    with pytest.raises(error, match=message):
        trainer.train()
    assert trainer.state.global_step == 0
    assert list(scratch.iterdir()) == []
    assert engine_of(trainer.model) is None
    assert_still_trains(tiny, trainer.model, tmp_path / "plain")


def test_the_least_budget_that_is_named_is_enough(tiny: ModuleType, tmp_path: Path) -> None:
    options = {"host_memory": "100KiB", "page_size": 4096, "disk": str(tmp_path)}
    with pytest.raises(BudgetError) as caught:
        build(tiny, tmp_path, options).train()
    # Pasted, as it stands there.
    least = re.search(f"Set host_memory to at least {FIGURE}", str(caught.value))
    assert least is not None
    trainer = build(tiny, tmp_path, {**options, "host_memory": least[1]})
    trainer.train()
    assert trainer.state.global_step == 5


def test_a_limit_of_the_cgroup_below_the_budget(tiny: ModuleType, tmp_path: Path) -> None:
    reason = capping.available()
    if reason is not None:
        pytest.skip(f"cannot cap memory: {reason}")
    result = tmp_path / "result.json"
    job = {"sizes": {}, "changes": {}, "folder": str(tmp_path / "run"), "result": str(result)}
    job["options"] = {"host_memory": "2GiB"}
    with capping.memory_group(1 << 30) as group:
        done = run_prepared(CHILD, json.dumps(job), cwd=tmp_path, group=group)
        assert capping.kills(group) == 0
    assert done.code == 1
    assert re.search(r"BudgetError: host_memory: asked 2\.00 GiB, .*cgroup.* 1\.00 GiB; set host_memory to", done.err)
    assert not result.exists()


# ---- the disk --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of its own, of the size that is asked for."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / "small"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    try:
        yield mount
    finally:
        for folder in mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


class _Fills(transformers.TrainerCallback):
    """Somebody else fills the disk once training has begun."""

    def __init__(self, folder: Path) -> None:
        self.other = folder / "other"

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.other.exists():
            fill(self.other)


def fill(file: Path) -> None:
    """Takes all the space that is left."""
    file.write_bytes(bytes(shutil.disk_usage(file.parent).free))
    assert shutil.disk_usage(file.parent).free == 0


MEMORY_NOT_DISK = pytest.mark.filterwarnings("ignore:.*which is memory and no disk")


@MEMORY_NOT_DISK
def test_a_disk_that_is_full_at_the_start(small_disk: Callable[[str], Path], tiny: ModuleType, tmp_path: Path) -> None:
    disk = small_disk("1m")
    fill(disk / "other")
    trainer = build(tiny, tmp_path, tiny.budget("tight", disk))
    with pytest.raises(
        ConfigError, match=r"disk: no file can be made in .*No space left on device.*set disk\.paths to"
    ):
        trainer.train()
    assert_still_trains(tiny, trainer.model, tmp_path / "plain")


@MEMORY_NOT_DISK
def test_a_disk_that_is_too_small(small_disk: Callable[[str], Path], tiny: ModuleType, tmp_path: Path) -> None:
    disk = small_disk("1m")
    trainer = build(tiny, tmp_path, tiny.budget("tight", disk))
    with pytest.raises(BudgetError, match=r"the states of this model take .*\(disk 9.*Raise the limit of disk, or add"):
        trainer.train()
    assert list(disk.iterdir()) == []
    assert_still_trains(tiny, trainer.model, tmp_path / "plain")


@MEMORY_NOT_DISK
def test_a_disk_that_is_filled_by_others_in_the_middle_of_training(
    small_disk: Callable[[str], Path], tiny: ModuleType, tmp_path: Path
) -> None:
    disk = small_disk("8m")
    fills = _Fills(disk)
    trainer = build(tiny, tmp_path / "run", tiny.budget("tight", disk), callbacks=[fills])
    with pytest.raises(DiskError, match=r"cannot grow by .*No space left on device, 0 B free on tmpfs; free space"):
        trainer.train()
    assert list(disk.iterdir()) == [fills.other]
    # Once there is space again, the same Trainer begins anew and gives the numbers of an undisturbed run.
    fills.other.unlink()
    trainer.remove_callback(fills)
    trainer.train()
    trained = tiny.digest(trainer.model)
    engine = engine_of(trainer.model)
    assert engine is not None
    engine.close()
    other = build(tiny, tmp_path / "other", {"host_memory": "64MiB"})
    other.train()
    assert trained == tiny.digest(other.model)


# ---- models, optimizers, compile modes -------------------------------------------------------------------------


@pytest.fixture
def one_process() -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class DeepSpeedEngine(nn.Module):
    """Stands for DeepSpeed's, which is known by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (nn.parallel.DistributedDataParallel, "DDP"),
        (lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")), "FSDP"),
        (_fsdp2, "FSDP2"),
        (nn.DataParallel, "DataParallel"),
        (DeepSpeedEngine, "DeepSpeed"),
    ],
    ids=["DDP", "FSDP", "FSDP2", "DataParallel", "DeepSpeed"],
)
@pytest.mark.usefixtures("one_process")
def test_a_model_that_is_wrapped_by_another_plugin(
    wrap: Callable[[nn.Module], nn.Module], named: str, tiny: ModuleType, tmp_path: Path
) -> None:
    trainer = build(tiny, tmp_path, tiny.budget("tight", tmp_path), wrap(tiny.model()))
    with pytest.raises(UnsupportedError, match=rf"already wrapped by {named} .*pass the unwrapped model"):
        trainer.train()


def test_an_optimizer_that_couples_tensors(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.model()
    optimizers = (torch.optim.LBFGS(model.parameters()), None)
    trainer = build(tiny, tmp_path, tiny.budget("tight", tmp_path), model, optimizers=optimizers)
    with pytest.raises(
        UnsupportedError, match=r"LBFGS cannot run on pages: it needs a closure and couples .* Use optim="
    ):
        trainer.train()


CANNOT = {
    "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "adamw_bnb_8bit",
    "adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit",
    "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb",
    "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor",
    "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "lomo", "adalomo",
    "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw", "apollo_adamw_layerwise",
}  # fmt: skip
CAN = {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"}
OF_OTHERS = {"adamw_anyprecision", "grokadamw", "stable_adamw"}
"""Ordinary torch.optim optimizers of packages that are not at hand; judged by their class."""


@pytest.mark.parametrize("optim", sorted(name.value for name in transformers.training_args.OptimizerNames))
def test_every_optimizer_the_trainer_knows_is_used_or_refused_by_name(
    optim: str, tiny: ModuleType, tmp_path: Path
) -> None:
    if optim in CANNOT:
        with pytest.raises(
            UnsupportedError, match=rf"optim='{optim}' cannot run on pages: .* use optim='adamw_torch_f"
        ):
            build(tiny, tmp_path, tiny.budget("tight", tmp_path), optim=optim)
        return
    trainer = build(tiny, tmp_path, tiny.budget("tight", tmp_path), optim=optim, max_steps=1)
    if optim in OF_OTHERS:
        with pytest.raises((ImportError, ValueError), match="install"):
            trainer.train()
        return
    assert optim in CAN, f"the Trainer has learned {optim!r}: is it supported?"
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        ({"torch_compile_mode": "reduce-overhead"}, r'mode="reduce-overhead".*CUDA graphs.*Use mode="default"'),
        ({"torch_compile_mode": "max-autotune"}, r'mode="max-autotune".*CUDA graphs.*Use mode="default"'),
        ({"torch_compile_backend": "cudagraphs"}, r'backend="cudagraphs".*CUDA graphs.*Use mode="default"'),
    ],
    ids=["reduce-overhead", "max-autotune", "cudagraphs"],
)
def test_compile_modes_that_cannot_work(switch: dict[str, str], message: str, tiny: ModuleType, tmp_path: Path) -> None:
    trainer = build(tiny, tmp_path, tiny.budget("tight", tmp_path), torch_compile=True, **switch)
    with pytest.raises(UnsupportedError, match=message):
        trainer.train()


def test_a_whole_model_in_one_compiled_region_that_does_not_fit(tiny: ModuleType, tmp_path: Path) -> None:
    trainer = build(tiny, tmp_path, tiny.budget("tight", tmp_path), torch_compile=True)
    with pytest.raises(
        BudgetError, match=r"compiled as one region.*Compile per layer .* host_memory to at least [\d.]+[KM]iB"
    ):
        trainer.train()


# ---- checkpoints -----------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_optimizer(tiny: ModuleType, tmp_path: Path) -> None:
    options = tiny.budget("tight", tmp_path)
    run = tmp_path / "run"
    build(tiny, run, options, max_steps=1, save_strategy="steps", save_steps=1).train()
    trainer = build(tiny, run, options, max_steps=2, optim="sgd")
    with pytest.raises(CheckpointError, match=r"AdamW.*SGD|SGD.*AdamW"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_checkpoint_with_a_file_cut_short(kind: str, tiny: ModuleType, tmp_path: Path) -> None:
    options = tiny.budget("tight", tmp_path)
    run = tmp_path / "run"
    build(tiny, run, options, max_steps=1, save_strategy="steps", save_steps=1).train()
    (file,) = (run / "checkpoint-1").glob(f"{kind}*.safetensors")
    with safe_open(file, framework="pt") as whole:
        assert len(whole.keys()) > 10
    os.truncate(file, file.stat().st_size - 1000)
    trainer = build(tiny, run, options, max_steps=2)
    with pytest.raises(CheckpointError, match=re.escape(file.name)):
        trainer.train(resume_from_checkpoint=True)
