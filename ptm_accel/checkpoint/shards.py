"""Writes safetensors files whose CRCs are computed from memory, beside the write: nothing is read again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch

from ptm_accel.checkpoint.crc import PIECE_BYTES, FileSum, crc_of, threads

_LENGTH_BYTES = 8
"""The length of the header stands before it, and is a multiple of the same."""


def save_file(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    metadata: Mapping[str, str],
    sums: MutableMapping[str, FileSum] | None = None,
) -> None:
    """Writes tensors into a file, as `safetensors.torch.save_file`.

    Args:
        tensors: contiguous ones on the CPU, by name.
        path: of the file.
        metadata: texts for its header.
        sums: gets what the file is to be compared by, by its name.

    Raises:
        OSError, SafetensorError: writing failed.
    """
    if sums is None:
        safetensors.torch.save_file(dict(tensors), path, dict(metadata))
        return
    head, places = header({name: Described.of(tensor) for name, tensor in tensors.items()}, metadata)
    parts = [memoryview(head), *(octets(tensors[name]) for name in places)]
    with threads() as pool, path.open("wb") as file:
        crcs = []
        for piece in _pieces(parts):
            crcs.append(pool.submit(crc_of, piece))
            for part in piece:
                file.write(part)
    sums[path.name] = FileSum(sum(part.nbytes for part in parts), tuple(crc.result() for crc in crcs))


class Described(NamedTuple):
    """What the header of a file says of a tensor.

    Attributes:
        shape, dtype: of the tensor.
    """

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Described:
        """Returns what is said of a tensor."""
        return cls(tensor.shape, tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.shape.numel() * self.dtype.itemsize


def header(tensors: Mapping[str, Described], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Returns the header of a file, byte for byte as safetensors writes it, and where each tensor begins behind it.

    Args:
        tensors: of the file, by name.
        metadata: texts.
    """
    # Their order and the names of dtypes are safetensors' own business, and told by a file without values.
    empty = safetensors.torch.save({name: torch.empty(0, dtype=each.dtype) for name, each in tensors.items()})
    length = int.from_bytes(empty[:_LENGTH_BYTES], "little")
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    places: dict[str, int] = {}
    at = 0
    for name, told in json.loads(empty[_LENGTH_BYTES : _LENGTH_BYTES + length]).items():
        places[name], end = at, at + tensors[name].nbytes
        entries[name] = {"dtype": told["dtype"], "shape": list(tensors[name].shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, places


def octets(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _pieces(parts: list[memoryview]) -> Iterator[list[memoryview]]:
    """Yields the same bytes, cut where pieces end."""
    piece: list[memoryview] = []
    room = PIECE_BYTES
    for part in parts:
        at = 0
        while at < part.nbytes:
            cut = part[at : at + room]
            piece.append(cut)
            at += cut.nbytes
            room -= cut.nbytes
            if not room:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece
