"""Safetensors into models: what a checkpoint holds, and how its tensors reach pages through transformers' own loader.

transformers renames, fuses (experts) and casts what a checkpoint holds, and then calls one function of its module once
for each tensor of the model. That function is what is exchanged here, for one thread and as long as it takes.
"""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as host_logging

from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import CheckpointError, UnsupportedError
from ptm_accel.units import format_bytes

from .forgetting import MATERIALIZE, SET, Forgetting
from .own_loading import own_loading

Setter = Callable[..., None]
"""As `transformers.core_model_loading.set_param_for_module`."""

_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
_SHOWN_NAMES = 3

one_at_a_time = threading.RLock()
"""Held while functions of transformers are exchanged."""


@contextmanager
def exchanged(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Exchanges `owner.name` for this thread; other threads go on with the original.

    Args:
        owner: a module or class.
        name: of the function; a plain one or a static method.
        make: makes the other function from the original one.
    """
    original, kept = getattr(owner, name), inspect.getattr_static(owner, name)
    ours = make(original)
    thread = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        return (ours if threading.get_ident() == thread else original)(*args, **kwargs)

    setattr(owner, name, staticmethod(either) if isinstance(kept, staticmethod) else either)
    try:
        yield
    finally:
        setattr(owner, name, kept)


@contextmanager
def redirected(make: Callable[[Setter], Setter]) -> Iterator[None]:
    """While it lasts, transformers hands the tensors it loads to another function, one after the other.

    Args:
        make: makes the function from the original one; it copies most of what it is given.
    """
    forgetting = Forgetting(all_is_copied=True)
    with one_at_a_time, ExitStack() as stack:
        stack.enter_context(exchanged(core_model_loading, SET, lambda original: forgetting.set_param(make(original))))
        if hasattr(core_model_loading, MATERIALIZE):
            stack.enter_context(exchanged(core_model_loading, MATERIALIZE, forgetting.materialize))
        before = os.environ.get(_SEQUENTIAL)
        os.environ[_SEQUENTIAL] = "1"
        try:
            yield
        finally:
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
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no {single.name} and no {index.name}. Only safetensors can be read onto pages; convert "
            "other formats once with save_pretrained()."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error}. Copy or download the model again.") from error
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
        raise damaged(file, error) from error
    with shard:
        yield shard


def damaged(file: Path, error: Exception) -> CheckpointError:
    """What is raised for a file of weights that cannot be read."""
    size = format_bytes(file.stat().st_size) if file.is_file() else "missing"
    return CheckpointError(f"{file} ({size}) is damaged: {error}. Copy or download the model again.")


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


def load_weights(model: nn.Module, directory: Path, *, strict: bool = True) -> Differences:
    """Reads saved weights into a model that is on pages; its parameters stay the same objects.

    Names and shapes are compared first, after the renaming and fusing that transformers would do. Then one tensor of
    the model at a time is read and written to its pages.

    Args:
        model: the model.
        directory: where `save_pretrained` (or the Trainer) has written; sharded or not.
        strict: whether tensors that only one of the two has are refused, but for those that `from_pretrained` is silent
            about. Otherwise what the model has and the files lack stays as it is.

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
            f"{type(model).__name__} loads its state in a way of its own ({own}), which reading it tensor by tensor "
            "would leave out. Use model.load_state_dict(), which works on pages, or the Trainer's resuming."
        )
    files = weight_files(Path(directory))
    load: _Load = _load_converted if isinstance(model, PreTrainedModel) else _load_plain
    with engine.state_dicts.names_only():
        check = _Check(model, strict)
        with _without_progress_bar():
            load(model, read_headers(files), check, "meta")
        check.refuse_differences(Path(directory))
        with ExitStack() as stack:
            tensors: dict[str, Any] = {}
            for file in files:
                shard = stack.enter_context(opened(file))
                tensors.update((name, shard.get_slice(name)) for name in shard.keys())  # noqa: SIM118
            load(model, tensors, _Write(check, engine), "cpu")
    if engine.optimizer is not None:
        engine.optimizer.weights_changed()
    return check.found


def _places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where `load_state_dict` puts tensors, by name: a module and a name there, in the order in which it does."""
    return {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name in (*dict.keys(module._parameters), *module._buffers)
        if _tensor_of(module, name) is not None and name not in module._non_persistent_buffers_set
    }


@dataclass
class _Target:
    """Where tensors of a checkpoint go, one after the other, under the names and in the form that the model has."""

    model: nn.Module
    places: dict[str, tuple[nn.Module, str]]
    strict: bool

    def take(self, full_name: str, value: torch.Tensor) -> None:
        """One tensor, for the parameter or buffer that the model calls `full_name`."""
        raise NotImplementedError

    def end(self, missing: set[str], unexpected: set[str], failures: dict[str, str]) -> None:
        """All tensors were taken: what the model has beside them, what the model lacks, what could not be converted."""


class _Check(_Target):
    """Compares names and shapes, and changes nothing."""

    def __init__(self, model: nn.Module, strict: bool) -> None:
        super().__init__(model, _places(model), strict)
        self.found = Differences([], [])
        # The name that counts for each parameter and buffer: `load_state_dict` writes it last.
        self.last: dict[int, str] = {}
        self._order = {name: number for number, name in enumerate(self.places)}
        self.unexpected: set[str] = set()
        self.differences: list[str] = []

    def take(self, full_name: str, value: torch.Tensor) -> None:
        if full_name not in self.places:
            # The model's state dictionary has it, by a hook of somebody's, and there is nothing to load it into.
            self.unexpected.add(full_name)
            return
        ref = _tensor_of(*self.places[full_name])
        assert ref is not None
        self.last[id(ref)] = max(self.last.get(id(ref), full_name), full_name, key=self._order.__getitem__)
        if ref.shape != value.shape:
            self.differences.append(
                f"{full_name} is of shape {tuple(value.shape)} there and of {tuple(ref.shape)} in the model"
            )

    def end(self, missing: set[str], unexpected: set[str], failures: dict[str, str]) -> None:
        # Under the other names of a tied parameter there is nothing to load.
        absent = [name for name in self.places if name in missing and not self._is_reached(name)]
        self.found = Differences(absent, sorted(unexpected | self.unexpected))
        for words, names in (
            ("lacks", self.found.missing_keys),
            ("has, and the model has not,", self.found.unexpected_keys),
        ):
            if names and self.strict:
                self.differences.append(f"it {words} {len(names)} tensors ({_some(sorted(names))})")
        # What cannot be converted without values says so when it has them.
        real = {name: text for name, text in failures.items() if "meta" not in text.lower()}
        self.differences += [f"{name} cannot be made: {text.strip().splitlines()[-1]}" for name, text in real.items()]

    def _is_reached(self, name: str) -> bool:
        return id(_tensor_of(*self.places[name])) in self.last

    def refuse_differences(self, directory: Path) -> None:
        """Raises `CheckpointError` if there was any."""
        if self.differences:
            raise CheckpointError(
                f"the weights in {directory} are not of this {type(self.model).__name__}: {_some(self.differences)}. "
                "Nothing was changed. Resume from a checkpoint of the same model, or build the model from its config."
            )


class _Write(_Target):
    """Writes to pages, and to buffers, which are not on any.

    Args:
        check: what has compared the same tensors, and refused none.
        engine: the model's.
    """

    def __init__(self, check: _Check, engine: Engine) -> None:
        super().__init__(check.model, check.places, check.strict)
        self.engine = engine
        self._last = check.last

    @torch.no_grad()
    def take(self, full_name: str, value: torch.Tensor) -> None:
        ref = _tensor_of(*self.places[full_name])
        if self._last[id(ref)] != full_name:
            return
        slot = self.engine.slots.of(ref)
        if slot is not None:
            with self.engine.pool.pin(slot.value, write=True) as pages:
                pages.copy_(value)
            slot.generation += 1
        elif ref is not None:
            ref.copy_(value)

    def end(self, missing: set[str], unexpected: set[str], failures: dict[str, str]) -> None:
        for name, text in failures.items():
            raise CheckpointError(
                f"{name} cannot be made from what is saved: {text.strip().splitlines()[-1]}. The model is now partly "
                "loaded; load another checkpoint into it."
            )


_Load = Callable[[nn.Module, Mapping[str, Any], _Target, str], None]
"""Hands tensors by name to a target; the last argument is the device they are made on."""


def _tensor_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """A module's parameter or buffer, without bringing it in."""
    param = dict.get(module._parameters, name)
    return param if param is not None else module._buffers.get(name)


def _load_converted(model: Any, tensors: Mapping[str, Any], target: _Target, device: str) -> None:
    """Hands `tensors` to `target`, renamed and fused as transformers does it for this model."""
    mapping: Any = get_model_conversion_mapping(model)
    config = LoadStateDictConfig(device_map={"": device}, weight_mapping=mapping)

    def redirect(original: Setter) -> Setter:
        def take(root: nn.Module, full_name: str, value: Any, info: Any, quantizer: Any) -> None:
            info.missing_keys.discard(full_name)
            target.take(full_name, value)

        return take

    before = model.__dict__.get("_weight_conversions")
    try:
        with redirected(redirect):
            info, _ = core_model_loading.convert_and_load_state_dict_in_model(model, dict(tensors), config)
    finally:
        # With what a model was read decides how it will be saved; that has not changed.
        model.__dict__.pop("_weight_conversions", None)
        if before is not None:
            model.__dict__["_weight_conversions"] = before
    if target.strict:
        model._adjust_missing_and_unexpected_keys(info)
    target.end(set(info.missing_keys), set(info.unexpected_keys), dict(info.conversion_errors))


def _load_plain(model: nn.Module, tensors: Mapping[str, Any], target: _Target, device: str) -> None:
    """Hands `tensors` to `target` by their own names."""
    known = target.places.keys()
    for name in known:
        if name in tensors:
            target.take(name, tensors[name][...])
    target.end(known - tensors.keys(), tensors.keys() - known, {})


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    shown = host_logging.is_progress_bar_enabled()
    host_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            host_logging.enable_progress_bar()
