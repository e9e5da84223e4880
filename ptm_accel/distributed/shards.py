"""A model whose blocks are sharded over ranks (ZeRO): every rank owns a range of each parameter and of its state."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ptm_accel.config import FULL, PTMConfig
from ptm_accel.distributed.ranks import Ranks, ShardStats
from ptm_accel.distributed.reducing import Reductions
from ptm_accel.distributed.wholes import Wholes
from ptm_accel.errors import UnsupportedError
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.gradients import Gradients
from ptm_accel.model.grouping import Sharding
from ptm_accel.model.norms import is_narrow
from ptm_accel.model.slots import ParamSlot
from ptm_accel.runtime.executor import Executor

_KEEPS_TOGETHER = "_is_fsdp_managed_module"
"""Attribute by which transformers knows modules whose forwards have to be called on all ranks or on none."""


def sharding_of(config: PTMConfig) -> Sharding | None:
    """Returns the ranks that a model is sharded over by the options; None where it is not.

    Raises:
        UnsupportedError: there are several processes that do not know of one another yet.
    """
    if config.shard != FULL:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UnsupportedError(
                f"shard: full, and this is one of {os.environ['WORLD_SIZE']} processes that are not connected yet. "
                "Make TrainingArguments or an Accelerator before the model is read or put on pages, or call "
                "torch.distributed.init_process_group()."
            )
        return None
    count = dist.get_world_size()
    return Sharding(dist.get_rank(), count) if count > 1 else None


def same_on_all(flag: bool) -> bool:
    """Returns whether a flag is true on all ranks; before there are `Ranks`."""
    every: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(every, flag)
    return all(every)


class Shards:
    """What is sharded of one model, and the ranks that it is sharded over.

    Args:
        executor: serves accesses.
        sharding: which rank this is.

    Attributes:
        ranks: who the others are.
        wholes: gathers blocks before they are used.
        sharding: see above.
    """

    def __init__(self, executor: Executor, sharding: Sharding) -> None:
        self.ranks = Ranks(executor.pool.compute.device, executor.pool.stats)
        self.wholes = Wholes(executor, self.ranks)
        self.sharding = sharding
        self._executor = executor
        self._reductions: Reductions | None = None
        executor.gathers = self.wholes

    @property
    def stats(self) -> ShardStats:
        """Counts of what has been gathered and reduced."""
        return self.ranks.stats

    def check(self, model: nn.Module, options: Mapping[str, object]) -> None:
        """Refuses ranks that have different models, or different options that all must have alike.

        Args:
            model: the model.
            options: those, by name.

        Raises:
            UnsupportedError: names the first difference.
        """
        own: list[tuple[object, ...]] = [
            (name, tuple(param.shape), str(param.dtype), param.requires_grad)
            for name, param in model.named_parameters(remove_duplicate=False)
        ]
        own += [(name, tuple(buffer.shape), str(buffer.dtype)) for name, buffer in model.named_buffers()]
        own += options.items()
        every = self.ranks.all_of(own)
        for rank, other in enumerate(every):
            for mine, theirs in zip(every[0], other, strict=False):
                if mine != theirs:
                    raise UnsupportedError(
                        f"rank 0 has {mine} where rank {rank} has {theirs}: with shard: full all ranks need the same "
                        f"model, {' and '.join(options)}. Give each process the same."
                    )
            if len(other) != len(every[0]):
                raise UnsupportedError(
                    f"rank 0 has {len(every[0])} parameters and buffers, rank {rank} has {len(other)}: with shard: "
                    "full all ranks need the same model. Build the same one in each process."
                )

    def mark(self, model: nn.Module, *, ends: bool = False) -> None:
        """Has transformers keep ranks together: they generate until the longest text ends, and skip no layers.

        Args:
            model: the model.
            ends: it is not sharded any more.
        """
        for module in model.modules():
            if ends:
                vars(module).pop(_KEEPS_TOGETHER, None)
            else:
                vars(module)[_KEEPS_TOGETHER] = True

    def reduce(self, gradients: Gradients) -> None:
        """Has gradients reduced from now on."""
        known = weakref.ref(gradients)

        def trained() -> list[GradSlot]:
            return [] if (there := known()) is None else there.slots()

        self._reductions = gradients.sharing = Reductions(
            self._executor, self.ranks, trained, lambda: self.wholes.order.seen, self.wholes.most
        )
        self._executor.pool.calls.backwards[self] = weakref.WeakMethod(self._reductions.begin)

    def before_step(self) -> None:
        """What ranks own is about to change: nobody may use whole blocks as they are now.

        Raises:
            UnsupportedError: somebody uses one.
        """
        self.wholes.drop_all()
        if self.wholes.pinned:
            raise UnsupportedError(
                f"a step was made while {self.wholes.pinned[0].name} is in use, as in `with ptm_accel.gathered()`. "
                "Step after that block."
            )

    def norms(
        self, norms: Sequence[torch.Tensor], slots: Sequence[ParamSlot | None], norm_type: float, *, wide: bool
    ) -> list[torch.Tensor]:
        """Returns the norms of whole gradients.

        Args:
            norms: of what this rank owns of each; those of parameters that are not sharded stay.
            slots: the parameter of each.
            norm_type: the p of the p-norm.
            wide: whether norms of narrow gradients are fp32.

        Raises:
            UnsupportedError: they cannot be put together.
        """
        at = [number for number, slot in enumerate(slots) if slot is not None and slot.sharded]
        if not at:
            return list(norms)
        if norm_type <= 0:
            raise UnsupportedError(
                f"the {norm_type:g}-norm of gradients that are sharded over ranks was asked for. Use a positive "
                "norm_type, such as 2 or inf."
            )
        own = torch.stack([norms[number].double() for number in at])
        if norm_type == float("inf"):
            self.ranks.most(own)
        else:
            own = own.pow(norm_type)
            self.ranks.sum(own)
            own = own.pow(1.0 / norm_type)
        found = list(norms)
        for number, norm in zip(at, own, strict=True):
            slot = slots[number]
            assert slot is not None
            narrow = is_narrow(slot.value.dtype) and not wide
            found[number] = norm.to(slot.value.dtype if narrow else norms[number].dtype)
        return found
