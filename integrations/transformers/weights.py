"""Safetensors into models: what a checkpoint holds, and how its tensors reach pages through transformers' own loader.

transformers renames, fuses (experts) and casts what a checkpoint holds, and then calls one function of its module once
for each tensor of the model. That function is what is exchanged here, for one thread and as long as it takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ptm_accel.engine import engine_of
from ptm_accel.errors import CheckpointError, UnsupportedError
from ptm_accel.units import format_bytes

from ..exchanging import exchanged, one_at_a_time
from .own_loading import own_loading

Setter = Callable[..., None]
"""As `transformers.core_model_loading.set_param_for_module`."""

_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
_SHOWN_NAMES = 3

is_redirected: ContextVar[bool] = ContextVar("is_redirected", default=False)
"""Whether the caller is within `redirected`."""


@contextmanager
def redirected(make: Callable[[Setter], Setter]) -> Iterator[None]:
    """While it lasts, transformers hands the tensors it loads to another function, one after the other.

    Args:
        make: makes the function from the original one; it copies most of what it is given.
    """
    with one_at_a_time, exchanged(core_model_loading, "set_param_for_module", make):
        before, within = os.environ.get(_SEQUENTIAL), is_redirected.set(True)
        # Read by several threads at once, tensors that are cast would wait in memory for their turn.
        os.environ[_SEQUENTIAL] = "1"
        try:
            yield
        finally:
            is_redirected.reset(within)
            if before is None:
                del os.environ[_SEQUENTIAL]
            else:
                os.environ[_SEQUENTIAL] = before


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter or buffer, and its name there."""
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


# ---- what a directory holds ------------------------------------------------------------------------------------------


def weight_files(directory: Path, variant: str | None = None) -> list[Path]:
    """The safetensors files of a saved model.

    Args:
        directory: where `save_pretrained` has written.
        variant: as for `from_pretrained`.

    Raises:
        CheckpointError: there are none, the index is damaged, or a file it names is missing.
    """
    index, single = (directory / _with_variant(name, variant) for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME))
    if single.is_file():
        return [single]
    # To read a pipe would not end.
    if not index.is_file():
        raise CheckpointError(
            f"{directory} has no {single.name} and no {index.name}. Only safetensors can be read onto pages; convert "
            "other formats once with save_pretrained()."
        )
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is damaged: {error}. Copy or download the model again.") from error
    for name in shards:
        # A file that is a link, as in the Hub's cache, is one in this folder; a path is not.
        if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or os.path.basename(name) != name:
            raise CheckpointError(
                f"{index} is damaged: it names {name!r}, which is not a file in its folder. Copy or download the model "
                "again."
            )
    missing = [name for name in shards if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of its {len(shards)} files: {_some(missing)}. Copy or download the "
            "model again."
        )
    return [directory / name for name in shards]


def _with_variant(name: str, variant: str | None) -> str:
    stem, dot, extension = name.rpartition(".")
    return f"{stem}.{variant}{dot}{extension}" if variant else name


def read_headers(files: list[Path]) -> dict[str, torch.Tensor]:
    """Every tensor of `files` by name, on the meta device; no values are read.

    Raises:
        CheckpointError: a file is damaged.
    """
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with opened(file) as shard:
            found.update((name, shard.get_tensor(name).to("meta")) for name in shard.keys())  # noqa: SIM118
    return found


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file, mapped.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        shard = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        size = format_bytes(file.stat().st_size) if file.is_file() else "missing"
        raise CheckpointError(f"{file} ({size}) is damaged: {error}. Copy or download the model again.") from error
    with shard:
        yield shard


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")


# ---- onto a model that is on pages -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Differences:
    """What names of tensors differ, as what `load_state_dict` returns.

    Attributes:
        missing_keys: of the model, and not in the files; but for other names of what is there.
        unexpected_keys: in the files, and not of the model.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class _Handed(NamedTuple):
    """Names after tensors were handed out: of the model alone, of the files alone, and errors by name."""

    missing: Set[str]
    unexpected: Set[str]
    failures: Mapping[str, str]


def load_weights(model: nn.Module, directory: Path, *, strict: bool = True, part: bool = False) -> Differences:
    """Reads saved weights into a model that is on pages; its parameters stay the same objects.

    Names and shapes are compared first, after the renaming and fusing that transformers would do. Then one tensor of
    the model at a time is read and written to its pages.

    Args:
        model: the model.
        directory: where `save_pretrained` (or the Trainer) has written; sharded or not.
        strict: whether tensors that only one of the two has are refused, but for those that `from_pretrained` is silent
            about. Otherwise what the model has and the files lack stays as it is.
        part: the model is a part of what was saved: what else is in the files is passed over.

    Returns:
        the tensors that only one of the two has.

    Raises:
        UnsupportedError: the model is not on pages, or adds something of its own to `load_state_dict`.
        CheckpointError: files are missing or damaged, or are of another model; nothing has been changed then.
    """
    engine = engine_of(model)
    if engine is None:
        raise UnsupportedError(
            f"this {type(model).__name__} is not on pages. Use model.load_state_dict(), or read it with "
            "ptm_accel.from_pretrained()."
        )
    model = getattr(model, "_orig_mod", model)
    own = own_loading(model)
    if own is not None:
        raise UnsupportedError(
            f"{type(model).__name__} customises load_state_dict ({own}), which reading tensor by tensor would leave "
            "out. Use model.load_state_dict(), which works on pages, or the Trainer's resuming."
        )
    files = weight_files(Path(directory))
    targets = _targets(model)
    with engine.state_dicts.names_only(), ExitStack() as stack, torch.no_grad():
        shapes: dict[str, torch.Size] = {}

        def note(name: str, value: torch.Tensor) -> None:
            shapes[name] = value.shape

        headers = {name: tensor for name, tensor in read_headers(files).items() if not part or name in targets}
        handed = _hand_out(model, headers, "meta", strict, note)
        found = _compare(model, directory, shapes, handed, strict)
        # Of several names of one tensor the last in the model counts, as in `load_state_dict`.
        last = {id(target): name for name, target in targets.items() if name in shapes}

        def write(name: str, value: torch.Tensor) -> None:
            target = targets.get(name)
            if target is None or last[id(target)] != name:
                return
            slot = engine.slots.of(target)
            if slot is None:
                target.copy_(value)
            else:
                slot.write(value)

        tensors: dict[str, Any] = {}
        for file in files:
            shard = stack.enter_context(opened(file))
            tensors.update((name, shard.get_slice(name)) for name in shard.keys() if name in headers)  # noqa: SIM118
        for name, text in _hand_out(model, tensors, "cpu", strict, write).failures.items():
            raise CheckpointError(
                f"{name} cannot be made from the saved tensors: {_last_line(text)}. The model is now partly loaded; "
                "load another checkpoint into it."
            )
    if engine.optimizer is not None:
        # They were written from outside: masters are taken from them anew.
        for state in engine.optimizer.states:
            state.mastered = 0
    return found


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers that `load_state_dict` writes to, in its order; none is brought in."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (*dict.items(module._parameters), *module._buffers.items())
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


def _hand_out(
    model: nn.Module, tensors: Mapping[str, Any], device: str, strict: bool, take: Callable[[str, torch.Tensor], None]
) -> _Handed:
    """Calls `take` with each of `tensors` on `device`, named, fused and cast as transformers does it for this model."""
    if not isinstance(model, PreTrainedModel):
        known = _targets(model).keys()
        for name in known & tensors.keys():
            take(name, tensors[name][...])
        return _Handed(known - tensors.keys(), tensors.keys() - known, {})

    def redirect(original: Setter) -> Setter:
        def taken(root: nn.Module, full_name: str, value: Any, info: Any, quantizer: Any) -> None:
            info.missing_keys.discard(full_name)
            take(full_name, value)

        return taken

    mapping: Any = get_model_conversion_mapping(model)
    config = LoadStateDictConfig(device_map={"": device}, weight_mapping=mapping)
    before = model.__dict__.get("_weight_conversions")
    try:
        with redirected(redirect):
            info, _ = core_model_loading.convert_and_load_state_dict_in_model(model, dict(tensors), config)
    finally:
        # With what a model was read decides how it will be saved; that has not changed.
        model.__dict__.pop("_weight_conversions", None)
        if before is not None:
            model.__dict__["_weight_conversions"] = before
    if strict:
        model._adjust_missing_and_unexpected_keys(info)
    return _Handed(info.missing_keys, info.unexpected_keys, info.conversion_errors)


def _compare(
    model: nn.Module, directory: Path, shapes: Mapping[str, torch.Size], handed: _Handed, strict: bool
) -> Differences:
    """What differs in names, after tensors of these shapes were handed out.

    Raises:
        CheckpointError: shapes differ, a tensor cannot be made, or names differ and `strict` is set.
    """
    targets = _targets(model)
    # Under the other names of a tied parameter there is nothing to load.
    reached = {id(targets[name]) for name in shapes.keys() & targets.keys()}
    missing = [name for name, target in targets.items() if name in handed.missing and id(target) not in reached]
    # A hook of somebody's may give the state dictionary a name that nothing can be loaded into.
    unexpected = sorted(handed.unexpected | (shapes.keys() - targets.keys()))
    differences = [
        f"{name} is of shape {tuple(shape)} there and of {tuple(targets[name].shape)} in the model"
        for name, shape in shapes.items()
        if name in targets and targets[name].shape != shape
    ]
    for words, names in (("lacks", missing), ("has, and the model has not,", unexpected)):
        if names and strict:
            differences.append(f"it {words} {len(names)} tensors ({_some(sorted(names))})")
    differences += [
        f"{name} cannot be made: {_last_line(text)}"
        for name, text in handed.failures.items()
        # What cannot be made without values says so when it has them.
        if "meta" not in text.lower()
    ]
    if differences:
        raise CheckpointError(
            f"the weights in {directory} are not of this {type(model).__name__}: {_some(differences)}. "
            "Nothing was changed. Resume from a checkpoint of the same model, or build the model from its config."
        )
    return Differences(missing, unexpected)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
