"""Writes safetensors files whose CRCs are computed from memory, beside the write: nothing is read again."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

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
    # Aligned, as long as the widest come first.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    head = _header({name: tensors[name] for name in order}, metadata)
    parts = [memoryview(head), *(_octets(tensors[name]) for name in order)]
    with threads() as pool, path.open("wb") as file:
        crcs = []
        for piece in _pieces(parts):
            crcs.append(pool.submit(crc_of, piece))
            for part in piece:
                file.write(part)
    sums[path.name] = FileSum(sum(part.nbytes for part in parts), tuple(crc.result() for crc in crcs))


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        place = [at, at + tensor.nbytes]
        entries[name] = {"dtype": _dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": place}
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in safetensors, by asking it: its own table is not public."""
    file = safetensors.torch.save({"": torch.empty(0, dtype=dtype)})
    length = int.from_bytes(file[:_LENGTH_BYTES], "little")
    name: str = json.loads(file[_LENGTH_BYTES : _LENGTH_BYTES + length])[""]["dtype"]
    return name


def _octets(tensor: torch.Tensor) -> memoryview:
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
