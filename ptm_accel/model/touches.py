"""Which groups of parameters a pass uses, in order, and the arithmetic that it does between: seen on fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ptm_accel.model.forecast import CAST, GROUPED_MM, Meter, ShapeSpec, followed, storage_key

_FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_CAUSAL_AT, _CAUSAL_BACKWARD_AT = 4, 7
"""Where these have `is_causal` among their arguments."""


@dataclass(slots=True)
class Touch:
    """One use of a parameter, or of a group of them.

    Attributes:
        number: of the parameter or group; -1 for one that is not followed, or for none.
        backward: whether it is in a backward.
        gradient: whether its gradient has arrived, and not its value been read.
        flops: operations of products from this use to the next.
        made_bytes: what other operations make of memory until then.
        gradient_bytes: of gradients that have arrived.
    """

    number: int
    backward: bool = False
    gradient: bool = False
    flops: float = 0.0
    made_bytes: int = 0
    gradient_bytes: int = 0

    def add(self, other: Touch) -> None:
        """Takes over what another computes."""
        self.flops += other.flops
        self.made_bytes += other.made_bytes
        self.gradient_bytes += other.gradient_bytes


@dataclass(frozen=True, slots=True)
class Touched:
    """A pass as its parameters see it.

    Attributes:
        names: of the parameters, by number.
        touches: the uses, in order; the first is none, with what is computed before all.
        pass_bytes: the most that batch and activations took, as `ptm_accel.model.forecast.forecast` counts it.
    """

    names: tuple[str, ...]
    touches: tuple[Touch, ...]
    pass_bytes: int

    def flops(self, *, backward: bool) -> float:
        """Operations of the backward, or of the forward."""
        return sum(touch.flops for touch in self.touches if touch.backward is backward)

    def by_group(self, groups: Mapping[str, int]) -> list[Touch]:
        """The uses of groups: what follows one another is one use, and gradients have arrived when the last has.

        Args:
            groups: the numbers of groups, by the names of their parameters; others stay where they are.
        """
        numbers = [groups.get(name, -1) for name in self.names]
        missing = Counter(numbers[touch.number] for touch in self.touches if touch.gradient)
        merged = [Touch(-1)]
        for touch in self.touches:
            number = -1 if touch.number < 0 else numbers[touch.number]
            if touch.gradient:
                missing[number] -= 1
            last = merged[-1]
            if number < 0 and touch.backward is not last.backward:
                # A backward begins with the gradients of what was used last.
                number = last.number
            again = (last.number, last.backward, last.gradient) == (number, touch.backward, False)
            if number < 0 or (again and not touch.gradient) or (touch.gradient and missing[number]):
                last.add(touch)
            else:
                merged.append(replace(touch, number=number))
        return merged


def touches_of(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor | ShapeSpec | object],
    *,
    autocast_dtype: torch.dtype | None = None,
) -> Touched:
    """Goes through one pass on fake tensors.

    Args:
        model: as for `forecast`.
        batch: as for `forecast`.
        autocast_dtype: as for `forecast`.

    Raises:
        UnsupportedError: as for `forecast`.
    """
    names = tuple(name for name, _ in model.named_parameters())
    seen = followed(model, batch, _Follower, autocast_dtype=autocast_dtype)
    return Touched(names, tuple(seen.touches), seen.peak_bytes)


class _Follower(Meter):
    """A meter that notes the uses of parameters as well.

    Args:
        model: with fake tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        params = list(model.parameters())
        super().__init__([*params, *model.buffers()])
        self.touches = [Touch(-1)]
        self._numbers = {storage_key(param): number for number, param in enumerate(params)}

    def carried_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        """See `Meter.carried_out`."""
        made_bytes = self.made_bytes
        result = super().carried_out(func, args, kwargs)
        backward = torch._C._current_graph_task_id() != -1
        for value in tree_leaves(args):
            number = self._numbers.get(storage_key(value)) if isinstance(value, torch.Tensor) else None
            if number is not None:
                self._touch(number, backward=backward)
                if func is CAST:
                    # Its copy in lower precision, which is used in its place.
                    self._take_for(result, number)
        if self.touches[-1].backward is not backward:
            self.touches.append(Touch(-1, backward))
        if flops := _flops(func, args, kwargs, result):
            self.touches[-1].flops += flops
        else:
            self.touches[-1].made_bytes += self.made_bytes - made_bytes
        return result

    def arrived(self, param: torch.Tensor) -> None:
        """See `Meter.arrived`."""
        super().arrived(param)
        number = self._numbers[storage_key(param)]
        self.touches.append(Touch(number, backward=True, gradient=True, gradient_bytes=param.nbytes))

    def _take_for(self, copy: torch.Tensor, number: int) -> None:
        """Takes a copy for its parameter, as long as it lives: its address is another tensor's afterwards."""
        key = storage_key(copy)
        self._numbers[key] = number
        weakref.finalize(copy.untyped_storage(), self._numbers.pop, key)

    def _touch(self, number: int, *, backward: bool) -> None:
        last = self.touches[-1]
        if (last.number, last.backward, last.gradient) != (number, backward, False):
            self.touches.append(Touch(number, backward))


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Operations of products; of what attention masks, flash kernels compute nothing."""
    if func is GROUPED_MM:
        return 2.0 * int(args[0].numel()) * int(args[1].shape[-1])
    if func is _FLASH or func is _FLASH_BACKWARD:
        query, key = args[:2] if func is _FLASH else args[1:3]
        at = _CAUSAL_AT if func is _FLASH else _CAUSAL_BACKWARD_AT
        # Two products of queries with keys; in the backward five.
        products = 2 if func is _FLASH else 5
        masked = 0.5 if len(args) > at and args[at] else 1.0
        return masked * products * 2.0 * int(query.numel()) * int(key.shape[-2])
    count = flop_registry.get(getattr(func, "overloadpacket", None))
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))
