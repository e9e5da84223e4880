"""Models that are read or built straight onto pages, so that they are never whole in memory.

`from_pretrained` lets transformers do all it does (resolve files, rename, fuse, cast, tie, initialise what is missing);
only where it would put a tensor into the model, the tensor goes onto pages and the model gets a placeholder.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel, initialization
from transformers.utils import ADAPTER_CONFIG_NAME  # type: ignore[attr-defined]

from ptm_accel.config import PTMConfig, ResolvedConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import CheckpointError, UnsupportedError
from ptm_accel.memory.budget import Reservation, Tag
from ptm_accel.memory.malloc import set_kept_blocks
from ptm_accel.memory.paged import PagedTensor, Place, placeholder
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.setup import Memory
from ptm_accel.model.attach import create_value, small_bytes
from ptm_accel.model.slots import ParamSlot
from ptm_accel.opening import open_memory

from . import saving
from .weights import Setter, exchanged, load_weights, one_at_a_time, owner_of, read_headers, redirected, weight_files

__all__ = ["from_config", "from_pretrained", "load_weights"]

Dials = PTMConfig | Mapping[str, Any] | str | os.PathLike[str] | None

_NOT_ON_PAGES = {
    "device_map": "the budgets decide where parameters are; leave it out",
    "max_memory": "the budgets decide where parameters are; set host_memory, device_memory and disk instead",
    "offload_folder": "the disk dial says where parameters may be kept; set disk instead",
    "quantization_config": "quantised parameters cannot be put on pages; load the model in a floating-point dtype",
    "load_in_8bit": "quantised parameters cannot be put on pages; load the model in a floating-point dtype",
    "load_in_4bit": "quantised parameters cannot be put on pages; load the model in a floating-point dtype",
    "gguf_file": "only safetensors can be read onto pages; convert the model once with save_pretrained()",
    "state_dict": "it is in memory already; call AutoModel.from_pretrained and attach the engine to the model",
    "distributed_config": "pages of one model are not shared among processes yet; leave it out",
    "tp_plan": "pages of one model are not shared among processes yet; leave it out",
}


# ---- reading ---------------------------------------------------------------------------------------------------------


def from_pretrained(
    auto_cls: Any,
    id_or_path: str | os.PathLike[str],
    ptm_config: Dials = None,
    *,
    memory: Memory | None = None,
    **kwargs: Any,
) -> Any:
    """Reads a model from safetensors straight onto pages; as `auto_cls.from_pretrained(id_or_path, **kwargs)` else.

    Beyond the budgets, memory holds one tensor at a time (for fused experts, copies of one layer's experts). The
    values are those of the plain call, with the same dtypes and ties, and in evaluation mode as ever; parameters that
    the checkpoint lacks are initialised with the same random numbers.

    Args:
        auto_cls: an auto class, such as `AutoModelForCausalLM`, or a model class.
        id_or_path: a model id on the Hub, or a local directory.
        ptm_config: the dials: a `PTMConfig`, a mapping, or the path of a YAML file.
        memory: tiers made by the caller, instead of those of this machine; closed if this fails.
        **kwargs: as for `auto_cls.from_pretrained`.

    Returns:
        the model, on pages (with `output_loading_info=True`, the model and the loading information).

    Raises:
        UnsupportedError: no class is given, an argument decides where parameters are, or the format is not safetensors.
        CheckpointError: files are missing or damaged.
        BudgetError: less than the least budget the model can train under.
    """
    _check_class(auto_cls)
    _refuse(kwargs)
    if Path(id_or_path).is_dir():
        _check_directory(Path(id_or_path), kwargs)
    config = PTMConfig.load(ptm_config)
    resolved, memory = open_memory(config, memory)
    reader = _Reader(config, resolved, memory)
    try:
        with (
            redirected(reader.redirect),
            exchanged(PreTrainedModel, _MOVE_MISSING, reader.admit_missing),
            exchanged(PreTrainedModel, _FINALIZE, reader.attach_when_read),
        ):
            loaded = auto_cls.from_pretrained(id_or_path, **{"use_safetensors": True, **kwargs})
        reader.attach(loaded[0] if isinstance(loaded, tuple) else loaded)
    except SafetensorError as error:
        memory.close()
        raise CheckpointError(f"the weights of {id_or_path} are damaged: {error}. Download the model again.") from error
    except BaseException:
        memory.close()
        raise
    saving.install()
    return loaded


_MOVE_MISSING = "_move_missing_keys_from_meta_to_device"
_FINALIZE = "_finalize_model_loading"


def _check_class(auto_cls: object) -> None:
    """Refuses what is often given first where the class is left out."""
    if not isinstance(auto_cls, type):
        raise UnsupportedError(
            f"{auto_cls!r} is a {type(auto_cls).__name__}, and not the class of a model. Give the class first, such as "
            "from_pretrained(AutoModelForCausalLM, id_or_path, ptm_config)."
        )


def _refuse(kwargs: Mapping[str, Any]) -> None:
    for name, reason in _NOT_ON_PAGES.items():
        if kwargs.get(name) not in (None, False):
            raise UnsupportedError(f"from_pretrained on pages does not take {name}={kwargs[name]!r}: {reason}.")
    if kwargs.get("use_safetensors") is False:
        raise UnsupportedError(
            "from_pretrained on pages does not take use_safetensors=False: other formats can only be read whole. "
            "Convert the model once with save_pretrained()."
        )


def _check_directory(directory: Path, kwargs: Mapping[str, Any]) -> None:
    """Refuses a local directory that is incomplete or damaged, before anything is built."""
    folder = directory / kwargs.get("subfolder", "")
    if not (folder / ADAPTER_CONFIG_NAME).is_file():
        read_headers(weight_files(folder, kwargs.get("variant")))


class _Reader:
    """Takes the tensors that transformers loads onto pages.

    Args:
        config: the dials.
        resolved: what was made of them.
        memory: where the pages are.
    """

    def __init__(self, config: PTMConfig, resolved: ResolvedConfig, memory: Memory) -> None:
        self._config = config
        self._resolved = resolved
        self._memory = memory
        self._pool: Pool = memory.pool
        self._small = small_bytes(resolved.page_bytes)
        self._values: dict[nn.Parameter, PagedTensor] = {}
        self._loaded: dict[str, nn.Parameter] = {}
        self._missing: list[Reservation] = []
        self._sized = False
        # Tensors that are only read to be copied onto pages are given back as they are freed.
        set_kept_blocks(large=False)
        self._engine: Engine | None = None

    def redirect(self, original: Setter) -> Setter:
        """Makes the function that transformers hands loaded tensors to."""

        def take(model: nn.Module, full_name: str, value: Any, info: Any, quantizer: Any) -> None:
            if self._engine is not None:
                # An adapter, which is put into the model after that is on pages.
                original(model, full_name, value, info, quantizer)
                return
            if not self._sized:
                self._sized = True
                self._rehearse(model)
            module, name = owner_of(model, full_name)
            if not isinstance(value, torch.Tensor) or module._parameters.get(name) is None or not value.numel():
                # A copy: what is mapped from the checkpoint would change, or end, with the file.
                value = value.clone() if isinstance(value, torch.Tensor) else value
                original(model, full_name, value, info, quantizer)
                return
            value = value.detach()
            if self._is_there_already(model, full_name, value, info):
                return
            stand_in = self._stand_in(value)
            original(model, full_name, stand_in, info, quantizer)
            if module._parameters.get(name) is stand_in:
                self._values[stand_in] = self._put(full_name, value)
                self._loaded[full_name] = stand_in

        return take

    def admit_missing(self, original: Callable[..., None]) -> Callable[..., None]:
        """Makes the function that gives memory to what the checkpoint lacks: it is charged first."""

        def move(model: Any, missing_keys: Any, *rest: Any) -> None:
            named = dict(model.named_parameters())
            lacking = [named[name] for name in missing_keys - model.all_tied_weights_keys.keys() if name in named]
            nbytes = sum(param.nbytes for param in lacking)
            if nbytes:
                what = f"{len(lacking)} parameters that the checkpoint lacks"
                self._missing.append(self._pool.hold(nbytes, Tag.PARAM, what))
            original(model, missing_keys, *rest)

        return move

    def attach_when_read(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the function that ends the reading of a model: what is done to it then (adapters) meets real values."""

        def finalize(model: nn.Module, *rest: Any) -> Any:
            info = original(model, *rest)
            self.attach(model)
            return info

        return finalize

    def attach(self, model: nn.Module) -> Engine:
        """Joins the model and its pages. On failure the pages are gone, and the model is of no use."""
        if self._engine is not None:
            self._engine.follow(model)
            return self._engine
        for reservation in self._missing:
            reservation.release()
        living = set(model.parameters())
        for param in [param for param in self._values if param not in living]:
            self._pool.forget(self._values.pop(param))
        self._engine = Engine.take_over(model, self._config, self._resolved, self._memory, self._values)
        model.to(self._pool.compute.device)
        return self._engine

    def _rehearse(self, model: nn.Module) -> None:
        """Refuses a model that cannot train under the budgets before anything is read."""
        twin = copy.deepcopy(model)
        if isinstance(twin, PreTrainedModel):
            twin.tie_weights()
        Engine.rehearse(twin, self._config, self._resolved, self._memory)

    def _stand_in(self, value: torch.Tensor) -> nn.Parameter:
        data = placeholder(value.shape, value.dtype, self._pool.compute.device)
        return nn.Parameter(data, requires_grad=value.is_floating_point())

    def _put(self, name: str, value: torch.Tensor) -> PagedTensor:
        pages = create_value(name, value, self._pool, small=self._small)
        self._pool.fault(pages, write=True).copy_(value)
        return pages

    def _is_there_already(self, model: nn.Module, name: str, value: torch.Tensor, info: Any) -> bool:
        """Whether `value` is that of a weight loaded before, to which it will be tied.

        transformers ties two weights that a checkpoint has both only if they are equal, which it cannot see on
        placeholders. Where they are, it is told that the second is missing.
        """
        ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
        source = ties.get(name, name)
        for other in (source, *(target for target, of in ties.items() if of == source)):
            param = self._loaded.get(other)
            if other == name or param is None or param.shape != value.shape or param.dtype != value.dtype:
                continue
            here = self._pool.fault(self._values[param])
            if not torch.equal(here, value.to(here.device)):
                continue
            if name == source:
                self._move(model, other, name)
                info.missing_keys.discard(name)
                info.missing_keys.add(other)
            return True
        return False

    def _move(self, model: nn.Module, before: str, after: str) -> None:
        """Gives the parameter that was loaded as `before` the name `after`."""
        param = self._loaded[after] = self._loaded.pop(before)
        module, name = owner_of(model, after)
        module._parameters[name] = param
        module, name = owner_of(model, before)
        module._parameters[name] = nn.Parameter(
            torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad
        )


# ---- building --------------------------------------------------------------------------------------------------------


def from_config(
    auto_cls: Any, config: Any, ptm_config: Dials = None, *, memory: Memory | None = None, **kwargs: Any
) -> Any:
    """Builds a model on pages and initialises it there, one tensor at a time.

    Its initial values are those of `initialize_weights()` on a model that was constructed without initialisation
    (`transformers.initialization.no_init_weights()`), with the same random state. `auto_cls.from_config` draws other
    random numbers before those, in the constructors of torch's modules, so its values are others from the same
    distributions. On a device, the random numbers are the device's.

    Args:
        auto_cls: an auto class, such as `AutoModelForCausalLM`, or a model class.
        config: the model's configuration.
        ptm_config: the dials: a `PTMConfig`, a mapping, or the path of a YAML file.
        memory: tiers made by the caller, instead of those of this machine; closed if this fails.
        **kwargs: as for `auto_cls.from_config`.

    Returns:
        the model, on pages, in training mode as ever.

    Raises:
        UnsupportedError: no class is given, or a large parameter is left by `_init_weights` as it was constructed.
        BudgetError: less than the least budget the model can train under.
    """
    _check_class(auto_cls)
    dials = PTMConfig.load(ptm_config)
    resolved, memory = open_memory(dials, memory)
    try:
        with one_at_a_time:
            build = auto_cls.from_config if hasattr(auto_cls, "from_config") else auto_cls._from_config
            with initialization.no_init_weights(), _large_on_meta(small_bytes(resolved.page_bytes)):
                model = build(config, **kwargs)
        separate = _tie(model)
        engine = Engine.take_over(model, dials, resolved, memory, {})
        with _untied(engine, model, separate):
            model.initialize_weights()
        _refuse_uninitialised(engine)
    except BaseException:
        memory.close()
        raise
    model.to(memory.pool.compute.device)
    saving.install()
    return model


@contextmanager
def _large_on_meta(small: int) -> Iterator[None]:
    """While it lasts, modules' parameters of `small` bytes and more are put on the meta device as they are made."""
    made: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and param.device.type != "meta" and param.nbytes >= small:
                if param not in made:
                    made[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                    made[param].__dict__.update(param.__dict__)
                param = made[param]
            original(module, name, param)

        return register

    with exchanged(nn.Module, "register_parameter", make):
        yield


def _tie(model: Any) -> dict[str, nn.Parameter]:
    """Ties the model's weights; returns those that were parameters of their own before, by name."""
    before: dict[str, nn.Parameter] = {}
    for name in model.all_tied_weights_keys:
        module, last = owner_of(model, name)
        param = module._parameters.get(last)
        if param is not None:
            before[name] = param
    model.tie_weights(recompute_mapping=False)
    return before


@contextmanager
def _untied(engine: Engine, model: nn.Module, separate: dict[str, nn.Parameter]) -> Iterator[None]:
    """While it lasts, tied weights are apart: each draws random numbers of its own, as it does in the plain model."""
    slots, pool = engine.slots, engine.pool
    names = dict(slots.by_name)
    tied: list[tuple[nn.Module, str, nn.Parameter | None]] = []
    passing: list[ParamSlot] = []
    for name, param in separate.items():
        module, last = owner_of(model, name)
        tied.append((module, last, module._parameters[last]))
        if param.device.type == "meta":
            stand_in = placeholder(param.shape, param.dtype, pool.compute.device)
            value = create_value(f"{name}, before it is tied", param, pool, small=0)
            param = nn.Parameter(stand_in, requires_grad=param.requires_grad)
            passing.append(ParamSlot(value.name, param, value, pool, engine.table))
            slots.add(passing[-1])
            passing[-1].come_onto_pages(engine.residency, pool.compute.device)
        module._parameters[last] = param
    try:
        yield
    finally:
        for module, last, shared in tied:
            module._parameters[last] = shared
        for slot in passing:
            slots.remove(slot)
            slot.leave_pages()
            pool.forget(slot.value)
        slots.by_name.clear()
        slots.by_name.update(names)


def _refuse_uninitialised(engine: Engine) -> None:
    left = [slot.name for slot in engine.slots if slot.value.place is Place.BLANK]
    if left:
        kind = type(engine.model).__name__
        raise UnsupportedError(
            f"{len(left)} parameters of {kind} are not set by its _init_weights (first: {left[0]}), so they have no "
            "initial values on pages. Set them there, or build the model as usual and pass it to the Trainer."
        )
