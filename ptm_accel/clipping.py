"""Torch's own functions that look at gradients, where those are on pages.

`torch.nn.utils.clip_grad_norm_` and its like, and `Module.zero_grad`, read `p.grad`, which is empty then: they would
clip or drop nothing, and say nothing. So they are exchanged for functions that know (`install`), as `Accelerator`'s own
are; and the step of an optimizer that was not prepared is refused (`ptm_accel.optim.step_guard`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ptm_accel.errors import UnsupportedError

if TYPE_CHECKING:
    from ptm_accel.engine import Engine
    from ptm_accel.model.grad_slot import GradSlot


def install() -> None:
    """Exchanges torch's functions; called again, does nothing. Names imported before keep the stock ones."""
    module: Any = torch.nn.utils.clip_grad
    if hasattr(module.clip_grad_norm_, "knows_pages"):
        return
    for name, ours in (("clip_grad_norm_", clip_grad_norm), ("clip_grad_value_", clip_grad_value)):
        setattr(module, name, _knowing(getattr(module, name), ours))
        setattr(torch.nn.utils, name, getattr(module, name))
    # Not as `clip_grad` names them: torch's own clipping calls those, also for other models that have no gradients.
    utils: Any = torch.nn.utils
    utils.clip_grads_with_norm_ = _knowing(utils.clip_grads_with_norm_, clip_grads_with_norm)
    utils.get_total_norm = _refusing_nothing(utils.get_total_norm)
    zero_grad: Any = _dropping(nn.Module.zero_grad)
    nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]


def guard_steps() -> None:
    """Has steps refused that would find no gradients; called again, does nothing."""
    from ptm_accel.optim.optimizer import PagedOptimizer
    from ptm_accel.optim.step_guard import StepGuard

    if not StepGuard.installed():
        StepGuard(_waiting, PagedOptimizer).install()


def clip_grad_norm(
    engine: Engine,
    parameters: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, over gradients on pages; bit-equal to it.

    Args:
        engine: that has them.
        parameters: all that have gradients, in the order in which torch would sum.
        max_norm: the most that their norm may be.
        norm_type: the p of the p-norm.
        error_if_nonfinite: a norm that is infinite or NaN is an error.
        foreach: has no effect.

    Returns:
        the norm before clipping, a scalar.

    Raises:
        UnsupportedError: only a part of the model's parameters that have gradients was given, or some of another model
            on pages.
        RuntimeError: see `error_if_nonfinite`; nothing has been clipped.
    """
    _refuse_part(engine, parameters, "clip_grad_norm_")
    return engine.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, parameters=parameters)


@torch.no_grad()
def clip_grads_with_norm(
    engine: Engine,
    parameters: Sequence[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """As `torch.nn.utils.clip_grads_with_norm_`, over gradients on pages; bit-equal to it.

    Args:
        engine: that has them.
        parameters: all that have gradients.
        max_norm: the most that their norm may be.
        total_norm: what it is taken to be.
        foreach: has no effect.

    Raises:
        UnsupportedError: as `clip_grad_norm`.
    """
    from ptm_accel.model.norms import clip_coefficient

    assert engine.gradients is not None
    _refuse_part(engine, parameters, "clip_grads_with_norm_")
    engine.synchronise()
    given = engine.gradients.among(parameters)
    coefficient = clip_coefficient(total_norm, float(max_norm))
    if given:
        engine.scale_gradients(coefficient.to(engine.pool.compute.device), given)
    for gradient in engine.other_gradients(parameters):
        gradient.mul_(coefficient.to(gradient.device))


def clip_grad_value(
    engine: Engine, parameters: Sequence[torch.Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    """As `torch.nn.utils.clip_grad_value_`, over gradients on pages.

    Args:
        engine: that has them.
        parameters: whose gradients are clipped.
        clip_value: the most that an element may be, and minus that the least.
        foreach: has no effect.

    Raises:
        UnsupportedError: some parameters are of another model on pages.
    """
    assert engine.gradients is not None
    given = _own(engine, parameters, "clip_grad_value_")
    with torch.no_grad():
        engine.synchronise()
        if engine.optimizer is not None:
            engine.optimizer.in_backward.refuse("gradients were clipped by value")
            engine.optimizer.apply_scale()
        for gradient in engine.other_gradients(parameters):
            gradient.clamp_(-float(clip_value), float(clip_value))
        for grad in engine.gradients.present():
            if id(grad.slot.param) in given and grad.value is not None:
                with engine.pool.pin(grad.value, write=True) as total:
                    total.clamp_(-float(clip_value), float(clip_value))
                grad.changed()


def drop_gradients(module: nn.Module, set_to_none: bool = True) -> None:
    """Forgets the gradients on pages of a module's parameters, as `module.zero_grad()` forgets `p.grad`.

    Those that a step still uses beside the next forward are not among them: it has taken them over.

    Args:
        module: a model, a part of one, or what wraps one.
        set_to_none: otherwise zeros are left in their place.

    Raises:
        UnsupportedError: updates have begun during backward, and their step has not come yet; or somebody looks at
            the gradients.
    """
    from ptm_accel.engine import living_engines
    from ptm_accel.model.looks import refuse_looked_at

    for engine in living_engines():
        if engine.gradients is None:
            continue
        slots = [slot for param in module.parameters() if (slot := engine.slots.of(param)) is not None]
        gradients = [grad for slot in slots if (grad := engine.gradients.known(slot)) is not None]
        if gradients and engine.optimizer is not None:
            engine.optimizer.in_backward.refuse("gradients were dropped")
        refuse_looked_at(gradients)
        for grad in gradients:
            grad.forget() if set_to_none else grad.zero()


def _refuse_part(engine: Engine, parameters: Sequence[torch.Tensor], name: str) -> None:
    assert engine.gradients is not None
    given = _own(engine, parameters, name)
    present = engine.gradients.arrived()
    left_out = [grad.slot.name for grad in present if id(grad.slot.param) not in given]
    if left_out:
        raise UnsupportedError(
            f"{name} was given {len(given)} parameters, but {len(left_out)} of {len(present)} gradients "
            f"belong to others, such as {left_out[0]}; on pages, a norm is taken over all. Pass model.parameters()."
        )


def _own(engine: Engine, parameters: Sequence[torch.Tensor], name: str) -> set[int]:
    """The parameters that are the engine's, by identity; others may be of no model on pages."""
    from ptm_accel.engine import engine_holding
    from ptm_accel.model.looks import refuse_shown

    assert engine.gradients is not None
    refuse_shown(engine.gradients.slots(), f"{name} was called")
    others = [param for param in parameters if engine.slots.of(param) is None]
    strange = [param for param in others if engine_holding([param]) is not None]
    if strange:
        raise UnsupportedError(
            f"{name} was given {len(parameters)} parameters, and {len(strange)} of them are of another model on pages "
            "than the others. Clip each model by itself: pass model.parameters()."
        )
    return {id(param) for param in parameters} - {id(param) for param in others}


def _knowing(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def clip(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        parameters = given["parameters"]
        given["parameters"] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # Nothing is on pages as long as nobody has imported what puts it there.
        module = sys.modules.get("ptm_accel.engine")
        engine = None if module is None else module.engine_holding(given["parameters"])
        # Those that somebody may write to where they are shown are in `p.grad`.
        return stock(**given) if engine is None or engine.gives_gradients else ours(engine, **given)

    vars(clip)["knows_pages"] = True
    return clip


def _refusing_nothing(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def total_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs).arguments
        tensors = given["tensors"]
        given["tensors"] = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not given["tensors"]:
            _refuse_no_gradients()
        return stock(**given)

    return total_norm


def _refuse_no_gradients() -> None:
    module = sys.modules.get("ptm_accel.engine")
    engines = [] if module is None else module.living_engines()
    on_pages = sum(len(engine.gradients.arrived()) for engine in engines if engine.gradients is not None)
    if on_pages:
        raise UnsupportedError(
            f"get_total_norm was given no tensors, and {on_pages} gradients are on pages, where p.grad is None. Call "
            "clip_grad_norm_(model.parameters(), max_norm) instead, of torch.nn.utils or of the Accelerator, which "
            "returns the norm; with max_norm=float('inf') it changes no gradient as long as the norm is finite."
        )


def _dropping(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        stock(self, set_to_none)
        if "ptm_accel.engine" in sys.modules:
            drop_gradients(self, set_to_none)

    return zero_grad


def _waiting(parameters: Iterable[torch.Tensor]) -> list[GradSlot]:
    """The gradients of parameters that are on pages."""
    from ptm_accel.engine import living_engines

    engines = [engine for engine in living_engines() if engine.gradients is not None]
    ids = {id(param) for param in parameters if any(engine.slots.of(param) is not None for engine in engines)}
    gradients = [engine.gradients.arrived() for engine in engines if ids and engine.gradients is not None]
    return [grad for each in gradients for grad in each if id(grad.slot.param) in ids]
