"""Refuses the step of an optimizer that knows nothing of pages over parameters whose gradients are on pages.

It would find no gradients, change nothing, and say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from ptm_accel.errors import UnsupportedError
from ptm_accel.model.grad_slot import GradSlot

Waiting = Callable[[Iterable[torch.Tensor]], list[GradSlot]]
"""Gives those gradients of parameters that are on pages."""


class StepGuard:
    """A hook before every `torch.optim.Optimizer.step` of the process; it changes nothing.

    Args:
        waiting: finds what the step would have had to use.
        paged: optimizers that know.
    """

    def __init__(self, waiting: Waiting, paged: type[torch.optim.Optimizer]) -> None:
        self._waiting = waiting
        self._paged = paged

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called by torch.

        Raises:
            UnsupportedError: gradients of the optimizer's parameters are on pages, where it would not find them.
        """
        if isinstance(optimizer, self._paged):
            return
        left = self._waiting(param for group in optimizer.param_groups for param in group["params"])
        if left:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() was called, and {len(left)} gradients of its parameters are on "
                f"pages, where it cannot see them (such as that of {left[0].slot.name}): it would change nothing. "
                "Step the optimizer that accelerator.prepare() or engine.bind_optimizer() returned."
            )

    @staticmethod
    def installed() -> bool:
        """Whether there is one."""
        return any(isinstance(hook, StepGuard) for hook in _global_optimizer_pre_hooks.values())

    def install(self) -> None:
        """Begins to look."""
        register_optimizer_step_pre_hook(self)


def hooks_of_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody is to be called before `optimizer` steps, who may change what it finds."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *_global_optimizer_pre_hooks.values()]
    return any(not isinstance(hook, StepGuard) for hook in hooks)
