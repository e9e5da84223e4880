"""A plain loop over a checkpoint: each tensor is read, cast or joined as the model will have it, and written to a file.

Started by hub.py: `hub_loop.py CHECKPOINT DIRECTORY DTYPE`; prints one line of JSON. What is not in a checkpoint as the
model has it cannot be left where it lies, so this is what reading it takes, without any model.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.core_model_loading import dot_natural_key

_EXPERT = re.compile(r"(?P<layer>.*)\.experts\.(?P<number>\d+)\.(?P<which>w[123])\.weight")


def joined(names: list[str]) -> list[list[str]]:
    """The names, those together that become one tensor: of a layer's experts `w1` and `w3`, and `w2`."""
    found: dict[str, list[str]] = {}
    # As the loader does: layer 10 after layer 9, and so the files from their beginnings to their ends.
    for name in sorted(names, key=dot_natural_key):
        match = _EXPERT.fullmatch(name)
        found.setdefault(f"{match['layer']} {match['which'] == 'w2'}" if match else name, []).append(name)
    return list(found.values())


def write(values: torch.Tensor, directory: Path) -> int:
    """Writes a tensor to a file without a name; returns its descriptor."""
    descriptor, name = tempfile.mkstemp(dir=directory)
    os.unlink(name)
    os.posix_fallocate(descriptor, 0, values.nbytes)
    rest = memoryview(values.contiguous().view(-1).view(torch.uint8).numpy())
    while rest.nbytes:
        rest = rest[os.pwrite(descriptor, rest, values.nbytes - rest.nbytes) :]
    return descriptor


def main(checkpoint: str, directory: str, dtype: str) -> None:
    begin = time.perf_counter()
    where = {}
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        shard = safe_open(path, framework="pt")
        where.update((name, shard) for name in shard.keys())  # noqa: SIM118
    written = []
    for names in joined(list(where)):
        tensors = [where[name].get_tensor(name).to(getattr(torch, dtype)) for name in names]
        values = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        del tensors
        written.append(write(values, Path(directory)))
        del values
    seconds = time.perf_counter() - begin
    nbytes = sum(os.fstat(descriptor).st_size for descriptor in written)
    sys.stdout.write(f"HUB {json.dumps({'loop_s': seconds, 'written_bytes': nbytes})}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
