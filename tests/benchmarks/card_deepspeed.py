"""The `deepspeed` kind of `card.py`: the Trainer with ZeRO-3, parameters and optimizer offloaded to pinned host memory.

DeepSpeed is no dependency of this project; `card.py` imports this only where it is asked for. DeepSpeed compiles its
AdamW for the CPU when it is first used, which takes a minute, unless it was installed with it.
"""

from __future__ import annotations

import copy
import gc
import os
from typing import Any

import torch

os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
# The only process needs no network, and there may be none.
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

import deepspeed
from peer_trainer import alone

LEARNING_RATE = 1e-4


def settings(*, masters: bool) -> dict[str, Any]:
    """DeepSpeed's configuration for one card whose parameters, gradients and optimizer are in host memory.

    Args:
        masters: fp32 masters, gradients and moments, as DeepSpeed has them by default (16 bytes a parameter and more);
            else all of them in bf16, as they are for the others that `card.py` runs.
    """
    # Each in bf16 by a switch of its own; moments in bf16 need DeepSpeed's AdamW and offloading to be accepted.
    narrow = {} if masters else {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    adamw = {"lr": LEARNING_RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    return {
        "bf16": {"enabled": True, **narrow},
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            # Parameters are fetched, and gradients leave, on streams of their own.
            "overlap_comm": True,
            "contiguous_gradients": True,
            # In elements. A bucket is about a layer of 8B: gradients leave, and parameters are fetched, while another
            # layer is computed, and 16 GB have room for it. DeepSpeed's 5e7 for fetching is less than one MLP matrix.
            "reduce_bucket_size": 2e8,
            "stage3_prefetch_bucket_size": 2e8,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_param_persistence_threshold": 1e5,
            # What AdamW updates at once. Not more: torch rounds pinned blocks up to a power of two, and the gradients
            # of such a group, one of 8B's matrices beyond 1e9, are just below one, in bf16 and in fp32.
            "sub_group_size": 1e9,
        },
    }


def arguments(*, masters: bool) -> dict[str, Any]:
    """What `TrainingArguments` need beside the others' arguments."""
    return {"deepspeed": settings(masters=masters), "bf16": True}


def partition(model: Any, *, masters: bool) -> None:
    """Moves a model that was built as the plain one, with the same values, to where ZeRO-3 keeps it.

    Args:
        model: on the device, all of it, so that nothing is initialized by the CPU.
        masters: as for `settings`.
    """
    alone()
    unpinned = copy.deepcopy(settings(masters=masters))
    # From here DeepSpeed copies them to one pinned buffer; what is pinned here, torch would keep for nothing.
    unpinned["zero_optimization"]["offload_param"]["pin_memory"] = False
    deepspeed.zero.Init(module=model, config_dict_or_path=unpinned)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
