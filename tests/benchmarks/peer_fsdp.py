"""A contender of `peers.py`: FSDP2 with CPU offload, in one process, trained by the Trainer.

Asked for FSDP2 on a machine without an accelerator, accelerate takes DistributedDataParallel instead and says nothing.
So the model is sharded here, by torch's own `fully_shard`, layer by layer, as accelerate does it elsewhere: fp32
parameters, gathered and computed with in bf16, or all in fp32.
"""

from __future__ import annotations

import sys

import peer_common
import peer_trainer
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard


def main() -> None:
    """Trains and reports."""
    spec = peer_common.Spec.parse(sys.argv[1])
    args = peer_trainer.arguments(spec, bf16=not spec.fp32)
    model = peer_common.plain_model(spec, torch.float32)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    narrow = None if spec.fp32 else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow)
    for part in (*model.model.layers, model):
        fully_shard(
            part,
            mesh=init_device_mesh("cpu", (1,)),
            reshard_after_forward=True,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy(pin_memory=False),
        )
    watch = peer_trainer.train(spec, model, args)
    assert isinstance(model, FSDPModule)
    watch.report()


if __name__ == "__main__":
    main()
