"""The Trainer on pages: a mixin over any `transformers.Trainer`, and the class made of it."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.trainer
from torch import nn

from ptm_accel.config import PseudoToRealConfig, PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.environment import agreed, speak
from ptm_accel.errors import PagedModelError, UnsupportedError
from ptm_accel.memory.snapshot import keep_snapshot
from ptm_accel.metrics import TokenCount
from ptm_accel.optim.support import blank_state

from ..accelerate import PTMAccelerator
from ..accelerate.pipelines import PipelineAccelerator
from ..accelerate.shards import refuse_beside_cut
from ..trl import refuse_arguments
from .by_layer import ByLayerAccelerator, MicroBatches, refuse_by_layer
from .callback import PTMCallback
from .checkpoints import PagedCheckpoints
from .interrupts import SafePoints
from .loop import KnownLoop, step_follows
from .optimizers import refuse_optimizer
from .pipelines import refuse_with_pipeline
from .pseudo_to_real import PseudoToReal, recipe_of, refuse_others
from .shards import beside_cut

logger = logging.getLogger(__name__)

_MADE_IN_TRAINING = ("optimizer", "lr_scheduler", "_created_lr_scheduler")
"""What `train()` makes unless the Trainer was given it."""


class PTMTrainerMixin(PagedCheckpoints, MicroBatches, KnownLoop):
    """Puts the model of any Trainer on pages: `class MyTrainer(PTMTrainerMixin, Seq2SeqTrainer): ...`.

    The model is put on pages when it is first trained or evaluated, so it can be changed until then (frozen, resized,
    given adapters).

    Args:
        *args: as for the Trainer.
        ptm_config: the options: a `PTMConfig`, a mapping, or the path of a YAML file.
        **kwargs: as for the Trainer.

    Raises:
        ConfigError: options that cannot be used.
        UnsupportedError: DeepSpeed, FSDP or Megatron-LM is switched on as well, or `optim` names an optimizer that
            cannot run on pages.
    """

    ptm_config: PTMConfig | None = None
    _runs = False
    _tokens: TokenCount | None = None

    def __init__(
        self,
        *args: Any,
        ptm_config: PTMConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if ptm_config is not None or self.ptm_config is None:
            self.ptm_config = agreed(ptm_config)
        speak()
        self._safe_points = SafePoints()
        try:
            super().__init__(*args, **kwargs)
            self._complete()
        except BaseException:
            self._take_back()
            raise

    def _complete(self) -> None:
        """Refuses what cannot be done on pages, and adds what belongs to them."""
        assert self.ptm_config is not None
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            refuse_optimizer(self.args)
        if (wanted := self._dtype_of_evaluation) is not None:
            logger.warning(
                "%s_full_eval casts the whole model for an evaluation outside of train(), which is not possible on "
                "pages: evaluate() and predict() are refused there, unless the model is %s already. Within train() it "
                "has no effect, as in the stock Trainer.",
                *wanted,
            )
        if not any(isinstance(callback, PTMCallback) for callback in self.callback_handler.callbacks):
            self.add_callback(PTMCallback)
        if self._ranks is not None:
            refuse_with_pipeline(self)
        refuse_beside_cut(self.ptm_config, self.accelerator.num_processes, beside_cut(self.args))
        refuse_by_layer(self, self.ptm_config)
        if self.ptm_config.pseudo_to_real is not None:
            refuse_others(self.args, self.model if self.model_init is None else None)
            asked = PseudoToRealConfig.load(self.ptm_config.pseudo_to_real)
            self.add_callback(PseudoToReal(asked.delink, asked.moments))

    # ---- placement -------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """As in the Trainer, with an accelerator that puts models on pages."""
        refuse_arguments(self.args)
        assert self.ptm_config is not None
        kind = ByLayerAccelerator if self.ptm_config.pipeline is None else PipelineAccelerator
        with _accelerator_is(functools.partial(kind, ptm_config=self.ptm_config)):
            super().create_accelerator_and_postprocess()
        self.accelerator.beside_cut = beside_cut(self.args)
        if self.args.n_gpu > 1:
            logger.warning(
                "%d GPUs are visible; ptm_accel trains on one of them, and per_device_train_batch_size is for that "
                "one. Set CUDA_VISIBLE_DEVICES to choose it.",
                self.args.n_gpu,
            )
            self.args._n_gpu = 1

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the pages decide where parameters are."""

    def _attach(self) -> Engine:
        accelerator = self.accelerator
        assert isinstance(accelerator, PTMAccelerator)
        # The model before this one (model_init makes a new one for each train()) must not be kept by the callbacks.
        self.callback_handler.model = self.model
        accelerator.put_back()
        engine = accelerator.attach(self._bare_model)
        engine.training.updates_in_backward = step_follows(self)
        return engine

    def compute_loss_context_manager(self) -> ExitStack:
        """As in the Trainer; a backward of the user's in `compute_loss` is not the one that the step follows."""
        stack: ExitStack = super().compute_loss_context_manager()
        engine = self._engine if self.model is not None else None
        if engine is not None:
            stack.enter_context(engine.training.no_updates())
        return stack

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self._attach()
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in the Trainer; state that an optimizer makes in its constructor takes no memory."""
        with blank_state(self._attach().slots):
            optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        return optimizer

    # ---- running ---------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer. Checkpoints that are not complete are never resumed from.

        Raises:
            CheckpointError: the checkpoint is incomplete, or of another model or optimizer.
            BudgetError, DiskError: memory or disk does not suffice.
        """
        self._clear_leftovers(kwargs.get("trial", args[0] if args else None))
        if resume_from_checkpoint:
            resume_from_checkpoint = self._find_checkpoint(resume_from_checkpoint)
        with self._ending_cleanly():
            if (recipe := recipe_of(self)) is not None:
                self._attach()
                # True: there is none, as the Trainer will say.
                checkpoint = None if isinstance(resume_from_checkpoint, bool) else resume_from_checkpoint
                recipe.begin(self._bare_model, checkpoint)
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer.

        Raises:
            PagedModelError: outside of `train()`, `bf16_full_eval` or `fp16_full_eval` of a model of another dtype.
        """
        self._refuse_cast()
        with self._ending_cleanly():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer.

        Raises:
            PagedModelError: as by `evaluate`.
            UnsupportedError: the model is cut into stages.
        """
        self._refuse_cast()
        if self._ranks is not None:
            raise UnsupportedError("a model in a pipeline returns its loss alone, and no predictions; use evaluate().")
        with self._ending_cleanly():
            return super().predict(*args, **kwargs)

    @property
    def _dtype_of_evaluation(self) -> tuple[str, torch.dtype] | None:
        """What evaluations outside of `train()` are to be done in; None for the model's own dtypes."""
        if self.args.fp16_full_eval:
            return "fp16", torch.float16
        return ("bf16", torch.bfloat16) if self.args.bf16_full_eval else None

    def _refuse_cast(self) -> None:
        wanted = None if self.is_in_train else self._dtype_of_evaluation
        if wanted is None or self.model is None:
            return
        name, dtype = wanted
        others = {p.dtype for p in self.model.parameters() if p.is_floating_point()} - {dtype}
        if others:
            raise PagedModelError(
                f"{name}_full_eval=True would cast the model from {', '.join(sorted(map(str, others)))} to {dtype}, "
                "which is not possible on pages. Evaluate within train() (eval_strategy), set "
                f"{name}_full_eval=False, or load the model in {dtype}."
            )

    @contextmanager
    def _ending_cleanly(self) -> Iterator[None]:
        """After any exception nothing stays half done: saving and training on are possible.

        Before the first step the models are as they were before this Trainer put them on pages, so that another one can
        be given other options.
        """
        before = {name: getattr(self, name) for name in _MADE_IN_TRAINING}
        outermost, self._runs = not self._runs, True
        # Of the model that is trained now.
        self._tokens = None
        try:
            with self._safe_points.watched():
                yield
        except BaseException as error:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, PTMCallback):
                    callback.thaw()
            engine = self._engine if self.model is not None else None
            if outermost and engine is not None and isinstance(error, torch.OutOfMemoryError):
                file = Path(self.args.output_dir or ".", f"out_of_memory-{self.args.process_index}.json")
                keep_snapshot(error, engine.memory.budgets.values(), file)
            if outermost and self._take_back():
                # The optimizer that was bound is of no use any more; the callbacks must not keep it.
                vars(self).update(before)
                vars(self.callback_handler).update(optimizer=self.optimizer, lr_scheduler=self.lr_scheduler)
            elif engine is not None:
                engine.abort()
            if self._ranks is not None:
                # The others wait for this process until the launcher ends them.
                logger.error("rank %d: %s", self.args.process_index, repr(error))
            raise
        finally:
            self._runs = not outermost

    def _take_back(self) -> bool:
        accelerator = getattr(self, "accelerator", None)
        return isinstance(accelerator, PTMAccelerator) and accelerator.take_back()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer; Ctrl-C ends training before it, or after the step that it is a part of."""
        if not self._losses:
            # Otherwise updates may have begun, and the step is soon over.
            self._safe_points.check()
        batch = args[1] if len(args) > 1 else kwargs.get("inputs")
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, torch.Tensor):
            if self._tokens is None and self._engine is not None:
                self._tokens = self._engine.metrics.tokens
            if self._tokens is not None:
                # As many in each process.
                self._tokens.total += ids.numel() * self.args.world_size
        if self._batches:
            return self._step_by_layer(super().training_step, *args, **kwargs)
        return super().training_step(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer."""
        found = super().get_batch_samples(*args, **kwargs)
        if self._is_by_layer:
            self._steps_by_layer(found[0])
        return found

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer; Ctrl-C ends an evaluation before it."""
        self._safe_points.check()
        return super().prediction_step(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in the Trainer; the lines of training get the memory used and the bytes moved since the last one."""
        engine = self._engine
        if engine is not None and "loss" in logs and "learning_rate" in logs:
            logs = {**logs, **engine.metrics.since_last()}
        super().log(logs, *args, **kwargs)


@contextmanager
def _accelerator_is(factory: Any) -> Iterator[None]:
    """While it lasts, `Accelerator(...)` in the Trainer's module calls `factory`."""
    names = vars(transformers.trainer)
    stock = names["Accelerator"]
    names["Accelerator"] = factory
    try:
        yield
    finally:
        names["Accelerator"] = stock


class Trainer(PTMTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on pages: the same arguments, and `ptm_config`."""


_made: dict[type, type[transformers.Trainer]] = {}


def ptm_trainer(cls: type[transformers.Trainer]) -> type[transformers.Trainer]:
    """Returns a subclass of `cls` that trains on pages; it has the same name, and takes `ptm_config` as well.

    Args:
        cls: any subclass of `transformers.Trainer` (Seq2SeqTrainer, TRL's, your own).

    Raises:
        UnsupportedError: `cls` is not a Trainer.
    """
    if not issubclass(cls, transformers.Trainer):
        raise UnsupportedError(f"{cls.__name__} is not a transformers.Trainer; pass a subclass of it to ptm_trainer().")
    if issubclass(cls, PTMTrainerMixin):
        return cls
    if cls not in _made:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        metaclass: Any = type(cls)
        _made[cls] = metaclass(cls.__name__, (PTMTrainerMixin, cls), names)
    return _made[cls]
