"""Weights of a model whose layers are cut over processes, in the files that ordinary saving code makes of them.

That code runs on the first process, on a state dictionary without values (`ptm_accel.checkpoint.outlines`). Where it
would write a file of safetensors, it is noted what is in it; all processes then write what they own to its place.
Code that asks for values is run again, on values that are gathered into files without a name.
"""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ptm_accel.checkpoint.crc import FileSum
from ptm_accel.checkpoint.outlines import Outlines
from ptm_accel.checkpoint.shared_files import Owned, SharedFile, make_file, write_together
from ptm_accel.distributed.ranks import Ranks
from ptm_accel.distributed.together import on_first
from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import DiskError
from ptm_accel.memory.mapping import copy_in_file
from ptm_accel.model.slots import ParamSlot
from ptm_accel.units import format_bytes

from ..exchanging import exchanged, one_at_a_time

_SAVE_FILE = (
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
    ("accelerate.utils.other", "safe_save_file"),
)
"""Where saving code has `safetensors.torch.save_file` from."""

_PROMPT = "get_prompt_embedding_to_save"

State = dict[str, Any]


class NotedFiles:
    """Files of safetensors that saving code would write on the first process.

    Args:
        engines: of models whose layers are cut.

    Attributes:
        ranks: the processes.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        assert engines[0].training.shards is not None
        self.ranks: Ranks = engines[0].training.shards.ranks
        self._engines = engines
        self._slots = {
            f"{number}:{slot.name}": (engine, slot)
            for number, engine in enumerate(engines)
            for slot in engine.slots
            if slot.sharded
        }
        self._names = {slot: name for name, (_, slot) in self._slots.items()}
        self._outlines = Outlines()
        self._found: list[tuple[Path, Mapping[str, torch.Tensor], Mapping[str, str]]] = []

    @property
    def asked(self) -> str | None:
        """What has asked for values; None if nothing has."""
        return self._outlines.asked

    def state_dict(self, engine: Engine) -> State:
        """Returns the state dictionary of a model, with outlines of what is cut."""
        with self.outlined(engine):
            return engine.model.state_dict()

    @contextmanager
    def outlined(self, engine: Engine) -> Iterator[None]:
        """A context in which state dictionaries of a model, and of its parts, have outlines of what is cut."""

        def outline(slot: ParamSlot) -> torch.Tensor:
            return self._outlines.of(self._names[slot], slot.value.shape, slot.value.dtype)

        with self._outlines, engine.state_dicts.sharded_as(outline):
            yield

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A context in which files are noted, and not written."""

        def make(original: Callable[..., None]) -> Callable[..., None]:
            def note(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Any = None, **rest: Any) -> None:
                self._found.append((Path(filename), dict(tensors), dict(metadata or {})))

            return note

        with ExitStack() as stack:
            stack.enter_context(one_at_a_time)
            for module, name in _SAVE_FILE:
                if module in sys.modules:
                    stack.enter_context(exchanged(sys.modules[module], name, make))
            stack.enter_context(self._outlines)
            yield

    def write(self) -> dict[Path, FileSum]:
        """Writes the files that were noted; all processes come here.

        Returns:
            what each file is to be compared by; on the first process.

        Raises:
            DiskError: a disk is full or failed.
        """
        for engine in self._engines:
            assert engine.training.shards is not None
            engine.training.shards.wholes.keep_changes()

        def make() -> list[SharedFile]:
            return [make_file(path, self._outlines.described(tensors), texts) for path, tensors, texts in self._found]

        def owned(name: str) -> Owned:
            engine, slot = self._slots[name]
            return Owned(
                slot.group.pieces[slot.member].cut.start, engine.pages.executor.snapshot(slot.own).contiguous()
            )

        return write_together(self.ranks, make, owned)


def save_cut(
    engine: Engine,
    save: Callable[[State], None],
    folder: Path,
    *,
    is_known: bool,
) -> dict[Path, FileSum]:
    """Saves the weights of a model whose layers are cut, by code for whole models; all processes come here.

    Args:
        engine: of the model.
        save: the code; called on the first process with a state dictionary, twice if it asks for values.
        folder: where values are gathered then, in files without a name.
        is_known: the code is a library's, which writes files by `save_file` alone. Any other gets values.

    Returns:
        what files are to be compared by, where that is known; on the first process.

    Raises:
        DiskError: a disk is full or failed.
    """
    assert engine.training.shards is not None
    ranks = engine.training.shards.ranks
    ranks.agree("saves the model")
    engine.slots.given.take_over_all()
    noted = NotedFiles([engine])

    def by_outlines() -> bool:
        try:
            # PEFT asks modules that it saves as a whole for their state again.
            with noted.noting(), noted.outlined(engine):
                save(engine.model.state_dict())
        except Exception:
            if noted.asked is None:
                raise
        return noted.asked is None

    def by_values() -> None:
        # Code may ask the model for its state again.
        with engine.state_dicts.sharded_as(values.__getitem__):
            save(engine.model.state_dict())

    with _prompts_known(engine.model):
        if is_known and on_first(ranks, by_outlines):
            return noted.write()
        on_first(ranks, lambda: folder.mkdir(parents=True, exist_ok=True))
        values = _gathered(engine, [folder])
        on_first(ranks, by_values)
    return {}


@contextmanager
def _prompts_known(model: nn.Module) -> Iterator[None]:
    """A context in which PEFT has the prompts that it saves: it gets them by a forward, which all processes make."""
    with torch.no_grad():
        made: Any = getattr(model, _PROMPT, None)
        known = {name: made(name) for name in getattr(model, "prompt_encoder", ())}

    def make(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def prompt(asked: nn.Module, adapter_name: str) -> torch.Tensor:
            return known[adapter_name] if asked is model else original(asked, adapter_name)

        return prompt

    with ExitStack() as stack:
        if known:
            stack.enter_context(one_at_a_time)
            stack.enter_context(exchanged(sys.modules["peft.peft_model"].PeftModel, _PROMPT, make))
        yield


def gathered_state(engine: Engine, folders: Sequence[Path]) -> State:
    """Returns the state dictionary with values; on the first process, and nothing on the others.

    Args:
        engine: of the model; all processes come here.
        folders: where values are mapped from files without a name; empty to have them in memory.

    Raises:
        DiskError: the disk is full.
    """
    values = _gathered(engine, folders)
    if not values:
        return {}
    with engine.state_dicts.sharded_as(values.__getitem__):
        return engine.model.state_dict()


def _gathered(engine: Engine, folders: Sequence[Path]) -> dict[ParamSlot, torch.Tensor]:
    """Gathers one parameter after the other; returns copies on the first process, and nothing on the others."""
    assert engine.training.shards is not None
    ranks = engine.training.shards.ranks
    engine.slots.given.take_over_all()
    is_first, values = ranks.rank == 0, {}
    sharded = [slot for slot in engine.slots if slot.sharded]
    nbytes = sum(slot.value.nbytes for slot in sharded)
    if folders:
        # Where the first process fails alone, the others wait for it.
        on_first(ranks, lambda: _check_room(folders, nbytes))
    for slot in sharded:
        with engine.pages.executor.pin(slot.value) as whole:
            if is_first and folders:
                values[slot] = copy_in_file(whole.detach(), folders, "a model's weights while it is saved")
            elif is_first:
                values[slot] = whole.detach().to("cpu", copy=True)
    return values


def _check_room(folders: Sequence[Path], nbytes: int) -> None:
    free = max(shutil.disk_usage(folder).free for folder in folders)
    if free < nbytes:
        raise DiskError(
            errno.ENOSPC,
            f"disk: {' and '.join(map(str, folders))} have {format_bytes(free)} free, and {format_bytes(nbytes)} of a "
            "model's weights are gathered there while it is saved; free space",
            str(folders[0]),
        )


def cut_engine(model: nn.Module) -> Engine | None:
    """Returns the engine of a model whose layers are cut over processes; None for any other."""
    engine = engine_of(model)
    return engine if engine is not None and engine.training.shards is not None else None
