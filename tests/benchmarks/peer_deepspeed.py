"""A contender of `peers.py`: DeepSpeed ZeRO-3 through the Trainer, offloaded to the CPU or to NVMe (ZeRO-Infinity).

Run by the Python of an environment that has DeepSpeed. The sizes are the smallest found to work: the defaults and the
documented counts of buffers take gigabytes more, or fail.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import peer_common
import peer_trainer
from transformers import LlamaForCausalLM


def settings(spec: peer_common.Spec) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    sizes = spec.config()
    largest = sizes.hidden_size * max(sizes.vocab_size, sizes.intermediate_size)
    where: dict[str, Any] = {"device": spec.extra["device"]}
    optimizer, parameters = dict(where), dict(where)
    if spec.extra["device"] == "nvme":
        for offload in (optimizer, parameters):
            offload |= {"nvme_path": spec.directory, "buffer_count": 4}
        optimizer |= {"fast_init": False}
        parameters |= {"buffer_size": max(9_000_000, largest), "max_in_cpu": 0}
    return {
        "bf16": {"enabled": not spec.fp32},
        "gradient_clipping": spec.clip,
        "train_micro_batch_size_per_gpu": spec.batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": peer_common.LEARNING_RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": 3e6,
            "sub_group_size": 1e7,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "offload_optimizer": optimizer,
            "offload_param": parameters,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def main() -> None:
    """Trains and reports."""
    spec = peer_common.Spec.parse(sys.argv[1])
    peer_trainer.alone()
    args = peer_trainer.arguments(spec, deepspeed=settings(spec), bf16=not spec.fp32)
    peer_common.same_initial_weights()
    model = LlamaForCausalLM._from_config(spec.config())
    import deepspeed

    peer_trainer.train(spec, model, args).report(version=f"DeepSpeed {deepspeed.__version__}")


if __name__ == "__main__":
    main()
