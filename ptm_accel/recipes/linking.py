"""Links the repeated blocks of a model: parameters of the same name and shape in all of them become one.

Of Pseudo-to-Real training (M6-10T, arXiv 2110.03888), where this is the pseudo giant. On pages the one is resident,
moved and updated once, as any parameter with several names.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.budget import Reservation, Tag, Tier
from ptm_accel.memory.mapping import mapped_copies


class LinkedParam(NamedTuple):
    """Parameter of a block that is replaced by that of the first block.

    Attributes:
        module: has it, as `_parameters[attribute]`.
        attribute: see above.
        name: in the model.
        block: the number of its block among those that share.
        source: the name of the parameter in its place.
    """

    module: nn.Module
    attribute: str
    name: str
    block: int
    source: str


_PLACES = "_ptm_linked_places"
"""Where a model keeps them: a table beside it would keep the model alive, to which its modules lead by their hooks."""


def is_linked(model: nn.Module) -> bool:
    """Returns whether blocks of a model are linked."""
    return bool(places_of(model))


def places_of(model: nn.Module) -> list[LinkedParam]:
    """Returns the parameters of a linked model that are others' now; of one that is not linked, none."""
    found: list[LinkedParam] = model.__dict__.get(_PLACES, [])
    return found


def forget(model: nn.Module) -> None:
    """The blocks of a model have weights of their own again."""
    model.__dict__.pop(_PLACES, None)


def link(model: nn.Module) -> int:
    """Gives the repeated blocks of a model (in its outermost `ModuleList`s, of one class) the first one's weights.

    Not shared are: parameters of another shape or dtype, those that are frozen in one block only, those that one block
    alone has (T5's table of relative positions), and buffers. The gradient of a shared weight is the sum over the
    blocks, so its norm is up to their number times larger, which a limit on the norm has to allow for.

    Args:
        model: the model; on pages or not. The weights of its other blocks are lost.

    Returns:
        the number of parameters that have been replaced.

    Raises:
        UnsupportedError: it has no repeated blocks, or is linked already.
    """
    if is_linked(model):
        raise UnsupportedError(f"the blocks of this {type(model).__name__} are linked already; delink them first.")
    places = list(_find(model))
    if not places:
        raise UnsupportedError(
            f"{type(model).__name__} has no repeated blocks, so nothing can be linked: two modules at least of one "
            "class in a torch.nn.ModuleList, with trainable parameters of the same names and shapes. Leave "
            "pseudo_to_real out."
        )
    sources = {place.source: model.get_parameter(place.source) for place in places}
    for place in places:
        place.module._parameters[place.attribute] = sources[place.source]
    model.__dict__[_PLACES] = places
    if not any(hook is _separate for hook in model._state_dict_hooks.values()):
        model.register_state_dict_post_hook(_separate)
    engine = engine_of(model)
    if engine is not None:
        engine.follow(model)
    return len(places)


def _find(model: nn.Module) -> Iterator[LinkedParam]:
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for path in lists:
        if any(path.startswith(f"{other}.") for other in lists):
            # Experts of a layer are different ones by design.
            continue
        kinds: dict[type, list[tuple[str, nn.Module]]] = defaultdict(list)
        for number, block in model.get_submodule(path).named_children():
            kinds[type(block)].append((f"{path}.{number}", block))
        for blocks in kinds.values():
            yield from _find_among(blocks)


def _find_among(blocks: list[tuple[str, nn.Module]]) -> Iterator[LinkedParam]:
    """Yields the parameters of blocks of one class that the first of them with the like has as well."""
    first: dict[Any, str] = {}
    for number, (path, block) in enumerate(blocks):
        for name, param in block.named_parameters():
            # What is frozen stays what it was.
            key = (name, param.shape, param.dtype)
            if not param.requires_grad:
                continue
            if key not in first:
                first[key] = f"{path}.{name}"
                continue
            owner, _, attribute = name.rpartition(".")
            yield LinkedParam(block.get_submodule(owner), attribute, f"{path}.{name}", number, first[key])


# ---- saving ----------------------------------------------------------------------------------------------------------


def _separate(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Gives linked names tensors of their own in a state dictionary: savers refuse or leave out what is shared.

    All names of a parameter map one copy of it, so that this costs the bytes of the blocks once.
    """
    names: dict[str, list[str]] = defaultdict(list)
    for place in places_of(module):
        value = state_dict.get(prefix + place.name)
        if isinstance(value, torch.Tensor) and not value.is_meta:
            names[place.source].append(prefix + place.name)
    engine = engine_of(module)
    for found in names.values():
        value = state_dict[found[0]].detach().cpu()
        folder = None if engine is None else max(engine.config.disk_paths, key=_free_bytes, default=None)
        held = None if engine is None or folder is not None else _hold(engine, value.nbytes)
        state_dict.update(zip(found, mapped_copies(value, len(found), folder, held), strict=True))


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _hold(engine: Engine, nbytes: int) -> Reservation:
    """Room in host memory for a copy of a weight.

    Raises:
        BudgetError: there is none.
    """
    name = "a copy of linked weights for a checkpoint"
    if engine.pool.budget.tier is Tier.HOST:
        return engine.pool.hold(nbytes, Tag.PARAM, name)
    return engine.memory.budgets[Tier.HOST].reserve(nbytes, Tag.PARAM, name)


def counts(places: list[LinkedParam]) -> Mapping[str, int]:
    """Counts the blocks that share each parameter, by its name."""
    found: dict[str, int] = defaultdict(lambda: 1)
    for place in places:
        found[place.source] += 1
    return found
