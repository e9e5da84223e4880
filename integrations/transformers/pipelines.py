"""The Trainer's part of a token pipeline: what it refuses, and one ordinary checkpoint out of all stages."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ptm_accel.checkpoint.manifest import Sums
from ptm_accel.checkpoint.shards import save_file
from ptm_accel.errors import CheckpointError, UnsupportedError
from ptm_accel.pipeline.ranks import Ranks

from ..accelerate.pipelines import PipelineAccelerator
from .loop import comes_with

if TYPE_CHECKING:
    _Host = transformers.Trainer
else:
    _Host = object

_SHARD = "model-{number:05d}-of-{count:05d}.safetensors"
_STAGE = "stage-{number}-of-{count}"
_LARGEST_SHARD = "50GB"
"""As transformers has it."""


class PipelinedLoop(_Host):
    """The part of the Trainer's mixin that is another one where the model is cut into stages."""

    @property
    def _ranks(self) -> Ranks | None:
        accelerator = self.accelerator
        return accelerator.ranks if isinstance(accelerator, PipelineAccelerator) else None

    def get_total_train_batch_size(self, *args: Any, **kwargs: Any) -> int:
        """As in the Trainer; all stages of a pipeline have the same batch."""
        total: int = super().get_total_train_batch_size(*args, **kwargs)
        return total if self._ranks is None else total // self._ranks.stages

    def _noting_sums(self, folder: Path) -> AbstractContextManager[Sums | None]:
        raise NotImplementedError

    def _write_weights(self, directory: Path, ranks: Ranks) -> None:
        """Writes the weights of all stages: files of safetensors with one index, as transformers has them."""
        assert self.model is not None
        state = self.model.state_dict()
        split = split_torch_state_dict_into_shards(state, max_shard_size=_LARGEST_SHARD)
        shards = list(split.filename_to_tensors.values())
        total = sum(tensor.nbytes for tensor in state.values())
        told: list[Any] = [None] * ranks.stages
        dist.all_gather_object(told, (shards, total), group=ranks.told)
        names = [names for shards, _ in told for names in shards]
        before = sum(len(shards) for shards, _ in told[: ranks.stage])
        if ranks.replica == 0:
            for number, tensors in enumerate(shards, start=before + 1):
                file = _SHARD.format(number=number, count=len(names))
                ready = {name: state[name].detach().cpu().contiguous() for name in tensors}
                with self._noting_sums(directory) as sums:
                    save_file(ready, directory / file, {"format": "pt"}, sums)
        if self.args.should_save:
            places = {
                name: _SHARD.format(number=number, count=len(names))
                for number, tensors in enumerate(names, start=1)
                for name in tensors
            }
            index = {"metadata": {"total_size": sum(total for _, total in told)}, "weight_map": places}
            (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
        self.accelerator.wait_for_everyone()

    def _state_folder(self, directory: Path) -> Path:
        """Where a checkpoint has the optimizer state of this process."""
        ranks = self._ranks
        return directory if ranks is None else directory / _STAGE.format(number=ranks.stage, count=ranks.stages)

    def _check_stages(self, directory: Path) -> None:
        """Looks whether a checkpoint is one of as many stages.

        Raises:
            CheckpointError: it is of another number, or of a whole model.
        """
        folder = self._state_folder(directory)
        if not any(directory.glob("stage-*")) and not any(directory.glob("optimizer*")):
            # Weights alone, as the Trainer will say.
            return
        saved = next((path.name for path in directory.glob(_STAGE.format(number=0, count="*"))), None)
        if folder.is_dir() if self._ranks is not None else saved is None:
            return
        count = "a training without pipeline" if saved is None else f"a pipeline of {saved.rsplit('-', 1)[1]} stages"
        wanted = "leave pipeline out" if saved is None else f"set pipeline.stages to {saved.rsplit('-', 1)[1]}"
        raise CheckpointError(
            f"{directory} was saved by {count}, whose optimizer state is in other parts; {wanted} to go on with it, "
            "or start from its weights (from_pretrained)."
        )


def gathered(sums: Sums, ranks: Ranks) -> Sums:
    """What the files of all stages are to be compared by."""
    told: list[Any] = [None] * ranks.stages
    dist.all_gather_object(told, sums, group=ranks.told)
    return {name: each for part in told for name, each in part.items()}


def refuse_with_pipeline(trainer: transformers.Trainer) -> None:
    """Refuses what a Trainer is to do besides, and a model in stages cannot.

    Raises:
        UnsupportedError: names it.
    """
    args = trainer.args
    found = {
        "label_smoothing_factor": args.label_smoothing_factor != 0,
        "compute_loss_func": trainer.compute_loss_func is not None,
        "compute_metrics (it reads logits)": trainer.compute_metrics is not None,
        "torch_compile": args.torch_compile,
        "model_init": trainer.model_init is not None,
        "auto_find_batch_size": args.auto_find_batch_size,
        "NEFTune (neftune_noise_alpha)": args.neftune_noise_alpha is not None,
        "a PEFT model": hasattr(trainer.model, "peft_config"),
        "a Trainer with a prediction_step of its own": not comes_with(trainer, "prediction_step"),
    }
    asked = [name for name, is_set in found.items() if is_set]
    if asked:
        raise UnsupportedError(
            f"a model in a pipeline computes the loss of its own forward alone, stage by stage; leave out "
            f"{', '.join(asked)}, or pipeline."
        )
