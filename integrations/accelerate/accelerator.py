"""An `Accelerator` that puts models on pages, where the stock one moves them to a device or wraps them."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch import nn

from ptm_accel.config import AUTO, FULL, LOCK_FREE, ONE_BY_ONE, PTMConfig
from ptm_accel.distributed.shards import same_on_all
from ptm_accel.engine import Engine, engine_holding, engine_of, living_engines
from ptm_accel.environment import agreed, speak
from ptm_accel.errors import BudgetError, UnsupportedError
from ptm_accel.memory.setup import Memory
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.pipeline.layer_slices import slice_layers

from ..peft import refuse_adapters
from .before import Before
from .shards import may_be_cut, refuse_beside_cut, refuse_unknown_processes, tell_of_one
from .states import PagedStates

logger = logging.getLogger(__name__)

_PLUGINS = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
}
_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
_TYPES = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.FSDP: "FSDP",
    DistributedType.MEGATRON_LM: "Megatron-LM",
}


class PagedGradScaler(torch.amp.GradScaler):
    """A `GradScaler` whose gradients are on pages; the same scales, and the same steps are skipped."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, PagedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

        def unscale(gradient: torch.Tensor) -> None:
            if not allow_fp16 and gradient.dtype == torch.float16:
                raise UnsupportedError(
                    f"Attempting to unscale FP16 gradients (of shape {tuple(gradient.shape)}): fp16=True needs fp32 "
                    "parameters. Load the model with dtype=torch.float32, or train in bf16."
                )
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, inv_scale)

        optimizer.gradients.change(unscale)
        engine = engine_holding(param for group in optimizer.param_groups for param in group["params"])
        if engine is not None and engine.training.shards is not None:
            # Each rank has seen its own ranges, and all of them make the step or skip it.
            engine.training.shards.ranks.most(found_inf)
        return {found_inf.device: found_inf}

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if not isinstance(optimizer, PagedOptimizer):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        if any(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            # As in torch, gradients stay until somebody drops them.
            if not getattr(optimizer.inner, "_step_supports_amp_scaling", False):
                return None
            # A fused optimizer is called all the same and skips inside its kernel; to accelerate that is a step, after
            # which the scheduler moves on.
            with optimizer.gradients.left_out():
                return optimizer.step(*args, **kwargs)
        return optimizer.step(*args, **kwargs)


class PagedAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An `AcceleratedOptimizer` whose skipped steps are counted as well."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """As `AcceleratedOptimizer.step`: does something only when gradients are synchronised."""
        super().step(closure)
        if self.gradient_state.sync_gradients and self.step_was_skipped:
            params = (param for group in self.param_groups for param in group["params"])
            engine = engine_holding(params)
            if engine is not None:
                # Its passes have moved as much as any; the optimizer has not heard of it.
                engine.metrics.step_ended()


class PTMAccelerator(PagedStates):
    """An `Accelerator` whose models and optimizers are on pages; everything else is accelerate's own.

    Args:
        *args: as for `Accelerator`.
        ptm_config: the options: a `PTMConfig`, a mapping, or the path of a YAML file.
        memory: tiers made by the caller, instead of those of this machine.
        **kwargs: as for `Accelerator`.

    Raises:
        UnsupportedError: DeepSpeed, FSDP or Megatron-LM is switched on as well; a device that is neither CUDA nor the
            CPU.
        ConfigError: options that cannot be used.
    """

    scaler: torch.amp.GradScaler | None
    pipelines = by_layer = False
    beside_cut: Sequence[str] = ()
    """What is asked for and cannot be done where layers are cut: `shard: auto` does not cut them then."""
    alike: torch.distributed.ProcessGroup | None = None
    """The processes that have the same parameters as this one; None for all."""

    def __init__(
        self,
        *args: Any,
        ptm_config: PTMConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        memory: Memory | None = None,
        **kwargs: Any,
    ) -> None:
        self.ptm_config = agreed(ptm_config)
        if self.ptm_config.pipeline is not None and not self.pipelines:
            raise UnsupportedError(
                "a pipeline is trained by the Trainer, which saves its stages as one model; in a loop of your own, "
                "leave pipeline (PTM_PIPELINE_STAGES) out."
            )
        if self.ptm_config.micro_batches != ONE_BY_ONE and not self.by_layer:
            raise UnsupportedError(
                f"micro_batches: {self.ptm_config.micro_batches} needs the Trainer's gradient accumulation; in a loop "
                "of your own, leave micro_batches (PTM_MICRO_BATCHES) out."
            )
        self._memory = memory
        self._attached: weakref.WeakSet[Engine] = weakref.WeakSet()
        # Those that it has put on pages, and what their models were like.
        self._placed: weakref.WeakKeyDictionary[Engine, Before] = weakref.WeakKeyDictionary()
        self._evaluated: list[weakref.ref[nn.Module]] = []
        self._told_of_one = False
        given = inspect.signature(Accelerator.__init__).bind_partial(self, *args, **kwargs).arguments
        _refuse_plugins(given)
        super().__init__(*args, **kwargs)
        if self.distributed_type in _TYPES:
            _refuse_plugin(_TYPES[self.distributed_type], "the state of this process")
        if self.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"ptm_accel was given the device {self.device}; it has pages for CUDA and for the CPU only. "
                "Set use_cpu=True (Accelerator: cpu=True)."
            )
        if self.project_configuration.save_on_each_node:
            self.beside_cut = ["save_on_each_node=True"]
        if self.ptm_config.shard == FULL:
            refuse_beside_cut(self.ptm_config, self.num_processes, self.beside_cut)
            refuse_unknown_processes(self.ptm_config, self.num_processes)
        self._put_scaler_on_pages()

    def _put_scaler_on_pages(self) -> None:
        # Before any optimizer is prepared, since each keeps the scaler that is there then.
        if self.scaler is not None:
            if self.ptm_config.update == LOCK_FREE:
                raise UnsupportedError(
                    "update: lock_free cannot be used with mixed precision fp16, whose gradient scaler skips steps. "
                    "Use bf16, or set update to exact."
                )
            options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler = PagedGradScaler(self.device.type, **options)

    # ---- models and optimizers -------------------------------------------------------------------------------

    def attach(self, model: nn.Module, *, evaluates: bool = False) -> Engine:
        """Puts a model's parameters on pages, and its buffers where it computes.

        Args:
            model: the model, compiled or not; one that is on pages already keeps its engine.
            evaluates: it is not going to be trained.

        Raises:
            ConfigError, UnsupportedError, BudgetError: as `Engine.attach`.
        """
        bare = getattr(model, "_orig_mod", model)
        refuse_adapters(bare)
        if not self._holds(bare) and living_engines():
            # Models that nobody uses any more go, with their pages, before the next one comes.
            gc.collect()
        if self.is_main_process:
            # Not as the accelerator is made: scripts set up their logging after that.
            speak()
        if not self._told_of_one:
            self._told_of_one = True
            tell_of_one(self.ptm_config, self.num_processes)
        is_new = engine_of(bare) is None and engine_holding(bare.parameters()) is None
        before = Before(bare)
        slices = self.ptm_config.token_slices
        try:
            if slices is not None and not evaluates:
                slice_layers(bare, None if slices == AUTO else int(slices))
            engine = self._put_on_pages(bare, evaluates)
            if is_new:
                self._placed[engine] = before
            if self.device.type != "cpu":
                nn.Module.to(bare, self.device)
            if self.num_processes > 1:
                engine.training.replicate(self.alike)
        except BaseException:
            if is_new:
                self._take_back(bare, before)
            raise
        self._attached.add(engine)
        # `accelerate` itself keeps this state, one for all accelerators.
        state = self.gradient_state
        engine.training.more_follow = lambda: not state.sync_gradients
        if hasattr(bare, "save_pretrained"):
            import_module("..transformers.saving", __package__).install()
        return engine

    def _put_on_pages(self, model: nn.Module, evaluates: bool) -> Engine:
        """Puts a model on pages; where not every process has room for all of it, each has a part (`shard: auto`)."""
        options: dict[str, Any] = {"memory": self._memory, "device": self.device, "evaluates": evaluates}
        if engine_of(model) is not None or not self._may_cut:
            return Engine.attach(model, self.ptm_config, **options)
        engine, refused = None, None
        try:
            engine = Engine.attach(model, self.ptm_config, **options)
        except BudgetError as error:
            refused = error
        if same_on_all(refused is None) and engine is not None:
            return engine
        if engine is not None:
            engine.detach(check=False)
        self._decide_to_cut(refused)
        return Engine.attach(model, self.ptm_config, **options)

    @property
    def _may_cut(self) -> bool:
        return not self.beside_cut and may_be_cut(self.ptm_config, self.num_processes)

    def _decide_to_cut(self, refused: BudgetError | None) -> None:
        logger.warning(
            "not each of %d processes has room for the whole model, so each keeps a part of it (shard: full).%s",
            self.num_processes,
            "" if refused is None else f" Refused was: {refused}",
        )
        self.ptm_config = replace(self.ptm_config, shard=FULL)

    def _bind(self, optimizer: torch.optim.Optimizer) -> PagedOptimizer:
        """Binds an optimizer; where its state does not fit in every process, each has a part of the model."""
        engine = self._engine_of_optimizer(optimizer)
        if engine not in self._placed or not self._may_cut:
            return engine.bind_optimizer(optimizer)
        paged, refused = None, None
        try:
            paged = engine.bind_optimizer(optimizer)
        except BudgetError as error:
            refused = error
        if same_on_all(refused is None) and paged is not None:
            return paged
        self._take_back(engine.model, self._placed[engine])
        self._decide_to_cut(refused)
        return self.attach(engine.model).bind_optimizer(optimizer)

    def take_back(self, keep: Container[Engine] = ()) -> bool:
        """After a refusal: models that were put on pages here are as they were before, unless one has been trained.

        Args:
            keep: those that stay on their pages.

        Returns:
            whether there were any.
        """
        placed = [(engine, before) for engine, before in self._placed.items() if engine not in keep]
        placed = [(engine, before) for engine, before in placed if engine_of(engine.model) is engine]
        if any(engine.training.has_stepped for engine, _ in placed):
            return False
        for engine, before in reversed(placed):
            if engine.needs.evaluates:
                self._evaluated.insert(0, weakref.ref(engine.model))
            self._take_back(engine.model, before)
        return bool(placed)

    def _take_back(self, model: nn.Module, before: Before) -> None:
        engine = engine_of(model)
        if engine is not None:
            self._attached.discard(engine)
            self._placed.pop(engine, None)
            engine.detach(check=False)
        before.restore(model)

    def put_back(self) -> None:
        """Puts models that are only evaluated, and `take_back` has taken off, on pages again."""
        while self._evaluated:
            model = self._evaluated[0]()
            if model is not None:
                self.attach(model, evaluates=True)
            self._evaluated.pop(0)

    def _holds(self, model: nn.Module) -> bool:
        return any(engine.model is model for engine in self._attached)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As `Accelerator.prepare`; an optimizer may come before its model. Of several for one model the last counts.

        Raises:
            ConfigError, UnsupportedError, BudgetError: as `attach` and `prepare_optimizer`.
        """
        placed = list(self._placed)
        kept = (self._models, self._optimizers, self._schedulers, self._dataloaders)
        lengths = [len(objects) for objects in kept]
        try:
            for item in args:
                if isinstance(item, nn.Module):
                    self.attach(item)
            return super().prepare(*args, device_placement=device_placement)
        except BaseException:
            self.take_back(keep=placed)
            for objects, length in zip(kept, lengths, strict=True):
                del objects[length:]
            raise

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Puts a model on pages; autocast and `torch.compile` are applied as accelerate does.

        Args:
            model: the model.
            device_placement: has no effect, since the pages decide where parameters are.
            evaluation_mode: True for a model that will not be trained; it gets less of the budget than one that will.
        """
        placed = list(self._placed)
        engine = self.attach(model, evaluates=evaluation_mode)
        try:
            # In evaluation mode accelerate moves and wraps nothing, which is what a model on pages needs.
            prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        except BaseException:
            self.take_back(keep=placed)
            raise
        if self.num_processes > 1 and not evaluation_mode and not hasattr(prepared, "no_sync"):
            # Scripts for several processes expect what DDP has.
            vars(prepared)["no_sync"] = engine.training.no_sync
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Binds an optimizer to the engine whose model it updates.

        Args:
            optimizer: made over the model's own parameters.
            device_placement: has no effect, since its state is on pages.

        Raises:
            UnsupportedError: its model is not on pages; it cannot run on pages; it was prepared before, and another
                one has taken its place since.
        """
        if not isinstance(optimizer, AcceleratedOptimizer):
            paged = self._bind(optimizer)
            optimizer = PagedAcceleratedOptimizer(paged, device_placement=False, scaler=self.scaler)
        else:
            self._check_bound(optimizer)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def _engine_of_optimizer(self, optimizer: torch.optim.Optimizer) -> Engine:
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        engine = engine_holding(parameters)
        if engine is None:
            raise UnsupportedError(
                f"the optimizer {type(optimizer).__name__} holds {len(parameters)} parameters, and none of them is of "
                "a model on pages. Pass the model to accelerator.prepare() before its optimizer or with it, and make "
                "the optimizer from model.parameters()."
            )
        return engine

    def _check_bound(self, optimizer: AcceleratedOptimizer) -> None:
        inner = optimizer.optimizer
        if not isinstance(inner, PagedOptimizer):
            raise UnsupportedError(
                f"the optimizer {type(inner).__name__} was prepared by an Accelerator without pages. "
                "Pass the optimizer itself to prepare()."
            )
        if self._engine_of_optimizer(inner).optimizer is not inner:
            raise UnsupportedError(
                f"the state of this optimizer ({type(inner.inner).__name__}) was given up, when another one was "
                "prepared for the same model, or some of its parameters were replaced or resized in the model (new "
                "tokens, another head). Make a new optimizer, or a new Trainer."
            )

    # ---- gradients -------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As `Accelerator.backward`; updates may begin in it (`Training.updates_in_backward`)."""
        with ExitStack() as stack:
            for engine in list(self._attached):
                stack.enter_context(engine.training.backward())
            super().backward(loss, **kwargs)
        for engine in list(self._attached):
            if (replicas := engine.training.replicas) is not None and replicas.due:
                engine.training.synchronise()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """As `Accelerator.no_sync`: what backward adds in it stays in this process until a later one."""
        engine = engine_of(model)
        with super().no_sync(model), nullcontext() if engine is None else engine.training.no_sync():
            yield

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """As `Accelerator.clip_grad_norm_`; over all gradients of a model on pages, without bringing them in."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        engine = engine_holding(given)
        if engine is None:
            norm: torch.Tensor | None = super().clip_grad_norm_(given, max_norm, norm_type)
            return norm
        self.unscale_gradients()
        return engine.training.clip_grad_norm_(max_norm, norm_type, parameters=given)

    def free_memory(self, *objects: Any) -> Any:
        """As `Accelerator.free_memory`; also ends work that an exception has interrupted."""
        for engine in list(self._attached):
            if engine_of(engine.model) is engine:
                engine.abort()
        return super().free_memory(*objects)


def _refuse_plugins(given: Mapping[str, Any]) -> None:
    for argument, name in _PLUGINS.items():
        if given.get(argument) is not None:
            _refuse_plugin(name, f"the argument {argument}")
    for switch, name in _SWITCHES.items():
        if os.environ.get(switch, "false").lower() in ("true", "1", "yes"):
            _refuse_plugin(name, f"the environment variable {switch}={os.environ[switch]}")


def _refuse_plugin(name: str, where: str) -> None:
    raise UnsupportedError(
        f"{name} is switched on (by {where}) and so is ptm_accel: both want to place the same parameters. "
        f"Leave {name} out, or train without ptm_accel."
    )
