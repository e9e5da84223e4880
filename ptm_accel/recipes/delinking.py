"""Delinks the blocks of a model: each gets a clone of the weights that they have shared, and of their optimizer state.

The second half of Pseudo-to-Real training (M6-10T, arXiv 2110.03888): from here on the model is the real one. What the
paper does with optimizer state is not published; `MOMENTS` are the choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from ptm_accel.config import MOMENTS
from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import UnsupportedError
from ptm_accel.optim.hyperparameters import NAMES
from ptm_accel.optim.states import MASTER_KEY
from ptm_accel.recipes.linking import LinkedParam, counts, forget, places_of

_FIRST = ("exp_avg", "exp_inf", "momentum_buffer")
"""State that grows as the gradient does: in Adam, Adamax, SGD."""
_SECOND = ("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg")
"""State that grows as its square does: in Adam, Adagrad, RMSprop."""

State = dict[str, Any]
Clones = dict[nn.Parameter, nn.Parameter]
"""New parameters, each with the one whose clone it is."""


def delink(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, moments: str = "scale") -> int:
    """Gives each block of a linked model a clone of the weights, between two steps.

    Learning rates, parameter groups and schedulers stay: a clone is in the group of its original.

    Args:
        model: the model; on pages or not.
        optimizer: its optimizer, or a wrapper of it; None if there is none yet.
        moments: the optimizer state of the clones. `"copy"`: that of the shared weights. `"scale"`: that divided by the
            number of blocks, as if each had had an equal share of the gradients, independent of the others'.
            `"reset"`: none; it begins anew.

    Returns:
        the number of new parameters.

    Raises:
        UnsupportedError: the model is not linked, it has gradients, or `moments` is none of these.
        BudgetError: there is no room for the new parameters and their state.
    """
    places = places_of(model)
    if moments not in MOMENTS:
        raise UnsupportedError(f"moments: got {moments!r}; write one of {', '.join(MOMENTS)}.")
    if not places:
        raise UnsupportedError(f"the blocks of this {type(model).__name__} are not linked; link them first.")
    engine = engine_of(model)
    if engine is not None:
        engine.settle()
    shared = {name: model.get_parameter(name) for name in counts(places)}
    left = [name for name, param in shared.items() if param.grad is not None]
    if left:
        raise UnsupportedError(
            f"{len(left)} shared weights have gradients, such as {left[0]}: sums over all blocks, of which none could "
            "have its own. Delink after optimizer.step() and optimizer.zero_grad()."
        )
    state = _state_of(_innermost(optimizer), engine)
    sharing = counts(places)
    for name, param in shared.items():
        state.change(param, moments, sharing[name])
    for _, block in groupby(sorted(places, key=_order), key=_order):
        clones = _clone(list(block), shared, engine)
        if engine is not None:
            engine.follow(model)
        state.add(clones, list(model.parameters()), {param: name for name, param in model.named_parameters()})
    forget(model)
    return len(places)


def _order(place: LinkedParam) -> tuple[str, int]:
    """Returns the list that a block is in, and its number: so much is copied at a time."""
    return place.source.partition(".")[0], place.block


def _clone(places: Sequence[LinkedParam], shared: Mapping[str, nn.Parameter], engine: Engine | None) -> Clones:
    clones: Clones = {}
    for place in places:
        source = shared[place.source]
        slot = None if engine is None else engine.slots.of(source)
        values = source.detach().clone() if slot is None else slot.copied()
        clone = nn.Parameter(values, requires_grad=source.requires_grad)
        # Marks that libraries have put on it.
        clone.__dict__.update(source.__dict__)
        place.module._parameters[place.attribute] = clone
        clones[clone] = source
    return clones


def _innermost(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Returns the optimizer that accelerate has wrapped, or the one given."""
    inner = getattr(optimizer, "optimizer", None)
    return _innermost(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


# ---- optimizer state -------------------------------------------------------------------------------------------------


def changed(state: State, moments: str, blocks: int) -> State:
    """What a block has of the optimizer state of the weights that it has shared.

    Args:
        state: of the shared weights, by the optimizer's own keys.
        moments: see `delink`.
        blocks: how many share them.
    """
    if moments == "reset":
        # A master is no moment: it is the weights.
        return {key: value for key, value in state.items() if key == MASTER_KEY}
    factor = 1.0 / blocks if moments == "scale" else 1.0
    scaled = (*_FIRST, *_SECOND) if moments == "scale" else ()
    return {
        key: value * factor if key in scaled and isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


class _PlainState:
    """The state of an ordinary optimizer; of none, nothing.

    Args:
        optimizer: see above.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.groups = [] if optimizer is None else optimizer.param_groups
        self._state: Any = {} if optimizer is None else optimizer.state

    def change(self, param: nn.Parameter, moments: str, blocks: int) -> None:
        """Makes the state of a shared parameter what a block has of it."""
        made = changed(self._state.pop(param, {}), moments, blocks)
        if made:
            self._state[param] = made

    def copy(self, source: nn.Parameter, clone: nn.Parameter) -> None:
        """Gives a clone the state of its source."""
        if source in self._state:
            self._state[clone] = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in self._state[source].items()
            }

    def add(self, clones: Clones, order: Sequence[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
        """Puts clones in the groups of their sources, and gives them their state.

        Args:
            clones: see above.
            order: all parameters of the model; groups that are in this order stay so, as those of a new optimizer are.
            names: of all parameters.
        """
        for group in self.groups:
            _insert(group, clones, {param: number for number, param in enumerate(order)}, names)
        for clone, source in clones.items():
            self.copy(source, clone)


class _PagedState(_PlainState):
    """The state of the optimizer of a model on pages.

    Args:
        engine: has it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        super().__init__(None)
        self.groups = [] if engine.optimizer is None else engine.optimizer.inner.param_groups

    def change(self, param: nn.Parameter, moments: str, blocks: int) -> None:
        """See `_PlainState.change`; one parameter at a time is held beside the budgets."""
        self._replace(param, param, lambda state: changed(state, moments, blocks))

    def copy(self, source: nn.Parameter, clone: nn.Parameter) -> None:
        """See `_PlainState.copy`."""
        self._replace(source, clone, dict)

    def _replace(self, source: nn.Parameter, into: nn.Parameter, change: Callable[[State], State]) -> None:
        optimizer, slots = self._engine.optimizer, self._engine.slots
        there, here = slots.of(source), slots.of(into)
        if optimizer is None or there is None or here is None:
            return
        states = optimizer.states
        known = states.met(there)
        if known is not None:
            states.replace(states.of(here), change(states.values(known)), None)


def _state_of(optimizer: torch.optim.Optimizer | None, engine: Engine | None) -> _PlainState:
    return _PlainState(optimizer) if engine is None else _PagedState(engine)


def _insert(
    group: dict[str, Any], clones: Clones, order: Mapping[nn.Parameter, int], names: Mapping[nn.Parameter, str]
) -> None:
    """Puts clones into a parameter group that has their sources."""
    params: list[nn.Parameter] = group["params"]
    held = set(params)
    new = [clone for clone, source in clones.items() if source in held]
    if not new:
        return
    last = len(order)
    numbers = [order.get(param, last) for param in params]
    params += new
    if numbers == sorted(numbers):
        params.sort(key=lambda param: order.get(param, last))
    if NAMES in group:
        known = dict(zip([param for param in params if param in held], group[NAMES], strict=False))
        group[NAMES] = [known.get(param) or names[param] for param in params]
