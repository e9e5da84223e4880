"""What others may see of gradients that are on pages, and do with them; what they may not is refused by name."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from ptm_accel.errors import UnsupportedError
from ptm_accel.model.hooks import Hook
from ptm_accel.model.slots import ParamSlot

if TYPE_CHECKING:
    from ptm_accel.model.grad_slot import GradSlot


_OF_A_GRADIENT = 2
"""Who refers to its storage: the gradient and whoever asks."""


class Look(enum.Enum):
    """What somebody does with a gradient who sees it as `p.grad`."""

    NONE = "nobody looks"
    READ = "read"
    WRITE = "write"


def refuse_looked_at(gradients: Iterable[GradSlot]) -> None:
    """Says that gradients were to be forgotten that somebody looks at who said that nothing would change.

    Raises:
        UnsupportedError: so it is.
    """
    shown = [grad.slot.name for grad in gradients if grad.look is Look.READ]
    if shown:
        raise UnsupportedError(
            f"zero_grad() was called within ptm_accel.gathered(model, grads=True), which shows {len(shown)} of its "
            f"gradients, such as that of {shown[0]}. Call it after that, or gather with write=True."
        )


def refuse_shown(gradients: Iterable[GradSlot], what: str) -> None:
    """Says that something was done with gradients on pages while somebody has them in `p.grad`.

    Args:
        gradients: which ones.
        what: was done.

    Raises:
        UnsupportedError: so it is.
    """
    shown = [grad.slot.name for grad in gradients if grad.look is not Look.NONE]
    if shown:
        raise UnsupportedError(
            f"{what} within ptm_accel.gathered(model, grads=True), which shows {len(shown)} gradients, such as that of "
            f"{shown[0]}, in p.grad: it takes what they are then only at its end. Do it after that."
        )


def is_held(gradient: torch.Tensor) -> bool:
    """Whether somebody else has the memory of a gradient too, which nobody but the caller should have any more.

    Args:
        gradient: detached from what autograd has left in the parameter.
    """
    users: int = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    return users > _OF_A_GRADIENT


def lend_to_hooks(slots: Iterable[ParamSlot]) -> list[RemovableHandle]:
    """Has parameters there when somebody's post-accumulate hooks are called, which may write to them (an update).

    Such a hook is given its parameter, so that nothing tells when it reads or writes it, and what torch's fused
    optimizers write it does not count. On a placeholder they would write beyond its end.

    Args:
        slots: parameters whose gradients are not taken yet.

    Returns:
        the hooks that do it.
    """
    handles = []
    for slot in slots:
        hooks = (slot.param._post_accumulate_grad_hooks or {}).values()
        if not all(isinstance(hook, Hook) for hook in hooks):
            handles.append(slot.param.register_hook(_lender(slot)))
    return handles


def _lender(slot: ParamSlot) -> Callable[[torch.Tensor], None]:
    def lend(gradient: torch.Tensor) -> None:
        slot.meet()
        slot.lend()

    return lend


def refuse_hooks_of_others(grad: GradSlot, *, last: bool) -> None:
    """Says that somebody's post-accumulate hook does not see in `p.grad` what it would see in torch.

    Args:
        grad: whose parameter has such hooks.
        last: whether they were all called before the gradient is taken; they see the one that has just arrived.

    Raises:
        UnsupportedError: they were not, or there is a sum that it is still to be added to.
    """
    if last and grad.value is None:
        return
    sees = "only the gradient of this backward and not the sum" if last else "no gradient: it has been put on pages"
    raise UnsupportedError(
        f"a hook of {grad.slot.name} (register_post_accumulate_grad_hook) sees {sees}. Use p.register_hook(...), which "
        "is given each gradient as it arrives; without accumulation, registering the hook before the model comes onto "
        "pages will do."
    )


def refuse_sparse(grad: GradSlot, gradient: torch.Tensor) -> None:
    """Says that a gradient cannot be kept.

    Raises:
        UnsupportedError: it is sparse.
    """
    if gradient.layout is not torch.strided:
        raise UnsupportedError(
            f"the gradient of {grad.slot.name} is {gradient.layout}; only dense gradients can be kept on pages. "
            "Build the module with sparse=False."
        )
