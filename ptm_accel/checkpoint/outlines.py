"""Tensors without values, which stand for sharded ones while ordinary code decides what is saved where.

`save_pretrained` and its like rename, split and join the tensors of a state dictionary before they write them. None of
that needs values: a view is where it is, and a copy of a view is noted as one. So for each tensor that is to be saved
it is known which elements of which parameters it is made of, and every rank can write those that it owns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptm_accel.checkpoint.shards import Described
from ptm_accel.checkpoint.shared_files import Pieces
from ptm_accel.memory.mapping import MappedRun, reserved_run

_SMALLEST_ROW_BYTES = 256
"""Views whose elements lie in shorter rows are not written row by row."""

_ATEN = torch.ops.aten


class NeedsValuesError(Exception):
    """An operation has asked for the values of an outline."""


@dataclass(frozen=True)
class _Outline:
    """What the addresses of one outline stand for.

    Attributes:
        run: the addresses.
        source: the name of a sharded tensor; None for a copy.
        copied: what this is a contiguous copy of.
    """

    run: MappedRun
    source: str | None = None
    copied: _View | None = None


@dataclass(frozen=True)
class _View:
    """A view of an outline, in elements."""

    of: _Outline
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def parts(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yields what a range of the elements is made of, in the order of the view's rows."""
        row, outer = self.rows()
        for number in range(start // row, -(-stop // row)):
            begin, rest = self.offset, number
            for size, stride in reversed(outer):
                rest, place = divmod(rest, size)
                begin += place * stride
            first, last = max(start - number * row, 0), min(stop - number * row, row)
            yield from _parts(self.of, begin + first, begin + last)

    def rows(self) -> tuple[int, list[tuple[int, int]]]:
        """Returns how many elements lie one behind another, and sizes and strides of the dimensions around them."""
        row, dims = 1, list(zip(self.shape, self.strides, strict=True))
        while dims and (dims[-1][0] == 1 or dims[-1][1] == row):
            row *= dims.pop()[0]
        return row, dims


def _parts(outline: _Outline, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
    """Yields source, first element and number of elements of what a range of an outline stands for."""
    if outline.source is not None:
        yield outline.source, start, stop - start
    else:
        assert outline.copied is not None
        yield from outline.copied.parts(start, stop)


class Outlines(TorchDispatchMode):
    """Makes outlines, and follows them through operations while it is entered.

    Attributes:
        asked: the first operation that has asked for values, whatever has become of its error; None if none has.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: str | None = None
        self._known: dict[int, _Outline] = {}

    def of(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Returns an outline of a sharded tensor.

        Args:
            name: of the tensor.
            shape: of the whole.
            dtype: of its elements.
        """
        return self._made(shape, dtype, lambda run: _Outline(run, source=name))

    def _made(self, shape: Sequence[int], dtype: torch.dtype, outline: Any) -> torch.Tensor:
        run = reserved_run(max(math.prod(shape) * dtype.itemsize, 1))
        self._known[run.address] = outline(run)
        # The mode would look for what it is made of.
        with torch.utils._python_dispatch._disable_current_modes():
            made: torch.Tensor = run.tensor()[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        return made

    def described(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | Pieces]:
        """Returns tensors that are to be saved, with outlines as what they are made of.

        Args:
            tensors: contiguous, by name.
        """
        found: dict[str, torch.Tensor | Pieces] = {}
        for name, tensor in tensors.items():
            outline = self._outline_of(tensor)
            if outline is None:
                found[name] = tensor.detach().cpu()
                continue
            assert tensor.is_contiguous(), name
            start = int(tensor.storage_offset())
            found[name] = Pieces(Described.of(tensor), _joined(_parts(outline, start, start + tensor.numel())))
        return found

    def _outline_of(self, tensor: torch.Tensor) -> _Outline | None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        return self._known.get(tensor.untyped_storage().data_ptr())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        outlines = [outline for leaf in leaves if (outline := self._outline_of(leaf)) is not None]
        if not outlines or _is_view(func):
            return func(*args, **given)
        if func is not _ATEN.clone.default:
            self._refuse(func)
        return self._copy(args[0], outlines[0])

    def _copy(self, tensor: torch.Tensor, outline: _Outline) -> torch.Tensor:
        view = _View(outline, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        if view.rows()[0] * tensor.itemsize < _SMALLEST_ROW_BYTES and tensor.numel():
            self._refuse("a copy of short rows")
        return self._made(tensor.shape, tensor.dtype, lambda run: _Outline(run, copied=view))

    def _refuse(self, what: object) -> NoReturn:
        self.asked = self.asked or str(what)
        raise NeedsValuesError(self.asked)


def _is_view(func: Any) -> bool:
    """Whether an operation returns views of what it is given, and reads nothing."""
    if func is _ATEN._unsafe_view.default:
        return True
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _joined(parts: Iterator[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Returns parts with those put together that follow one another."""
    found: list[tuple[str, int, int]] = []
    for source, start, count in parts:
        if found and found[-1][0] == source and found[-1][1] + found[-1][2] == start:
            found[-1] = source, found[-1][1], found[-1][2] + count
        else:
            found.append((source, start, count))
    return found
