"""How the Trainer on pages saves and resumes: whole directories or none, training state in safetensors by name.

The Trainer composes the directory of a checkpoint from its run directory. While a checkpoint is written, that is a
staging directory beside the final one; when everything is there, it gets its name.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import reissue_pt_warnings
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, sort_checkpoints
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ptm_accel.checkpoint.directory import remove, remove_incomplete, staged
from ptm_accel.checkpoint.index import INDEX_NAME, read_index
from ptm_accel.checkpoint.manifest import Sums
from ptm_accel.checkpoint.plain_state import check_either_state, load_either_state
from ptm_accel.checkpoint.training_state import OUTDATED, Expected, save_optimizer_state
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import CheckpointError
from ptm_accel.optim.optimizer import PagedOptimizer

from ..accelerate.resuming import refuse_other_files, tell_of_processes
from ..accelerate.sharded_saving import save_cut
from ..accelerate.shards import are_cut
from ..accelerate.states import one_for_all
from .loading import load_weights
from .loop import comes_with
from .own_loading import own_loading, own_saving
from .pipelines import PipelinedLoop, gathered
from .resuming import find_whole, last_state

logger = logging.getLogger(__name__)

_WRITTEN = re.compile(
    r"(model|pytorch_model|adapter_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?|"
    r"scheduler\.pt|scaler\.pt|rng_state(_\d+)?\.pth|"
    rf"{re.escape(TRAINER_STATE_NAME)}|{re.escape(INDEX_NAME)}|{OUTDATED.pattern}"
)
"""What a save writes for itself: what is there of these from before is out of date. All else may be somebody's."""


class PagedCheckpoints(PipelinedLoop):
    """The part of the Trainer's mixin that knows where checkpoints are, and which of them are whole."""

    ptm_config: PTMConfig | None = None
    _staging: Path | None = None
    _sums: Sums | None = None
    _pushes_when_done = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, transformers.Trainer):
            _put_before_stock(cls)

    def _attach(self) -> Engine:
        raise NotImplementedError

    @property
    def _engine(self) -> Engine | None:
        return engine_of(self._bare_model)

    @property
    def _bare_model(self) -> nn.Module:
        # The Trainer refuses to be built without one; it may be made anew in train().
        assert self.model is not None
        return self.model

    # ---- saving ----------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        if self._staging is not None:
            return str(self._staging)
        return super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is not None:
            # An upload runs in the background; it must find the files under their final name.
            self._pushes_when_done = True
            return
        super()._push_from_checkpoint(checkpoint_folder)

    @contextmanager
    def _noting_sums(self, folder: Path) -> Iterator[Sums | None]:
        """Yields what is to get the sums of files that are written into a folder; None if nobody asks for them."""
        if self._staging is None or self._sums is None:
            yield None
            return
        part: Sums = {}
        yield part
        root = self._staging / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._sums |= {(folder / name).relative_to(root).as_posix(): each for name, each in part.items()}

    # ---- finding a checkpoint --------------------------------------------------------------------------------

    def _clear_leftovers(self, trial: Any) -> None:
        """Removes what a killed save has left."""
        if self.args.should_save:
            for path in remove_incomplete(Path(self._get_output_dir(trial))):
                logger.warning("%s was left by a save that did not end, and was tidied up.", path)
        self.accelerator.wait_for_everyone()

    def _find_checkpoint(self, asked: str | bool) -> str | bool:
        """The complete checkpoint to resume from, which all processes see.

        Raises:
            CheckpointError: the one asked for is not complete, damaged, or not everywhere; on all processes.
        """
        run_dir = Path(self._get_output_dir(None))
        name = one_for_all(lambda: find_whole(asked, run_dir, hashes=self._hashes))
        if isinstance(asked, bool):
            if name is None:
                # The Trainer says that there is none.
                return asked
            asked = str(run_dir / name)
        path = Path(asked)
        refuse_other_files(path)
        # Stages of a pipeline, and processes that divide a batch, have as many samples as ever.
        grows = self._ranks is None and not self.accelerator.split_batches
        if grows and self.args.process_index == 0 and path.is_dir():
            each = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
            tell_of_processes(path, self.args.world_size, each)
        return asked

    @property
    def _hashes(self) -> bool:
        return self.ptm_config is None or bool(self.ptm_config.checkpoint_hashes)


if TYPE_CHECKING:
    _StockHost = PagedCheckpoints
else:
    _StockHost = transformers.Trainer


class StockOnPages(_StockHost):
    """What stands in the place of the stock Trainer's own saving and loading, and of nothing else.

    Every class of a Trainer on pages has it right before `transformers.Trainer` in its order of resolution. So the
    methods of subclasses run as ever, and their `super()` finds these.
    """

    # ---- saving ----------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        engine = self._engine
        if engine is not None and engine.optimizer is not None:
            engine.optimizer.updates.refuse_lost()
        run_dir = Path(self._get_output_dir(trial))
        final = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        before = self.state.best_model_checkpoint
        self._sums = {} if self._hashes else None
        try:
            with self._staged(final) as staging:
                self._staging = staging
                super()._save_checkpoint(model, trial)
                self._staging = None
                # Other processes write there as well: the states of their random numbers.
                self.accelerator.wait_for_everyone()
                if self._ranks is not None and self._sums is not None:
                    self._sums |= gathered(self._sums, self._ranks)
                if self.args.should_save:
                    self._name_best_checkpoint(final, before, staging / final.name)
                    for entry in list((staging / final.name).iterdir()):
                        entry.rename(staging / entry.name)
                    (staging / final.name).rmdir()
            self.accelerator.wait_for_everyone()
            if not self.args.should_save:
                self._name_best_checkpoint(final, before, None)
        except BaseException:
            # What was written is gone; it cannot be the best one.
            self.state.best_model_checkpoint = before
            raise
        finally:
            self._staging = self._sums = None
            pushes, self._pushes_when_done = self._pushes_when_done, False
        if pushes:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            # The Trainer has done this as well, in the staging directory, where there was nothing to remove.
            self._remove_surplus(run_dir)

    def _remove_surplus(self, run_dir: Path) -> None:
        """Removes what `rotate_checkpoints` would, the same ones; none is ever there in part under its name."""
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        if limit is None or limit <= 0:
            return
        found = sort_checkpoints(str(run_dir), use_mtime=True)
        kept = {found[-1]} if found else set()
        if best is not None:
            kept.add(str(Path(best)))
        surplus = len(found) - max(limit, len(kept))
        for path in [path for path in found if path not in kept][: max(surplus, 0)]:
            try:
                remove(Path(path))
            except OSError as error:
                # Training has no need of it to be gone.
                logger.warning("%s is one more than save_total_limit, and cannot be removed: %s", path, error)

    @contextmanager
    def _staged(self, final: Path) -> Iterator[Path]:
        """The directory that all processes write a checkpoint into; one of them makes and publishes it."""
        with ExitStack() as stack:
            if self._engine is not None:
                stack.enter_context(self._engine.saving())
            mine = (
                stack.enter_context(staged(final, outdated=_WRITTEN, sums=self._sums))
                if self.args.should_save
                else None
            )
            if self.args.world_size > 1:
                told = [str(mine)]
                torch.distributed.broadcast_object_list(told, 0)
                mine = mine or Path(told[0])
            assert mine is not None
            yield mine

    def _name_best_checkpoint(self, final: Path, before: str | None, written: Path | None) -> None:
        """Sets the path of the best checkpoint, which the Trainer has looked for in the staging directory.

        Args:
            final: the name of the checkpoint that was written.
            before: the best one's before.
            written: where it lies, if this process has written its state.
        """
        state = self.state
        best = before
        if state.best_global_step and self.args.save_strategy != SaveStrategy.NO:
            path = final.parent / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if path == final or path.exists():
                best = str(path)
        if state.best_model_checkpoint != best or best != before:
            state.best_model_checkpoint = best
            if written is not None:
                state.save_to_json(str(written / TRAINER_STATE_NAME))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in the Trainer; processes that have parts of a model write them together."""
        if are_cut(self.accelerator.ptm_config, self.accelerator.num_processes):
            self._save_cut(Path(output_dir or self.args.output_dir or ""))
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
            return
        if self._ranks is None:
            with nullcontext() if self._engine is None else self._engine.saving():
                super().save_model(output_dir, _internal_call)
            return
        self._ranks.agree("save the model")
        self._attach()
        directory = Path(output_dir or self.args.output_dir or "")
        if self.args.should_save:
            # All but the weights.
            self._save(str(directory), state_dict={})
            # Whoever reads a model prefers it to several files.
            (directory / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        self._write_weights(directory, self._ranks)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_cut(self, directory: Path) -> None:
        """Writes the weights of a model whose layers are cut: every process what it owns of them."""
        model = self._bare_model
        engine = self._attach()
        with engine.saving():
            found = save_cut(
                engine,
                lambda state: self._save(str(directory), state_dict=state),
                directory,
                is_known=comes_with(self, "_save") and not own_saving(model),
            )
        with self._noting_sums(directory) as sums:
            if sums is not None:
                sums.update((str(path), each) for path, each in found.items())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = self._engine
        if engine is None or engine.optimizer is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        ranks, shards = self._ranks, engine.training.shards
        if self.args.should_save or shards is not None or (ranks is not None and ranks.replica == 0):
            folder = self._state_folder(Path(output_dir))
            folder.mkdir(exist_ok=True)
            with self._noting_sums(folder) as sums:
                save_optimizer_state(engine.optimizer, folder, sums, None if shards is None else shards.ranks)
        if not self.args.should_save:
            return
        with warnings.catch_warnings(record=True) as caught:
            if self.lr_scheduler is not None:
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))
        reissue_pt_warnings(caught)

    # ---- loading ---------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        engine, directory = self._attach(), Path(resume_from_checkpoint)
        self._check_stages(directory)
        # Of a checkpoint that training cannot go on from, nothing is taken.
        folder = self._state_folder(directory)
        saved = last_state(folder)
        ours = saved is not None and saved.name == INDEX_NAME
        other = ours and not self._may_update(read_index(folder)["parameters"].keys(), engine)
        if saved is not None and not other and (directory / SCHEDULER_NAME).is_file():
            self._check_optimizer(
                saved, engine, makes=_has_weights(directory) and own_loading(self._bare_model) is None
            )
        if not self._load_weights(directory, strict=other):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _check_optimizer(self, saved: Path, engine: Engine, *, makes: bool) -> None:
        """Compares a saved state with the optimizer, where that can be known before the weights are loaded.

        Args:
            saved: the state.
            engine: of the model.
            makes: whether the Trainer's own optimizer may be made now, since the weights make no other parameters.

        Raises:
            CheckpointError: it is of another optimizer.
        """
        before: Any = self.optimizer
        if before is None and not (makes and comes_with(self, "create_optimizer")):
            return
        inner: Any = self.create_optimizer() if before is None else before
        while not isinstance(inner, PagedOptimizer) and hasattr(inner, "optimizer"):
            inner = inner.optimizer
        masters = engine.config.master_weights is not None
        is_paged = isinstance(inner, PagedOptimizer)
        try:
            expected = Expected.of(inner) if is_paged else Expected.before(inner, engine.slots, masters=masters)
            check_either_state(saved, expected)
        except CheckpointError:
            self.optimizer = before
            raise

    def _may_update(self, names: Set[str], engine: Engine) -> bool:
        """Whether an optimizer over just these parameters may be the one that there is, or will be."""
        trained = {slot.name for slot in engine.slots if slot.param.requires_grad}
        if self.optimizer is not None:
            held = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
            return names == {slot.name for slot in engine.slots if id(slot.param) in held}
        # Whoever makes the optimizer in a way of his own may leave some parameters out.
        return names == trained or (names <= trained and not comes_with(self, "create_optimizer"))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        logger.info("Loading best model from %s (score: %s).", best, self.state.best_metric)
        if best is None or not self._load_weights(Path(best), strict=False):
            super()._load_best_model()

    def _load_weights(self, directory: Path, *, strict: bool) -> bool:
        """Loads safetensors of a whole model onto the pages; False where the Trainer has to.

        There may be none (adapters, older formats), or the model may load its state in a way of its own.
        """
        if not _has_weights(directory):
            return False
        own = own_loading(self._bare_model)
        if own is not None:
            logger.warning(
                "%s customises load_state_dict (%s): each file of weights in %s is read whole, into memory that the "
                "budgets do not count.",
                type(self._bare_model).__name__,
                own,
                directory,
            )
            return False
        # What only one of the two has is told of, as by the stock Trainer.
        part = self._ranks is not None
        self._issue_warnings_after_load(load_weights(self._bare_model, directory, strict=strict, part=part))
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        engine = self._engine
        directory = Path(checkpoint)
        if engine is None or engine.optimizer is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        saved, scheduler = last_state(self._state_folder(directory)), directory / SCHEDULER_NAME
        # Of one without the other the stock Trainer takes neither.
        if saved is None or not scheduler.is_file():
            logger.warning(
                "%s has no %s: only its weights are loaded, and training continues with a new optimizer and a schedule "
                "from the start, as without ptm_accel.",
                directory,
                "optimizer state" if saved is None else SCHEDULER_NAME,
            )
            return
        load_either_state(engine.optimizer, saved)
        if self.lr_scheduler is not None:
            with warnings.catch_warnings(record=True) as caught:
                self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))
            reissue_pt_warnings(caught)


def _put_before_stock(cls: type) -> None:
    """Puts `StockOnPages` right before `transformers.Trainer` in the order in which `cls` looks for its methods."""
    stock, order = transformers.Trainer, cls.__mro__
    if order[order.index(stock) - 1] is StockOnPages:
        return
    bases: list[type] = [StockOnPages if base is stock else base for base in cls.__bases__]
    if StockOnPages not in bases:
        last = max(index for index, base in enumerate(bases) if issubclass(base, stock))
        bases.insert(last + 1, StockOnPages)
    cls.__bases__ = tuple(bases)


def _has_weights(directory: Path) -> bool:
    """Whether there are safetensors of a whole model."""
    return any((directory / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
