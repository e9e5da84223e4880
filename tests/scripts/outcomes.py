"""What a run came to, and what differs between two runs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_TIMES = ("_runtime", "_per_second")
_OURS = ".ptm_"
"""What a run on pages logs of them."""
_PRINTED = re.compile(r"epoch \d+(?: - update step \d+)?:.*")


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        numbers: losses, metrics and other output, by where they were found.
        weights: each tensor of each file of weights below the output folder, by file and name.
    """

    numbers: dict[str, Any]
    weights: dict[str, torch.Tensor]


def collect(output: Path, log: str) -> Outcome:
    """Reads an output folder and what was printed."""
    found: dict[str, Any] = {f"printed line {at}": line for at, line in enumerate(_PRINTED.findall(log))}
    for path in sorted(output.glob("*.json")):
        if path.name in {"all_results.json", "trainer_state.json"}:
            content = json.loads(path.read_text())
            found.update(_flat(path.name, content.get("log_history", content)))
    for path in sorted(output.glob("*.txt")):
        found[path.name] = path.read_text()
    weights = {
        f"{path.relative_to(output)}: {name}": tensor
        for path in sorted(output.rglob("model*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    numbers = {name: value for name, value in found.items() if not name.endswith(_TIMES) and _OURS not in name}
    return Outcome(numbers, weights)


def differences(reference: Outcome, other: Outcome) -> list[str]:
    """One line for each number that is not equal and each tensor that is not equal bit by bit."""
    lines = [
        f"{name}: {reference.numbers.get(name, 'absent')!r} became {other.numbers.get(name, 'absent')!r}"
        for name in sorted(reference.numbers.keys() | other.numbers.keys())
        if repr(reference.numbers.get(name)) != repr(other.numbers.get(name))
    ]
    for name in sorted(reference.weights.keys() | other.weights.keys()):
        ours, theirs = reference.weights.get(name), other.weights.get(name)
        if ours is None or theirs is None:
            lines.append(f"{name}: only in {'the other run' if ours is None else 'the plain run'}")
        elif ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            lines.append(f"{name}: {ours.dtype} {list(ours.shape)} became {theirs.dtype} {list(theirs.shape)}")
        elif not torch.equal(_bits(ours), _bits(theirs)):
            lines.append(f"{name}: differs by up to {(ours.double() - theirs.double()).abs().max().item():.3g}")
    return lines


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Nested lists and objects as one level."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {name: value}
    return {key: leaf for part, inner in value.items() for key, leaf in _flat(f"{name}.{part}", inner).items()}
