"""What an `Accelerator` does otherwise where models are cut into pipelines: each pipeline counts as one process."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]

from ptm_accel.config import PipelineConfig, PTMConfig
from ptm_accel.errors import UnsupportedError
from ptm_accel.pipeline.ranks import Ranks

from .states import PagedStates


class PipelineRanks(PagedStates):
    """The processes of an `Accelerator` in pipelines: all stages of one are given the same batches.

    Attributes:
        ranks: of the processes; None without pipelines.
    """

    ranks: Ranks | None = None

    def _find_ranks(self, config: PTMConfig) -> None:
        """Finds the place of this process.

        Raises:
            ConfigError: there are not as many processes as stages x replicas.
            UnsupportedError: fp16, whose loss scale would have to be agreed on.
        """
        if config.pipeline is None:
            return
        if self.scaler is not None:
            raise UnsupportedError(
                "a pipeline trains in fp32 or bf16: with fp16 each stage would skip other steps. Set bf16=True in the "
                "place of fp16=True."
            )
        stages = PipelineConfig.load(config.pipeline).stages
        assert isinstance(stages, int)
        self.ranks = Ranks(stages, self.device)
        # Otherwise one process would read for all, and send each another part.
        self.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        """How many get batches of their own."""
        return self.state.num_processes if self.ranks is None else self.ranks.replicas

    @property
    def process_index(self) -> int:
        """Which of these this is."""
        return self.state.process_index if self.ranks is None else self.ranks.replica

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As without pipelines, which are saved by the Trainer alone.

        Raises:
            UnsupportedError: models are cut into stages.
        """
        self._refuse_in_pipelines("save_state")
        return super().save_state(output_dir, *args, **kwargs)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """As without pipelines, which are saved by the Trainer alone.

        Raises:
            UnsupportedError: models are cut into stages.
        """
        self._refuse_in_pipelines("load_state")
        super().load_state(input_dir, *args, **kwargs)

    def get_state_dict(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As without pipelines, which are saved by the Trainer alone.

        Raises:
            UnsupportedError: models are cut into stages.
        """
        self._refuse_in_pipelines("get_state_dict")
        return super().get_state_dict(model, *args, **kwargs)

    def _refuse_in_pipelines(self, name: str) -> None:
        if self.ranks is not None:
            raise UnsupportedError(
                f"accelerator.{name}: each process has one of {self.ranks.stages} stages, and none has all; train "
                "with the Trainer, which saves a pipeline as one model."
            )

    def gather(self, tensor: Any) -> Any:
        """As `Accelerator.gather`; what all stages of a pipeline have alike comes once."""
        found, ranks = super().gather(tensor), self.ranks
        if ranks is None:
            return found

        def one_of_each(gathered: torch.Tensor) -> torch.Tensor:
            return torch.cat(gathered.chunk(ranks.stages * ranks.replicas)[:: ranks.stages])

        return recursively_apply(one_of_each, found)
