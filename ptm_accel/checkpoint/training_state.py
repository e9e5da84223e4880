"""Resumable optimizer state in safetensors, keyed by parameter name.

A directory holds `optimizer.json` and shards `optimizer-00001-of-0000N.safetensors`. The shards hold tensors, named
`<parameter>/<key>` after the optimizer's own keys; the JSON file holds all the rest: the optimizer's class, its groups
with their hyperparameters and parameter names, state that is not a tensor, and which tensor is in which shard. Nothing
in it depends on budgets, tiers or devices, and nothing is pickled.

Saving maps what is away from where it lies and writes one shard at a time. Loading reads one tensor at a time straight
onto pages, after everything has been checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ptm_accel.checkpoint.crc import regular_file
from ptm_accel.checkpoint.index import FORMAT, FULL_SIZE, GROUPS, VERSION, damaged, read_index, reason_of
from ptm_accel.checkpoint.index import INDEX_NAME as INDEX_NAME
from ptm_accel.checkpoint.manifest import MANIFEST_NAME, Sums
from ptm_accel.checkpoint.shards import Described, save_file
from ptm_accel.checkpoint.shared_files import Owned, Pieces, SharedFile, make_file, write_together
from ptm_accel.distributed.ranks import Ranks
from ptm_accel.distributed.together import on_first
from ptm_accel.errors import CheckpointError
from ptm_accel.memory.block import Part
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.optim.others import Other, Others
from ptm_accel.progress import progress

OUTDATED = re.compile(
    r"optimizer(_\d+)?\.bin|optimizer\.pt|optimizer-\d{5}-of-\d{5}\.safetensors|" + re.escape(MANIFEST_NAME)
)
"""Names of files that a state which is saved beside them puts out of date: plain states, and those of an older one."""

SHARD_BYTES = 1 << 30
"""The largest shard, unless one tensor alone is larger."""

_SHARD = "optimizer-{number:05d}-of-{count:05d}.safetensors"

Entry = Part | torch.Tensor


def saved_last(directory: Path, plain: Iterable[Path]) -> Path | None:
    """The optimizer state in a directory that was saved last, by runs with pages or without; its time of change tells.

    Args:
        directory: a checkpoint; it may be missing.
        plain: the files that plain runs may have written.

    Returns:
        the index of a state that `save_optimizer_state` has written, or a plain file; None if there is neither.
    """
    found = [path for path in (Path(directory) / INDEX_NAME, *plain) if path.is_file()]
    # An exported state has the time of what it was made from.
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


# ---- saving ----------------------------------------------------------------------------------------------------------


def save_optimizer_state(
    optimizer: PagedOptimizer, directory: Path, sums: Sums | None = None, ranks: Ranks | None = None
) -> None:
    """Writes an optimizer's state; needs no memory beyond the budgets but for the part of a shard without values yet.

    There is no state dictionary here, so hooks on one (`register_state_dict_post_hook` and its like) are not run.

    Args:
        optimizer: the optimizer.
        directory: an existing directory; optimizer state that it holds is replaced, plain one too. Write into one from
            `ptm_accel.checkpoint.directory.staged`, so that a save that fails loses nothing.
        sums: gets what the shards are to be compared by, by their names.
        ranks: those that the model is sharded over, which come here together; the directory is the same for all.

    Raises:
        CheckpointError: the state holds something that JSON and safetensors cannot.
        OSError, SafetensorError: writing failed; `staged` says why.
        LostStepError: an update has failed since the state was loaded last.
    """
    directory = Path(directory)
    optimizer.updates.refuse_lost()
    tensors: dict[str, Entry] = {}
    index = _index(optimizer, tensors)
    # Of those, ranks have ranges.
    sharded = {slot.name: slot for slot in optimizer.states.held() if slot.sharded}
    described = {name: _described(tensor, sharded.get(_owner(name))) for name, tensor in tensors.items()}
    shards = _split(described)
    index["weight_map"] = {name: file for file, names in shards.items() for name in names}

    def clear() -> None:
        for stale in [directory / INDEX_NAME, *(p for p in directory.iterdir() if OUTDATED.fullmatch(p.name))]:
            stale.unlink(missing_ok=True)

    def write_index() -> None:
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")

    if ranks is None:
        clear()
        with progress("saving optimizer state", sum(each.nbytes for each in described.values())) as moved:
            for file, names in shards.items():
                save_file({n: _ready(optimizer, tensors[n]) for n in names}, directory / file, {"format": "pt"}, sums)
                moved(sum(described[name].nbytes for name in names))
        write_index()
        return

    def content(name: str) -> torch.Tensor | Pieces:
        if isinstance(tensors[name], Part) and _owner(name) in sharded:
            return Pieces(described[name], [(name, 0, described[name].shape.numel())])
        return _ready(optimizer, tensors[name])

    def make() -> list[SharedFile]:
        clear()
        return [
            make_file(directory / file, {name: content(name) for name in names}, {"format": "pt"})
            for file, names in shards.items()
        ]

    def owned(name: str) -> Owned:
        slot = sharded[_owner(name)]
        return Owned(slot.group.pieces[slot.member].cut.start, _ready(optimizer, tensors[name]))

    found = write_together(ranks, make, owned)
    if sums is not None:
        sums.update((path.name, each) for path, each in found.items())
    on_first(ranks, write_index)


def _owner(name: str) -> str:
    """Returns the parameter whose state a tensor of a shard is."""
    return name.rpartition("/")[0]


def _described(tensor: Entry, sharded: ParamSlot | None) -> Described:
    """Returns shape and dtype of a tensor as it is saved: a whole one, also where ranks have ranges of it."""
    whole = sharded is not None and isinstance(tensor, Part)
    return Described(sharded.value.shape if sharded is not None and whole else tensor.shape, tensor.dtype)


def _index(optimizer: PagedOptimizer, tensors: dict[str, Entry]) -> dict[str, Any]:
    """Returns what the JSON file says but for where tensors are; those are put aside into `tensors`."""
    index: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "optimizer": _class_name(optimizer.inner),
        "master_weights": optimizer.states.masters,
        GROUPS: [],
        "parameters": {},
        "others": {},
        "state": {},
    }
    for number, (group, slots) in enumerate(zip(optimizer.param_groups, optimizer.states.groups(), strict=True)):
        values = {k: _encoded(v, f"{GROUPS}/{number}/{k}", tensors) for k, v in group.items() if k != "params"}
        index[GROUPS].append({"params": [slot.name for slot in slots], "values": values})
        for slot in slots:
            index["others" if isinstance(slot, Other) else "parameters"][slot.name] = _description(slot)
    for name, key, value in optimizer.states.named_entries():
        if not isinstance(key, str):
            raise CheckpointError(
                f"the optimizer's state of {name} has the key {key!r}, a {type(key).__name__}, which cannot be saved: "
                "it would come back as text. Use an optimizer whose state has names for keys."
            )
        index["state"].setdefault(name, {})[key] = _encoded(value, f"{name}/{key}", tensors)
    return index


def _encoded(value: Any, path: str, tensors: dict[str, Entry]) -> Any:
    """`value` as JSON, with its tensors put aside into `tensors`; `path` names it, in shards and in errors."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.Tensor, Part)):
        tensors[path] = value
        return {"paged" if isinstance(value, Part) else "tensor": path}
    if isinstance(value, (list, tuple)):
        items = [_encoded(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encoded(item, f"{path}/{key}", tensors) for key, item in value.items()}}
    raise CheckpointError(
        f"the optimizer's {path} is a {type(value).__name__}, which cannot be saved: only numbers, text, tensors "
        "and lists, tuples and dictionaries of them can. Use an optimizer whose state is made of these."
    )


def _split(tensors: Mapping[str, Described]) -> dict[str, list[str]]:
    """Returns the shards by file, as the names of their tensors."""
    shards: list[list[str]] = []
    filled = 0
    for name, tensor in tensors.items():
        if not shards or filled + tensor.nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    return {_SHARD.format(number=number, count=len(shards)): names for number, names in enumerate(shards, start=1)}


def _ready(optimizer: PagedOptimizer, tensor: Entry) -> torch.Tensor:
    if isinstance(tensor, Part):
        # A live alias or a mapping; only pages that were never written are made up here.
        return optimizer.states.executor.snapshot(tensor).contiguous()
    return tensor.detach().cpu().contiguous().clone()


def _class_name(inner: torch.optim.Optimizer) -> str:
    """Returns an optimizer's class by package and name; modules in between move from version to version."""
    kind = type(inner)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def _description(slot: ParamSlot | Other) -> dict[str, Any]:
    return {"shape": list(slot.value.shape), "dtype": str(slot.value.dtype).removeprefix("torch.")}


# ---- loading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The optimizer that a saved state is to be of; it may be on pages already, or about to be.

    Attributes:
        inner: the user's optimizer.
        masters: whether there are fp32 masters.
        groups: its parameters, by group.
    """

    inner: torch.optim.Optimizer
    masters: bool
    groups: list[list[ParamSlot | Other]]

    @classmethod
    def of(cls, optimizer: PagedOptimizer) -> Expected:
        """An optimizer that is on pages."""
        return cls(optimizer.inner, optimizer.states.masters, optimizer.states.groups())

    @classmethod
    def before(cls, inner: torch.optim.Optimizer, slots: SlotTable, *, masters: bool) -> Expected:
        """One that comes onto pages later.

        Args:
            inner: the user's optimizer.
            slots: the model's parameters.
            masters: whether there will be fp32 masters.
        """
        others = {id(other.param): other for other in Others(inner, slots)}
        groups = [[slots.of(p) or others[id(p)] for p in group["params"]] for group in inner.param_groups]
        return cls(inner, masters, groups)


def load_optimizer_state(optimizer: PagedOptimizer, directory: Path) -> None:
    """Reads an optimizer's state onto pages, replacing all that the optimizer has.

    The optimizer may have other budgets, another device and another order of work than the one that was saved; its
    class, parameters and groups must be the same.

    Args:
        optimizer: the optimizer.
        directory: what `save_optimizer_state` has written into.

    Raises:
        CheckpointError: the directory is incomplete or damaged, or is of another model or optimizer; the first
            difference is named, and nothing has been changed.
        BudgetError: with the hyperparameters in it updates need more than there is, and nothing has been changed; or
            no room for the state, which is then incomplete.
    """
    with ExitStack() as files:
        saved = SavedState(directory, files)
        saved.check(Expected.of(optimizer))
        slots = chain.from_iterable(optimizer.states.groups())
        same = {slot.name for slot in slots if saved.described(slot) == _description(slot)}
        optimizer.restore(saved.state_dict(), same)


def check_optimizer_state(directory: Path, expected: Expected | None = None) -> None:
    """Looks whether a saved state is whole, and of an optimizer; nothing is changed.

    Args:
        directory: what `save_optimizer_state` has written into.
        expected: the optimizer; None where it is not known.

    Raises:
        CheckpointError: as by `load_optimizer_state`.
    """
    with ExitStack() as files:
        saved = SavedState(directory, files)
        saved.state_dict()
        if expected is not None:
            saved.check(expected)


class SavedState:
    """A saved state: its index, and its shards opened as they are needed.

    Args:
        directory: where it is.
        files: closes the shards.

    Attributes:
        index: the contents of its JSON file.

    Raises:
        CheckpointError: as `read_index`.
    """

    def __init__(self, directory: Path, files: ExitStack) -> None:
        self.index = read_index(directory)
        self._directory = directory
        self._files = files
        self._shards: dict[str, tuple[Any, set[str]]] = {}

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict` has it; tensors of the size of their parameter are mapped.

        Raises:
            CheckpointError: a shard is missing or damaged, or tensors are not of their parameter's shape.
        """
        groups: list[dict[str, Any]] = self.index[GROUPS]
        names = chain.from_iterable(group["params"] for group in groups)
        numbers = {name: number for number, name in enumerate(names)}
        return {
            "state": {
                numbers[name]: {key: self._entry(name, key, value) for key, value in entries.items()}
                for name, entries in self.index["state"].items()
            },
            "param_groups": [
                {
                    **{key: self.decode(value) for key, value in group["values"].items()},
                    "params": [numbers[name] for name in group["params"]],
                }
                for group in groups
            ],
        }

    def described(self, slot: ParamSlot | Other) -> dict[str, Any] | None:
        """Shape and dtype of a parameter as it was saved; None if it was not."""
        return self._described(slot.name)

    def _described(self, name: str) -> dict[str, Any] | None:
        description: dict[str, Any] | None = self.index["parameters"].get(name, self.index["others"].get(name))
        return description

    def _entry(self, name: str, key: str, value: Any) -> Any:
        found = self.decode(value)
        described = self._described(name)
        full = key in FULL_SIZE or (isinstance(value, dict) and "paged" in value)
        if full and found is not None and described is not None and list(found.shape) != described["shape"]:
            raise self._differs(f"the state {key} of {name}", tuple(found.shape), f"shape {tuple(described['shape'])}")
        return found

    def decode(self, value: Any) -> Any:
        """What `_encoded` was given; what was on pages is mapped from the file, other tensors are copies."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "paged" in value:
            return self._tensor(value["paged"])
        if "tensor" in value:
            return self._tensor(value["tensor"]).clone()
        if "tuple" in value:
            return tuple(self.decode(item) for item in value["tuple"])
        return {key: self.decode(item) for key, item in value["dict"].items()}

    def _tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor by its name in the shards, mapped from the file.

        Raises:
            CheckpointError: its shard is missing, damaged, or does not hold it.
        """
        file = self.index["weight_map"].get(name)
        if file is None:
            raise damaged(self._directory / INDEX_NAME, f"it does not say where {name} is")
        if file not in self._shards:
            path = self._directory / file
            try:
                # To open a pipe would not end.
                with regular_file(path):
                    shard = self._files.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                raise damaged(self._directory, f"{file}, which holds {name}, is missing") from None
            except (OSError, SafetensorError) as error:
                raise damaged(path, reason_of(error)) from error
            self._shards[file] = (shard, set(shard.keys()))
        shard, names = self._shards[file]
        if name not in names:
            raise damaged(self._directory / file, f"it does not hold {name}")
        tensor: torch.Tensor = shard.get_tensor(name)
        return tensor

    def check(self, expected: Expected) -> None:
        """Compares all of it with an optimizer.

        Raises:
            CheckpointError: names the first difference.
        """
        self._check_kind(expected)
        self._check_groups(expected)
        for slot in chain.from_iterable(expected.groups):
            there, here = self.described(slot), _description(slot)
            if there is None:
                raise damaged(self._directory / INDEX_NAME, f"it lacks shape and dtype of {slot.name}")
            if there["shape"] != here["shape"]:
                words = (f"{tuple(each['shape'])} of {each['dtype']}" for each in (there, here))
                raise self._differs(f"parameter {slot.name}", *words)

    def _check_kind(self, expected: Expected) -> None:
        there, here = self.index["optimizer"], _class_name(expected.inner)
        if there != here:
            raise self._differs("the optimizer", there, here, f"Train with {there}, or start a new run.")
        masters = self.index["master_weights"]
        if masters != expected.masters:
            words = {True: "fp32 masters", False: "no masters"}
            remedy = f"Set master_weights to {'fp32' if masters else 'none'}."
            raise self._differs("the state", words[masters], words[expected.masters], remedy)

    def _check_groups(self, expected: Expected) -> None:
        saved = [group["params"] for group in self.index[GROUPS]]
        groups = ([slot.name for slot in slots] for slots in expected.groups)
        for number, names in enumerate(zip_longest(saved, groups, fillvalue=())):
            for place, (there, here) in enumerate(zip_longest(*names, fillvalue="no more")):
                if there != here:
                    raise self._differs(f"parameter {place} of group {number}", there, here)
        if len(saved) != len(expected.groups):
            raise self._differs("the number of groups", len(saved), len(expected.groups))
        for number, (group, now) in enumerate(zip(self.index[GROUPS], expected.inner.param_groups, strict=True)):
            for key, value in group["values"].items():
                if not _alike(self.decode(value), now.get(key)):
                    reason = f"{GROUPS}/{number}/{key} is {value!r}, and {now[key]!r} in this run"
                    raise damaged(self._directory / INDEX_NAME, reason)

    def _differs(self, what: str, there: object, here: object, remedy: str = "") -> CheckpointError:
        remedy = remedy or "It is of another model, or its parameters were grouped in another way."
        return CheckpointError(
            f"cannot load the optimizer state in {self._directory}: {what} differs: the checkpoint has {there}, this "
            f"run has {here}. The optimizer is as it was. {remedy}"
        )


def _alike(saved: Any, now: Any) -> bool:
    """Whether a hyperparameter can have the one value where it has the other: numbers, texts, or as many of such."""
    if saved is None or now is None:
        return True
    if isinstance(saved, (list, tuple)) and isinstance(now, (list, tuple)):
        return all(map(_alike, saved, now))
    kinds: tuple[Any, ...] = ((int, float, torch.Tensor), str, (list, tuple), dict)
    return all(isinstance(saved, kind) == isinstance(now, kind) for kind in kinds)
