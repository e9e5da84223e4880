"""Parameters that are on pages already, and come to be another module's too.

Weights are tied after a model has been put on pages (`model.head.weight = model.embedding.weight`), and
`torch.nn.utils.parametrize` moves a parameter into a module of its own. Torch tells of every parameter that is given to
a module; one that is on pages is brought in where that module reads it, from then on.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from ptm_accel.model.faults import FaultDict

if TYPE_CHECKING:
    from ptm_accel.model.residency import Residency


class _Watch:
    """The one hook of torch's through which every paged model hears of parameters that modules are given."""

    def __init__(self) -> None:
        self._listeners: weakref.WeakSet[Residency] = weakref.WeakSet()
        self._handle: RemovableHandle | None = None

    def add(self, residency: Residency) -> None:
        """Begins to tell `residency`."""
        self._listeners.add(residency)
        if self._handle is None:
            self._handle = register_module_parameter_registration_hook(self._registered)

    def discard(self, residency: Residency) -> None:
        """Ends telling `residency`."""
        self._listeners.discard(residency)
        if self._handle is not None and not len(self._listeners):
            self._handle.remove()
            self._handle = None

    def _registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # It is put into the module's dictionary after this, whichever that is then.
        if param is None or isinstance(module._parameters, FaultDict):
            return
        for residency in list(self._listeners):
            if residency.owns(param):
                residency.cover(module)


watch = _Watch()
