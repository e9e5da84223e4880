"""`save_state` and `load_state` on pages: whole directories, optimizer state in safetensors by parameter name.

Weights, schedulers, samplers, random numbers and registered objects are accelerate's own files, so that what is saved
with pages loads without them, but for the optimizer's state: that is written as `ptm_accel.checkpoint` has it, and
plain `optimizer.bin` is read as well (`ptm-accel export` makes one).
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import nn

from ptm_accel.checkpoint.directory import remove, remove_incomplete, staged
from ptm_accel.checkpoint.manifest import Sums, check_manifest
from ptm_accel.checkpoint.plain_state import check_either_state, load_either_state
from ptm_accel.checkpoint.training_state import OUTDATED, Expected, save_optimizer_state, saved_last
from ptm_accel.config import PTMConfig
from ptm_accel.distributed.ranks import Ranks
from ptm_accel.distributed.together import on_each
from ptm_accel.engine import Engine, engine_holding
from ptm_accel.errors import CheckpointError, ConfigError, PTMError
from ptm_accel.optim.optimizer import PagedOptimizer

from .resuming import are_several, refuse_other_files, tell_of_processes
from .sharded_saving import NotedFiles, cut_engine, gathered_state, save_cut

logger = logging.getLogger(__name__)

_NUMBERED = re.compile(r"checkpoint_(\d+)")
_T = TypeVar("_T")


class PagedStates(Accelerator):  # type: ignore[misc]
    """The part of the accelerator on pages that saves and loads."""

    _optimizers: list[AcceleratedOptimizer]
    ptm_config: PTMConfig
    _state_of: Callable[[Engine], dict[str, Any]] | None = None
    """While something is saved: returns the state of a model whose layers are cut."""

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Accelerator.save_state`; the directory appears complete or not at all.

        One that exists is replaced as a whole, with the files that others have put there. Of directories that are named
        automatically, the oldest beyond `total_limit` are removed once the new one has its name.

        Raises:
            ConfigError: no directory is given, and none is named automatically.
            DiskError: the disk is full or failed.
            LostStepError: an update has failed since a state was loaded last.
        """
        for optimizer in self._optimizers:
            _paged(optimizer).updates.refuse_lost()
        naming = self.project_configuration.automatic_checkpoint_naming
        if not naming and not output_dir:
            raise ConfigError(
                "save_state was given no output_dir, and automatic_checkpoint_naming is off; give one, or set it in "
                "ProjectConfiguration."
            )
        self._come_together("saves the state")
        final = self._next_directory() if naming or output_dir is None else Path(os.fspath(output_dir))
        sums: Sums | None = {} if self.ptm_config.checkpoint_hashes else None
        with self._shared_staging(final, sums) as staging:
            self.project_configuration.automatic_checkpoint_naming = False
            try:
                with self._without_optimizers() as optimizers:
                    self._save_stock(staging, sums, *args, **kwargs)
            finally:
                self.project_configuration.automatic_checkpoint_naming = naming
            for number, optimizer in enumerate(optimizers):
                ranks = _ranks_of(optimizer)
                if ranks is None and not self.is_main_process:
                    continue
                folder = _state_folder(staging, number)
                folder.mkdir(exist_ok=True)
                part: Sums | None = None if sums is None else {}
                save_optimizer_state(_paged(optimizer), folder, part, ranks)
                if sums is not None and part is not None:
                    sums |= {(folder / name).relative_to(staging).as_posix(): each for name, each in part.items()}
        if naming:
            self._remove_surplus(final)
        return final if naming else output_dir

    def _save_stock(self, staging: Path, sums: Sums | None, *args: Any, **kwargs: Any) -> None:
        """As accelerate saves; of models whose layers are cut, processes write the weights together."""
        engines = self._cut_engines
        given = inspect.signature(Accelerator.save_state).bind_partial(self, None, *args, **kwargs).arguments
        # Hooks are given values, and what is pickled has them.
        if not engines or self._save_model_state_pre_hook or not given.get("safe_serialization", True):
            super().save_state(str(staging), *args, **kwargs)
            return
        noted = NotedFiles(engines)
        for engine in engines:
            engine.slots.given.take_over_all()
        self._state_of = noted.state_dict if self.is_main_process else lambda engine: {}

        def save() -> None:
            with noted.noting() if self.is_main_process else nullcontext():
                super(PagedStates, self).save_state(str(staging), *args, **kwargs)

        try:
            on_each(noted.ranks, "has saved its state", save)
        finally:
            self._state_of = None
        found = noted.write()
        if sums is not None:
            sums |= {path.relative_to(staging).as_posix(): each for path, each in found.items()}

    @property
    def _cut_engines(self) -> list[Engine]:
        """Of the models whose layers are cut over processes."""
        return [engine for model in self._models if (engine := cut_engine(model)) is not None]

    def _come_together(self, what: str) -> None:
        """Has processes that have parts of models say that one of them is here alone: it would wait for the others."""
        for engine in self._cut_engines[:1]:
            assert engine.training.shards is not None
            engine.training.shards.ranks.agree(what)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """As `Accelerator.get_state_dict`; of a model whose layers are cut, the main process alone gets values.

        accelerate does the same with FSDP. They are mapped from the folders of `disk`, if there are some.
        """
        engine = cut_engine(self.unwrap_model(model))
        if engine is None:
            state: dict[str, Any] = super().get_state_dict(model, unwrap=unwrap)
            return state
        if self._state_of is not None:
            return self._state_of(engine)
        return gathered_state(engine, engine.config.disk_paths)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """As `Accelerator.save_model`; of a model whose layers are cut, processes write the weights together."""
        engine = cut_engine(self.unwrap_model(model))
        if engine is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return

        def save(state: dict[str, Any]) -> None:
            self._state_of = lambda engine: state
            try:
                super(PagedStates, self).save_model(model, save_directory, max_shard_size, safe_serialization)
            finally:
                self._state_of = None

        directory = Path(os.fspath(save_directory))
        with engine.saving():
            save_cut(engine, save, directory, is_known=safe_serialization)

    def _next_directory(self) -> Path:
        """As accelerate names checkpoints; what killed saves have left beside them is removed.

        Raises:
            ValueError: there is one of that name, as in accelerate.
            DiskError: what a killed save has left cannot be removed.
        """
        base = self._checkpoints
        final = base / f"checkpoint_{self.save_iteration}"
        if final.exists():
            raise ValueError(
                f"Checkpoint directory {final} ({self.save_iteration}) already exists. Please manually override "
                "`self.save_iteration` with what iteration to start with."
            )
        self.wait_for_everyone()
        if self.is_main_process:
            for path in remove_incomplete(base):
                logger.warning("%s was left by a save that did not end, and was tidied up.", path)
        return final

    def _remove_surplus(self, newest: Path) -> None:
        """Removes the oldest checkpoints beyond `total_limit`, one process for all.

        Args:
            newest: the one that was just published, on every process; it counts, and stays whatever its number is.
        """
        limit = self.project_configuration.total_limit
        if limit is None:
            return
        if self.is_main_process:
            older = [path for path in _numbered(self._checkpoints) if path != newest]
            for path in older[: max(len(older) + 1 - limit, 0)]:
                remove(path)
        # No process may take one for the newest that is about to go.
        self.wait_for_everyone()

    @property
    def _checkpoints(self) -> Path:
        """Where the directories lie that are named automatically."""
        return Path(self.project_dir) / "checkpoints"

    @contextmanager
    def _shared_staging(self, final: Path, sums: Sums | None) -> Iterator[Path]:
        """The directory that all processes write a state into; one of them makes and publishes it."""
        with ExitStack() as stack:
            for engine in self._attached:
                stack.enter_context(engine.saving())
            mine = stack.enter_context(staged(final, outdated=OUTDATED, sums=sums)) if self.is_main_process else None
            if self.num_processes > 1:
                told = [str(mine)]
                torch.distributed.broadcast_object_list(told, 0)
                mine = mine or Path(told[0])
            assert mine is not None
            yield mine
            # What others write there must be complete before it gets its name.
            self.wait_for_everyone()
        self.wait_for_everyone()

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> None:
        """As `Accelerator.load_state`, one tensor at a time onto pages; also what a plain run has saved.

        Raises:
            CheckpointError: the directory has no optimizer state, or that of another model or optimizer, or is damaged.
                Nothing has been changed then.
        """
        self._come_together("loads a state")
        source = one_for_all(self._latest) if input_dir is None else Path(os.path.expanduser(os.fspath(input_dir)))
        if source is not None:
            folder = source
            # What one process does not see, the others have to learn of.
            one_for_all(lambda: self._check_states(folder))
            refuse_other_files(folder)
            if self.is_main_process and folder.is_dir() and not self.split_batches:
                tell_of_processes(folder, self.num_processes)
        with self._without_optimizers() as optimizers:
            # Where each process has a card, accelerate would read all weights onto it, beside the pages.
            kwargs.setdefault("map_location", "cpu")
            # accelerate says what is wrong with a directory that is not there.
            super().load_state(None if source is None else str(source), *args, **kwargs)
        assert source is not None
        for number, optimizer in enumerate(optimizers):
            saved = _saved_last(source, number)
            assert saved is not None
            load_either_state(_paged(optimizer), saved)

    def _latest(self) -> Path | None:
        """The newest of the directories that were named automatically; None where accelerate says that there is none.

        Raises:
            CheckpointError: there is none among what lies where they belong.
        """
        if not self.project_configuration.automatic_checkpoint_naming or not self._checkpoints.is_dir():
            return None
        found = _numbered(self._checkpoints)
        if not found:
            # accelerate would take anything that lies there, also what a killed save has left.
            raise CheckpointError(
                f"cannot load the newest state: {self._checkpoints} has 0 directories checkpoint_<number>. Set "
                "project_dir to where there are some, or give input_dir."
            )
        return found[-1]

    def _check_states(self, source: Path) -> None:
        if not source.is_dir():
            return
        try:
            if self.ptm_config.checkpoint_hashes:
                check_manifest(source)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {_newest_whole(source)} Nothing was changed.") from error
        for number, optimizer in enumerate(self._optimizers):
            saved = _saved_last(source, number)
            if saved is None:
                folder = _state_folder(source, number).relative_to(source.parent)
                raise CheckpointError(
                    f"{source} has no state of optimizer {number} (neither {folder} of ptm_accel nor "
                    f"{_plain_name(number)}). Load another one, or prepare as many optimizers as were saved."
                )
            check_either_state(saved, Expected.of(_paged(optimizer)))

    @contextmanager
    def _without_optimizers(self) -> Iterator[list[AcceleratedOptimizer]]:
        """While it lasts, accelerate sees no optimizers: it would gather and pickle their state."""
        optimizers, self._optimizers = self._optimizers, []
        try:
            yield optimizers
        finally:
            self._optimizers = optimizers


def _numbered(base: Path) -> list[Path]:
    """The checkpoints in `base` that were named automatically, oldest first; what else lies there is not ours."""
    paths = base.iterdir() if base.is_dir() else ()
    numbers = {path: int(match[1]) for path in paths if (match := _NUMBERED.fullmatch(path.name)) and path.is_dir()}
    return sorted(numbers, key=numbers.__getitem__)


def _newest_whole(source: Path) -> str:
    """Says which of the checkpoints beside one is the newest that is whole."""
    for path in reversed(_numbered(source.absolute().parent)):
        if path.name != source.name:
            with suppress(CheckpointError):
                check_manifest(path)
                return f"The newest whole one beside it is {path}."
    return "There is no whole one beside it."


def one_for_all(check: Callable[[], _T]) -> _T:
    """Has one process look through what all of them are about to read; what it returns or raises, all do."""
    several = are_several()
    told: list[Any] = [None, None]
    if not several or torch.distributed.get_rank() == 0:
        try:
            told[0] = check()
        except (PTMError, OSError) as found:
            told[1] = found
    if several:
        torch.distributed.broadcast_object_list(told, 0)
    if told[1] is not None:
        raise told[1]
    result: _T = told[0]
    return result


def _paged(optimizer: AcceleratedOptimizer) -> PagedOptimizer:
    inner = optimizer.optimizer
    assert isinstance(inner, PagedOptimizer), "`prepare_optimizer` lets no other through"
    return inner


def _ranks_of(optimizer: AcceleratedOptimizer) -> Ranks | None:
    """Returns the processes that have ranges of an optimizer's state; None where each has all of it."""
    engine = engine_holding(param for group in optimizer.param_groups for param in group["params"])
    shards = None if engine is None else engine.training.shards
    return None if shards is None else shards.ranks


def _state_folder(directory: Path, number: int) -> Path:
    return directory if number == 0 else directory / f"optimizer_{number}"


def _saved_last(directory: Path, number: int) -> Path | None:
    return saved_last(_state_folder(directory, number), [directory / _plain_name(number)])


def _plain_name(number: int) -> str:
    return "optimizer.bin" if number == 0 else f"optimizer_{number}.bin"
