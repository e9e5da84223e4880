"""Contenders of `peers.py` that use the Trainer: what they share, and the plain one and ptm_accel themselves."""

from __future__ import annotations

import os
import sys
from typing import Any

import peer_common
import torch
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class TrainerWatch(peer_common.Watch, TrainerCallback):
    """A watch that the Trainer calls."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.mark()

    def on_log(self, *args: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self.bounds.append(logs.get("ptm_bound_s"))


def arguments(spec: peer_common.Spec, **more: Any) -> TrainingArguments:
    """The Trainer's arguments, the same for every contender that uses it, but for `more`."""
    settings: dict[str, Any] = {
        "output_dir": f"{spec.directory}/run",
        "max_steps": spec.steps,
        "per_device_train_batch_size": spec.batch,
        "learning_rate": peer_common.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": spec.clip,
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch_fused",
        "save_strategy": "no",
        "use_cpu": True,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    if spec.checkpointing:
        settings["gradient_checkpointing"] = True
    return TrainingArguments(**{**settings, **more})


def train(
    spec: peer_common.Spec, model: Any, args: TrainingArguments, trainer_class: Any = Trainer, **more: Any
) -> TrainerWatch:
    """Trains with a Trainer."""
    watch = TrainerWatch()
    trainer_class(model=model, args=args, train_dataset=peer_common.Tokens(spec), callbacks=[watch], **more).train()
    return watch


def alone() -> None:
    """The environment of the only process of a distributed run."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ[name] = value
    os.environ["MASTER_PORT"] = str(20000 + os.getpid() % 20000)


def ours(spec: peer_common.Spec) -> None:
    """Trains with ptm_accel; `spec.extra["masters"]` says whether in bf16 with fp32 masters, or fp32."""
    from ptm_accel.integrations.transformers import Trainer as PagedTrainer

    import ptm_accel

    masters = spec.extra["masters"]
    options: dict[str, Any] = {"host_memory": spec.host_memory, "disk": spec.directory}
    if masters:
        options["master_weights"] = "fp32"
    peer_common.same_initial_weights()
    dtype = torch.bfloat16 if masters else torch.float32
    model = ptm_accel.from_config(LlamaForCausalLM, spec.config(), options, dtype=dtype)
    watch = train(spec, model, arguments(spec, bf16=not (masters or spec.fp32)), PagedTrainer, ptm_config=options)
    engine = ptm_accel.engine_of(model)
    assert engine is not None
    peaks = {tier.value: count for tier, count in engine.metrics.peaks().items()}
    watch.report(peaks=peaks, summary=engine.metrics.summary())


def main() -> None:
    """Trains and reports."""
    spec = peer_common.Spec.parse(sys.argv[1])
    if spec.kind == "plain":
        model = peer_common.plain_model(spec, torch.float32)
        train(spec, model, arguments(spec, bf16=not spec.fp32)).report()
    else:
        ours(spec)


if __name__ == "__main__":
    main()
