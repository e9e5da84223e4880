"""What a model was like before it came onto pages, beyond its parameters: for when something is refused afterwards."""

from __future__ import annotations

from torch import nn

from ptm_accel.pipeline.layer_slices import SlicedForward
from ptm_accel.training import Training


class Before:
    """What is put on a model beside its pages.

    Args:
        model: it is not kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = {name: buffer.device for name, buffer in model.named_buffers()}
        self._sliced = _is_sliced(model)

    def restore(self, model: nn.Module) -> None:
        """Takes off what has come since."""
        for name, buffer in model.named_buffers():
            if buffer.device != self._buffers.get(name, buffer.device):
                buffer.data = buffer.data.to(self._buffers[name])
        for module in model.modules():
            if not self._sliced and isinstance(vars(module).get("forward"), SlicedForward):
                del module.forward
        if getattr(vars(model).get("no_sync"), "__func__", None) is Training.no_sync:
            del vars(model)["no_sync"]


def _is_sliced(model: nn.Module) -> bool:
    return any(isinstance(vars(module).get("forward"), SlicedForward) for module in model.modules())
