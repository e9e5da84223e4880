"""The fault is the attribute read.

`module.weight` goes through `module._parameters["weight"]`. A dict subclass there brings the values in on access,
whoever reads: the module's own forward, a parent's forward (tied heads, functional use), or the user's code.
`items`, `values` and iteration do not bring anything in, so counting, naming and grouping parameters stays cheap.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, ItemsView
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ptm_accel.errors import PagedModelError
from ptm_accel.model.hooks import COPY_HELP

if TYPE_CHECKING:
    from ptm_accel.model.residency import Residency


def same_place(one: torch.device, other: torch.device) -> bool:
    """Whether both are the same; one without an index is any of its type."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


class FaultDict(dict[str, "nn.Parameter | None"]):
    """A module's `_parameters` that brings a parameter in when it is read by name.

    Args:
        parameters: the module's own dictionary.
        residency: who brings parameters in.
    """

    def __init__(self, parameters: dict[str, nn.Parameter | None], residency: Residency) -> None:
        super().__init__(parameters)
        self._residency = residency

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            # A compiled region reads a parameter from outside itself: Dynamo must not trace the pages coming in.
            if torch.compiler.is_dynamo_compiling():
                self._residency.read_outside_graph(param)
            else:
                self._residency.read(param)
        return param

    def get(self, name: str, default: Any = None) -> Any:
        """As `dict.get`, and brings the parameter in."""
        if name not in self:
            return default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        """As `dict.pop`, and brings the parameter in: it is about to leave the model with its values."""
        if name in self:
            self._residency.read(super().__getitem__(name))
        return super().pop(name, *default)

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        """As `dict.items`. Called from `nn.Module._apply` it leaves out what is on pages, after a check.

        `_apply` (`.to`, `.half`, `.cuda`) would replace each parameter's data by a converted copy of its placeholder.
        Where the conversion changes nothing it is skipped; where it would, it is refused.

        Raises:
            PagedModelError: so it is.
        """
        caller = sys._getframe(1)
        if caller.f_code.co_name == "_apply" and "fn" in caller.f_locals:
            return self._not_on_pages(caller.f_locals["fn"]).items()
        return super().items()

    def plain(self) -> dict[str, nn.Parameter | None]:
        """An ordinary dictionary with the same parameters; brings nothing in."""
        return dict(dict.items(self))

    def _not_on_pages(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, nn.Parameter | None]:
        rest: dict[str, nn.Parameter | None] = {}
        for name, param in dict.items(self):
            if param is None or not self._residency.owns(param):
                rest[name] = param
                continue
            # As many dimensions, and none that is empty or one: `channels_last` shows in nothing less.
            probe = torch.empty((2,) * param.dim(), dtype=param.dtype, device=param.device)
            shared, found = probe.is_shared(), fn(probe)
            if found.dtype != param.dtype or not same_place(found.device, param.device):
                raise PagedModelError(
                    f"cannot convert parameter {name!r} ({param.dtype} on {param.device}) to {found.dtype} on "
                    f"{found.device}: it is on pages. Load or build the model in the wanted dtype, or call "
                    "`ptm_accel.engine_of(model).detach()` first."
                )
            if found.stride() != probe.stride() or found.is_shared() != shared:
                raise PagedModelError(
                    f"cannot change how parameter {name!r} of shape {tuple(param.shape)} lies in memory (another "
                    "memory format, as channels_last, or memory shared between processes): it is on pages. Call "
                    "`ptm_accel.engine_of(model).detach()` first."
                )
        return rest

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        """An ordinary dictionary with copies in ordinary memory, for a deep copy of a part of the model.

        Raises:
            PagedModelError: it is the whole model that is copied, which may not fit.
        """
        if id(self._residency.root) in memo:
            raise PagedModelError(f"this model cannot be copied by copy.deepcopy. {COPY_HELP}")
        return {name: self._residency.copied(param, memo) for name, param in dict.items(self)}

    def __copy__(self) -> dict[str, nn.Parameter | None]:
        return self.plain()

    def copy(self) -> dict[str, nn.Parameter | None]:
        """An ordinary dictionary with the same parameters; brings nothing in."""
        return self.plain()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PagedModelError(f"this model cannot be pickled. {COPY_HELP}")
