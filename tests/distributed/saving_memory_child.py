"""One of several processes that save a model which lies on a disk: what memory that takes.

Started by torchrun with a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ptm_accel.integrations.accelerate.sharded_saving import save_cut
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
from ptm_accel.checkpoint.training_state import save_optimizer_state
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from tests.anonymous_memory import Peak

_SLACK_BYTES = 4 << 20
"""Of the interpreter: lists of what is written, threads."""


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=2048))
    engine = Engine.attach(model, PTMConfig(shard="full", host_memory="110MiB", disk=str(folder)))
    engine.training.replicate()
    optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    for step in range(2):
        ids = torch.randint(0, 2048, (1, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.settle()
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    ranks = engine.training.shards.ranks
    for is_known, limit in ((True, 2), (False, 4)):
        # The second time what is imported and made for good is there.
        for _ in range(2):
            with Peak() as peak:
                save_cut(engine, lambda state: model.save_pretrained(saved, state_dict=state), saved, is_known=is_known)
                save_optimizer_state(optimizer, saved, {}, ranks)
        group_bytes = max(slot.group.numel for slot in engine.slots if slot.sharded) * 4
        total = sum(slot.value.nbytes for slot in engine.slots)
        assert peak.grown < limit * group_bytes + _SLACK_BYTES, f"{peak.grown} bytes, of groups of {group_bytes}"
        assert total > 10 * (limit * group_bytes + _SLACK_BYTES) or not is_known, "the bound says little"
    sys.stdout.write("in little memory\n")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
