"""Models that are read or built straight onto pages, so that they are never whole in memory.

`from_pretrained` lets transformers do all it does (resolve files, rename, fuse, cast, tie, initialise what is missing).
Only where transformers would put a tensor into the model, the tensor goes onto pages and the model gets a placeholder.
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
from ptm_accel.distributed.shards import same_on_all, sharding_of
from ptm_accel.engine import Engine
from ptm_accel.errors import CheckpointError, UnsupportedError
from ptm_accel.memory.block import Place, placeholder
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.malloc import set_kept_blocks
from ptm_accel.memory.setup import Memory
from ptm_accel.model.attach import Paged, small_bytes
from ptm_accel.model.grouping import group_of
from ptm_accel.opening import open_memory
from ptm_accel.pages import refuse_too_large

from ..exchanging import exchanged, one_at_a_time
from . import saving
from .resuming import newest_beside
from .weights import (
    Setter,
    is_redirected,
    load_weights,
    owner_of,
    read_headers,
    redirected,
    weight_files,
)

__all__ = ["from_config", "from_pretrained", "load_weights", "read_if_too_large"]

Options = PTMConfig | Mapping[str, Any] | str | os.PathLike[str] | None
Opened = tuple[ResolvedConfig, Memory]

_PLACED = "the budgets decide where parameters are; set host_memory, device_memory and disk instead"
_QUANTISED = "quantised parameters cannot be put on pages; load the model in a floating-point dtype"
_DIVIDED = "tensor and expert parallelism are not there; leave it out, and set shard: full to cut layers over processes"
_NOT_ON_PAGES = {
    **dict.fromkeys(("device_map", "max_memory", "offload_folder"), _PLACED),
    **dict.fromkeys(("quantization_config", "load_in_8bit", "load_in_4bit"), _QUANTISED),
    **dict.fromkeys(("distributed_config", "tp_plan", "tp_size"), _DIVIDED),
    "gguf_file": "only safetensors can be read onto pages; convert the model once with save_pretrained()",
    "state_dict": "it is in memory already; call AutoModel.from_pretrained and attach the engine to the model",
}


# ---- reading ---------------------------------------------------------------------------------------------------------


def from_pretrained(
    auto_cls: Any,
    id_or_path: str | os.PathLike[str],
    ptm_config: Options = None,
    *,
    memory: Memory | None = None,
    **kwargs: Any,
) -> Any:
    """Reads a model from safetensors straight onto pages.

    The result is that of `auto_cls.from_pretrained(id_or_path, **kwargs)`: the same values, dtypes and ties, in
    evaluation mode. Parameters that the checkpoint lacks are initialised with the same random numbers. In addition to
    the budgets, memory holds one tensor at a time (for fused experts, copies of one layer's experts).

    Args:
        auto_cls: an auto class, such as `AutoModelForCausalLM`, or a model class.
        id_or_path: a model id on the Hub, or a local directory.
        ptm_config: the options: a `PTMConfig`, a mapping, or the path of a YAML file.
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
    for name, reason in _NOT_ON_PAGES.items():
        if kwargs.get(name) not in (None, False):
            raise UnsupportedError(f"from_pretrained on pages does not take {name}={kwargs[name]!r}: {reason}.")
    if kwargs.get("use_safetensors") is False:
        raise UnsupportedError(
            "from_pretrained on pages does not take use_safetensors=False: other formats can only be read whole. "
            "Convert the model once with save_pretrained()."
        )
    if Path(id_or_path).is_dir():
        _check_directory(Path(id_or_path), kwargs)
    config = PTMConfig.load(ptm_config)
    with _Reader(config, open_memory(config, memory)).reading(id_or_path) as reader:
        loaded = auto_cls.from_pretrained(id_or_path, **{"use_safetensors": True, **kwargs})
        reader.attach(loaded[0] if isinstance(loaded, tuple) else loaded)
    return loaded


def read_if_too_large(
    stock: Callable[..., Any], config: PTMConfig, host_bytes: int, /, *args: Any, **kwargs: Any
) -> Any:
    """Calls a `from_pretrained` of transformers; a model that is too large for memory is read onto pages.

    Args:
        stock: the method, bound to its class.
        config: the options.
        host_bytes: a model whose parameters take no more than that is read as ever.
        *args: as for `stock`.
        **kwargs: as for `stock`; with those that decide where parameters are, the model is read as ever.
    """
    if is_redirected.get() or any(kwargs.get(name) not in (None, False) for name in _NOT_ON_PAGES):
        return stock(*args, **kwargs)
    with _Reader(config, None, host_bytes).reading(args[0] if args else kwargs):
        return stock(*args, **kwargs)


def _check_class(auto_cls: object) -> None:
    """Refuses what is often given first where the class is left out."""
    if not isinstance(auto_cls, type):
        raise UnsupportedError(
            f"{auto_cls!r} is a {type(auto_cls).__name__}, and not the class of a model. Give the class first, such as "
            "from_pretrained(AutoModelForCausalLM, id_or_path, ptm_config)."
        )


def _check_directory(directory: Path, kwargs: Mapping[str, Any]) -> None:
    """Refuses a local directory that is incomplete or damaged, before anything is built."""
    folder = directory / kwargs.get("subfolder", "")
    if not (folder / ADAPTER_CONFIG_NAME).is_file():
        try:
            read_headers(weight_files(folder, kwargs.get("variant")))
        except CheckpointError as error:
            raise CheckpointError(f"{error}{newest_beside(directory)}") from error


def _damaged(source: object, error: SafetensorError) -> CheckpointError:
    """The error of weights that transformers could not read, with the file if it can be told."""
    folder = Path(source) if isinstance(source, str | os.PathLike) else None
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    try:
        read_headers(files)
    except CheckpointError as found:
        return CheckpointError(f"{found}{newest_beside(files[0].parent)}")
    return CheckpointError(f"the weights of {source} are damaged: {error}. Download the model again.")


class _Reader:
    """Puts the tensors that transformers loads into a model onto pages.

    Args:
        config: the options.
        opened: the memory for the pages; None to open this machine's for a model that is larger than `host_bytes`, and
            to read others as ever.
        host_bytes: see above.
    """

    def __init__(self, config: PTMConfig, opened: Opened | None, host_bytes: int = 0) -> None:
        self._config = config
        self._opened = opened
        self._host_bytes = host_bytes
        self._sharding = sharding_of(config)
        self._begun = False
        self._values: dict[nn.Parameter, Paged] = {}
        self._engine: Engine | None = None

    @contextmanager
    def reading(self, source: object) -> Iterator[_Reader]:
        """While it lasts, what transformers loads goes onto pages. On failure the memory is closed."""
        with redirected(self._redirect), exchanged(PreTrainedModel, "_finalize_model_loading", self._finalize):
            try:
                yield self
            except BaseException as error:
                if self._opened is not None:
                    self._opened[1].close()
                if isinstance(error, SafetensorError):
                    raise _damaged(source, error) from error
                raise

    def _begin(self, model: nn.Module) -> Opened | None:
        """The memory of a model that is being read onto pages. Before its first tensor its size is looked at."""
        if not self._begun:
            self._begun = True
            if self._opened is None and sum(param.nbytes for param in model.parameters()) > self._host_bytes:
                self._opened = open_memory(self._config)
            if self._opened is not None:
                # Tensors that are only read to be copied onto pages are given back as they are freed.
                set_kept_blocks(large=False)
                twin = copy.deepcopy(model)
                if isinstance(twin, PreTrainedModel):
                    twin.tie_weights()
                refuse_too_large(twin, self._config, *self._opened)
        # What is loaded after the model is on pages (an adapter) is ordinary memory until the engine follows.
        return self._opened if self._engine is None else None

    def _redirect(self, original: Setter) -> Setter:
        def take(model: nn.Module, full_name: str, value: Any, info: Any, quantizer: Any) -> None:
            opened = self._begin(model)
            module, name = owner_of(model, full_name)
            if opened is None:
                original(model, full_name, value, info, quantizer)
            elif not isinstance(value, torch.Tensor) or module._parameters.get(name) is None or not value.numel():
                # A copy: what is mapped from the checkpoint would change, or end, with the file.
                value = value.clone() if isinstance(value, torch.Tensor) else value
                original(model, full_name, value, info, quantizer)
            else:
                pool, small = opened[1].pool, small_bytes(opened[0].page_bytes)
                data = placeholder(value.shape, value.dtype, pool.compute.device)
                stand_in = nn.Parameter(data, requires_grad=value.is_floating_point())
                original(model, full_name, stand_in, info, quantizer)
                if module._parameters.get(name) is stand_in:
                    group = group_of(full_name, value, small=small, sharding=self._sharding)
                    pages = group.part(0, "", Tag.PARAM, value.dtype, pool)
                    self._values[stand_in] = group, pages
                    values = value.detach()
                    if group.pieces:
                        # Only what this rank owns.
                        cut = group.pieces[0].cut
                        values = values.reshape(-1)[cut.start : cut.stop]
                    pool.fault(pages, write=True).copy_(values)

        return take

    def _finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces the function that ends the loading of a model: what follows (adapters) meets real values."""

        def finalize(model: Any, *rest: Any) -> Any:
            opened, info = self._begin(model), rest[-1]
            if opened is None:
                return original(model, *rest)
            pool, ties, named = opened[1].pool, model.all_tied_weights_keys, dict(model.named_parameters())
            # transformers ties weights that are both in a checkpoint if they are equal, which placeholders do not tell.
            info.missing_keys.update(name for name, source in ties.items() if self._are_equal(named, source, name))
            absent = [named[name] for name in info.missing_and_mismatched() - ties.keys() if name in named]
            nbytes, what = sum(param.nbytes for param in absent), f"{len(absent)} parameters that the checkpoint lacks"
            # They are made beside the pages, and are charged as pages once the model is attached.
            charge = pool.hold(nbytes, Tag.PARAM, what) if nbytes else None
            info = original(model, *rest)
            if charge is not None:
                charge.release()
            self.attach(model)
            return info

        return finalize

    def _are_equal(self, named: Mapping[str, nn.Parameter], one: str, other: str) -> bool:
        """Whether two parameters were both loaded, with the same values."""
        if not all(name in named and named[name] in self._values for name in (one, other)):
            return False
        (_, first), (_, second) = (self._values[named[name]] for name in (one, other))
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        assert self._opened is not None
        pool = self._opened[1].pool
        with pool.pin(first) as here, pool.pin(second) as there:
            equal = torch.equal(here, there)
        return equal if self._sharding is None else same_on_all(equal)

    def attach(self, model: nn.Module) -> None:
        """Joins the model and its pages; one that is on pages already is followed."""
        if self._engine is not None:
            self._engine.follow(model)
            return
        assert self._opened is not None
        resolved, memory = self._opened
        living = set(model.parameters())
        for param in [param for param in self._values if param not in living]:
            memory.pool.forget(self._values.pop(param)[1])
        self._engine = Engine.take_over(model, self._config, resolved, memory, self._values)
        model.to(memory.pool.compute.device)
        saving.install()


# ---- building --------------------------------------------------------------------------------------------------------


def from_config(
    auto_cls: Any, config: Any, ptm_config: Options = None, *, memory: Memory | None = None, **kwargs: Any
) -> Any:
    """Builds a model on pages and initialises it there, one tensor at a time.

    Its initial values are those of `initialize_weights()` on a model that was constructed without initialisation
    (`transformers.initialization.no_init_weights()`), with the same random state. `auto_cls.from_config` also draws
    random numbers in the constructors of torch's modules. So its values differ, but have the same distributions. On a
    device, the random numbers are the device's.

    Args:
        auto_cls: an auto class, such as `AutoModelForCausalLM`, or a model class.
        config: the model's configuration.
        ptm_config: the options: a `PTMConfig`, a mapping, or the path of a YAML file.
        memory: tiers made by the caller, instead of those of this machine; closed if this fails.
        **kwargs: as for `auto_cls.from_config`.

    Returns:
        the model, on pages, in training mode as that of `auto_cls.from_config`.

    Raises:
        UnsupportedError: no class is given, or `_init_weights` does not set a large parameter.
        BudgetError: less than the least budget the model can train under, before its weights are tied.
    """
    _check_class(auto_cls)
    options = PTMConfig.load(ptm_config)
    resolved, memory = open_memory(options, memory)
    # Blocks that modules leave behind in the heap would be filled later by what is read and converted.
    set_kept_blocks(large=False)
    try:
        with one_at_a_time:
            build = auto_cls.from_config if hasattr(auto_cls, "from_config") else auto_cls._from_config
            with initialization.no_init_weights(), _large_on_meta(small_bytes(resolved.page_bytes)):
                model = build(config, **kwargs)
        engine = Engine.take_over(model, options, resolved, memory, {})
        model.initialize_weights()
        left = [slot.name for slot in engine.slots if slot.own.place is Place.BLANK]
        if left:
            raise UnsupportedError(
                f"{len(left)} parameters of {type(model).__name__} are not set by its _init_weights (first: {left[0]}),"
                " so they have no initial values on pages. Set them there, or build the model as usual and pass it to "
                "the Trainer."
            )
        # Only now: weights that are tied draw random numbers of their own, as they do in the plain model.
        model.tie_weights(recompute_mapping=False)
        engine.follow()
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
