"""Parameters of an optimizer that are not the model's, such as those of a loss: ordinary tensors, beside the pages.

The user's own optimizer updates them as without pages, in the same step. It is called with those alone, and its own
`state` holds what it keeps for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ptm_accel.model.slot_table import SlotTable
from ptm_accel.optim.arithmetic import step_over
from ptm_accel.optim.hyperparameters import NAMES


@dataclass(frozen=True, slots=True)
class Other:
    """A parameter of an optimizer that is not the model's.

    Attributes:
        name: by its place among the optimizer's groups, since it has no name in the model.
        param: the parameter.
    """

    name: str
    param: nn.Parameter

    @property
    def value(self) -> nn.Parameter:
        """The parameter, which is no more than its values."""
        return self.param

    @property
    def own(self) -> nn.Parameter:
        """The same: no part of it is another rank's."""
        return self.param


class Others:
    """The parameters of an optimizer that are not the model's.

    Args:
        inner: the user's optimizer.
        slots: the model's parameters.
    """

    def __init__(self, inner: torch.optim.Optimizer, slots: SlotTable) -> None:
        self._inner = inner
        self._slots = slots

    def __iter__(self) -> Iterator[Other]:
        """Iterates over those of all groups, in order."""
        for number, group in enumerate(self._inner.param_groups):
            for at, param in enumerate(group["params"]):
                if self._slots.of(param) is None:
                    yield Other(f"other/{number}.{at}", param)

    def entries(self, other: Other) -> dict[str, Any]:
        """Returns the optimizer's state of one."""
        state: dict[str, Any] = self._inner.state.get(other.param, {})
        return state

    def replace(self, other: Other, entries: Mapping[str, Any]) -> None:
        """Sets what the optimizer keeps for one."""
        self._inner.state.pop(other.param, None)
        if entries:
            self._inner.state[other.param] = dict(entries)

    def gradients(self) -> list[torch.Tensor]:
        """Their gradients."""
        return [other.param.grad for other in self if other.param.grad is not None]

    def step(self, hyper: Sequence[Mapping[str, Any]]) -> None:
        """Updates those that have gradients.

        Args:
            hyper: the hyperparameters of each group, as they were at the beginning of the step (`hyperparameters`).
        """
        groups: list[dict[str, Any]] = []
        for values, group in zip(hyper, self._inner.param_groups, strict=True):
            params = [param for param in group["params"] if self._slots.of(param) is None and param.grad is not None]
            names = {NAMES: [values[NAMES][id(param)] for param in params]} if NAMES in values else {}
            groups.append({**values, **names, "params": params})
        if any(group["params"] for group in groups):
            step_over(self._inner, groups, hyper)

    def zero_grad(self, set_to_none: bool) -> None:
        """Does what `torch.optim.Optimizer.zero_grad` does."""
        for other in self:
            if set_to_none:
                other.param.grad = None
            elif other.param.grad is not None:
                other.param.grad.detach_().zero_()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Takes their gradients away while it lasts: a step leaves them as they are."""
        kept = [(other.param, other.param.grad) for other in self]
        self.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            for param, grad in kept:
                param.grad = grad
