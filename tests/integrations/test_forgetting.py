"""Pages of a checkpoint that was cast or fused as it was read are mapped no longer; nothing else is forgotten."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ptm_accel.integrations.transformers.forgetting import MATERIALIZE, SET, Forgetting, forget_what_is_read
from ptm_accel.integrations.transformers.loading import from_pretrained
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, core_model_loading

from tests.integrations.saved_models import close
from tests.plain_loop import same_bits
from tests.tiers import PAGE

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGS = {
    "cast": (LlamaConfig(**SIZES, vocab_size=512), torch.bfloat16),
    "fused": (MixtralConfig(**SIZES, vocab_size=512, num_local_experts=4, num_key_value_heads=2), torch.float32),
}


@pytest.fixture(params=CONFIGS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, torch.dtype]:
    config, dtype = CONFIGS[request.param]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved", dtype


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has it done as the flag does, until the end of the test."""

    def switch() -> None:
        for name in (MATERIALIZE, SET):
            monkeypatch.setattr(core_model_loading, name, getattr(core_model_loading, name))
        forget_what_is_read(core_model_loading)

    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    return switch


def mapped_bytes(directory: Path) -> int:
    """How much of the files in a directory is mapped into this process and counts as its memory."""
    found, inside = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            head = line.split()[0]
            if not head.endswith(":"):
                inside = str(directory) in line
            elif inside and head == "Rss:":
                found += int(line.split()[1]) << 10
    return found


def values(model: Any) -> dict[str, torch.Tensor]:
    """Copies, and the model is forgotten: what is mapped from a file as it is keeps all of the file mapped."""
    copies = {name: param.detach().clone() for name, param in model.named_parameters()}
    del model
    gc.collect()
    return copies


def read(
    directory: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Its parameters, copied, and what of its files was mapped after each of them."""
    seen: list[int] = []
    put = getattr(core_model_loading, SET)

    def watched(*args: Any) -> None:
        put(*args)
        seen.append(mapped_bytes(directory))

    with monkeypatch.context() as patch:
        patch.setattr(core_model_loading, SET, watched)
        found = values(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype))
    gc.collect()
    return found, seen


def test_no_more_is_mapped_than_what_is_being_read(
    case: tuple[Path, torch.dtype], switched: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(path.stat().st_size for path in case[0].glob("*.safetensors"))
    plain, before = read(*case, monkeypatch)
    assert max(before) > whole * 0.9, "all of it stays mapped"
    switched()
    ours, after = read(*case, monkeypatch)
    # The kernel maps 64 KiB around each first byte that safetensors looks at.
    assert max(after) < whole * 0.5
    assert ours.keys() == plain.keys()
    assert all(same_bits(value, plain[name]) for name, value in ours.items())


def test_reading_straight_onto_pages_forgets_as_well(
    case: tuple[Path, torch.dtype], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory, dtype = case
    whole = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    plain = values(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype))
    materialize, seen = getattr(core_model_loading, MATERIALIZE), []

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(mapped_bytes(directory))
        return materialize(*args, **kwargs)

    monkeypatch.setattr(core_model_loading, MATERIALIZE, watched)
    dials = {"host_memory": "32MiB", "disk": str(tmp_path), "page_size": PAGE}
    ours = from_pretrained(AutoModelForCausalLM, directory, dials, dtype=dtype)
    assert seen
    assert max(seen) < whole * 0.5
    found = ours.state_dict()
    assert all(same_bits(found[name], value) for name, value in plain.items())
    close(ours)


def test_what_somebody_has_written_is_kept(
    case: tuple[Path, torch.dtype], switched: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = case
    switched()
    # As they are in the file: mapped, and changed in place by whoever has the model.
    first = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for param in first.parameters():
            param.add_(1.0)
    expected = values(first)
    # Mapped, changed in place, and given to the loader by its owner, which has it cast.
    mine = load_file(directory / "model.safetensors")
    for tensor in mine.values():
        tensor.mul_(2.0)
    doubled = {name: tensor.clone() for name, tensor in mine.items()}
    cls = type(first)
    given = cls.from_pretrained(None, config=first.config, state_dict=dict(mine), dtype=torch.bfloat16)
    AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    assert all(same_bits(param, expected[name]) for name, param in first.named_parameters())
    assert all(same_bits(tensor, doubled[name]) for name, tensor in mine.items())
    assert same_bits(given.lm_head.weight, doubled["lm_head.weight"].bfloat16())


def test_what_was_read_and_put_nowhere_stays_its_owners(
    case: tuple[Path, torch.dtype], switched: Callable[[], None]
) -> None:
    directory, _ = case
    switched()
    materialize = getattr(core_model_loading, MATERIALIZE)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        taken = materialize(file.get_slice("lm_head.weight"), device="cpu", dtype=torch.float32)
        other = file.get_tensor("lm_head.weight")
        other.fill_(3.0)
        assert bool((taken == 3.0).all()), "both are views of one mapping"
        again = materialize(tensor=file.get_slice("lm_head.weight"), dtype=torch.bfloat16)
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        for tensor in (taken, other, again):
            assert bool((tensor == 3.0).all())


class Wrapper(torch.Tensor):
    """A tensor that has another one inside, and no memory, as those of quantised formats."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_what_a_tensor_has_inside_is_not_forgotten(case: tuple[Path, torch.dtype]) -> None:
    put: list[Any] = []
    forgetting = Forgetting()
    materialize = forgetting.materialize(lambda tensor: tensor)
    set_param = forgetting.set_param(lambda model, target_name, param_value: put.append(param_value))
    with safe_open(case[0] / "model.safetensors", framework="pt") as file:
        inner = materialize(file.get_slice("lm_head.weight"))
        inner.sum()
        before = mapped_bytes(case[0])
        set_param(None, "lm_head.weight", Wrapper(inner))
        assert mapped_bytes(case[0]) == before
        materialize(file.get_slice("lm_head.weight"))
        set_param(None, "lm_head.weight", inner.clone())
        assert mapped_bytes(case[0]) < before
    assert len(put) == 2


def test_a_loader_that_reads_in_another_way_is_left_alone() -> None:
    module: Any = SimpleNamespace(**{SET: len})
    forget_what_is_read(module)
    assert vars(module) == {SET: len}


CHILD = """
import json, os, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

def resident(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

where, dtype = sys.argv[1:]
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_hidden_layers": 1}
AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=16)).save_pretrained(where + "/tiny")
AutoModelForCausalLM.from_pretrained(where + "/tiny", dtype=torch.bfloat16)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmHWM")
model = AutoModelForCausalLM.from_pretrained(where + "/large", dtype=getattr(torch, dtype))
print(json.dumps([resident("VmHWM") - before, sum(p.nbytes for p in model.parameters())]), flush=True)
# The flag holds a script to putting a model on pages at its end.
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library keeps what it likes")
@pytest.mark.parametrize(("kind", "dtype"), [(LlamaConfig, "bfloat16"), (MixtralConfig, "float32")])
def test_a_script_never_holds_more_than_a_few_tensors(kind: Any, dtype: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 8, "vocab_size": 512}
    more = {"num_local_experts": 4, "intermediate_size": 1024} if kind is MixtralConfig else {"intermediate_size": 4096}
    model = AutoModelForCausalLM.from_config(kind(**sizes, **more))
    largest = max(param.nbytes for param in model.parameters())
    model.save_pretrained(tmp_path / "large", max_shard_size="50MB")
    del model
    dials = {"ACCELERATE_USE_PTM": "true", "PTM_HOST_MEMORY": "64MiB", "PTM_DISK": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), dtype],
        env={**os.environ, **dials},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown, whole = json.loads(done.stdout.splitlines()[-1])
    # The kernel counts so many pages of a process with each core, before it adds them up.
    cores = os.cpu_count() or 1
    uncounted = cores * max(32, 2 * cores) * 4096
    # What is read, what is joined of it and what comes of that, and 16 MiB that may be free.
    assert grown < 4 * largest + (48 << 20) + uncounted < whole
