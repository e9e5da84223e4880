"""A contender of `peers.py`: weights and state in memory-mapped files, and the paging left to the system.

bf16 weights, fp32 masters and moments, or all in fp32; AdamW in backward as each gradient arrives, page by page, so
that a gradient lives only until then; hence no clipping.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import peer_common
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

PAGE_ELEMENTS = 1 << 20


def mapped(path: Path, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor in a new file."""
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype)


def update(state: tuple[torch.Tensor, ...], weight: torch.Tensor, step: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """What to do with a parameter when its gradient has arrived.

    Args:
        state: its master and moments; the master of one in fp32 is the parameter itself.
        weight: it.
        step: counts.
    """
    flat = weight.view(-1)

    def run(param: torch.Tensor) -> None:
        assert param.grad is not None
        gradient, param.grad = param.grad.reshape(-1), None
        for begin in range(0, flat.numel(), PAGE_ELEMENTS):
            page = slice(begin, begin + PAGE_ELEMENTS)
            master, first, second = (part[page] for part in state)
            torch._fused_adamw_(
                [master],
                [gradient[page].float()],
                [first],
                [second],
                [],
                [step],
                lr=peer_common.LEARNING_RATE,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.0,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
            if master.data_ptr() != flat[page].data_ptr():
                flat[page].copy_(master)

    return run


def build(spec: peer_common.Spec, step: torch.Tensor) -> LlamaForCausalLM:
    """The model, its weights in files, its updates hooked in."""
    config, directory = spec.config(), Path(spec.directory)
    dtype = torch.float32 if spec.fp32 else torch.bfloat16
    peer_common.same_initial_weights()
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    total = sum(param.numel() for param in model.parameters())
    weights = mapped(directory / "weights", total, dtype)
    masters = weights if spec.fp32 else mapped(directory / "masters", total, torch.float32)
    state = [masters, *(mapped(directory / name, total, torch.float32) for name in ("first", "second"))]
    begin = 0
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            end = begin + param.numel()
            own = torch.nn.Parameter(weights[begin:end].view(param.shape))
            setattr(module, name, own)
            own.register_post_accumulate_grad_hook(update(tuple(s[begin:end] for s in state), own.data, step))
            begin = end
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()
    for start in range(0, total, PAGE_ELEMENTS):
        page = slice(start, start + PAGE_ELEMENTS)
        if not spec.fp32:
            masters[page].copy_(weights[page])
    return model


def main() -> None:
    """Trains and reports."""
    spec = peer_common.Spec.parse(sys.argv[1])
    step = torch.zeros(())
    model = build(spec, step).train()
    if spec.checkpointing:
        model.gradient_checkpointing_enable()
    rows, watch = peer_common.Tokens(spec).rows, peer_common.Watch()
    watch.begin()
    for ids in rows.split(spec.batch):
        step += 1
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        watch.losses.append(loss.item())
        watch.mark()
    watch.report()


if __name__ == "__main__":
    main()
