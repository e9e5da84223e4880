"""The Trainer's part where layers are cut over processes (`shard: full`): how it would save."""

from __future__ import annotations

from transformers import TrainingArguments

from ptm_accel.config import PTMConfig

from ..accelerate.shards import refuse_own_directories, refuse_saving


def saving_asked(args: TrainingArguments) -> list[str]:
    """Returns the arguments by which the Trainer saves, for messages."""
    asked = {
        "enable_jit_checkpoint": args.enable_jit_checkpoint,
    }
    return [name for name, is_set in asked.items() if is_set]


def refuse_saving_shards(config: PTMConfig, args: TrainingArguments, processes: int) -> None:
    """Refuses to save layers that are cut over processes, before anything is trained.

    Args:
        config: the options.
        args: what the Trainer is to do.
        processes: how many train together.

    Raises:
        UnsupportedError: names the arguments.
    """
    refuse_saving(config, processes, saving_asked(args))


def refuse_own_directories_of_nodes(config: PTMConfig, args: TrainingArguments, processes: int) -> None:
    """Refuses output directories that not all processes see where layers are cut over them.

    Args:
        config: the options.
        args: what the Trainer is to do.
        processes: how many train together.

    Raises:
        UnsupportedError: names the argument.
    """
    refuse_own_directories(config, processes, asked=args.save_on_each_node)
