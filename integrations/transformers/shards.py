"""The Trainer's part where layers are cut over processes (`shard: full`): what it cannot do with them."""

from __future__ import annotations

from transformers import TrainingArguments


def beside_cut(args: TrainingArguments) -> list[str]:
    """Returns the arguments that ask for what cannot be done where layers are cut, as in messages."""
    # A signal reaches each process between other two steps.
    asked = {"save_on_each_node": args.save_on_each_node, "enable_jit_checkpoint": args.enable_jit_checkpoint}
    return [f"{name}=True" for name, is_set in asked.items() if is_set]
