"""One of two processes: what the stock Trainer and accelerate save, and ours with `shard: full`, byte for byte.

Started by torchrun with one argument: a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from ptm_accel.integrations.accelerate import PTMAccelerator
from ptm_accel.integrations.transformers import Trainer
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, TrainingArguments

import ptm_accel

sys.path.insert(0, str(Path(__file__).parents[2]))
from ptm_accel.checkpoint.manifest import check_manifest
from ptm_accel.engine import engine_of
from ptm_accel.errors import UnsupportedError
from tests.integrations.sharded_child import Texts, model
from tests.integrations.test_saving import LocalHub

_ANEW = ("training_args.bin", "trainer_state.json", "README.md", "adapter_config.json", "scheduler.pt")
"""These name folders and dates, or have sets in them."""


def options(folder: Path) -> dict[str, Any]:
    return {"shard": "full", "host_memory": "10MB", "disk": str(folder), "page_size": "16KiB"}


def weights_in(folder: Path) -> dict[str, bytes]:
    """Weights, their index, configurations."""
    names = ("*.safetensors", "*.json", "*.bin")
    found = {path.name: path.read_bytes() for name in names for path in folder.glob(name)}
    ours = ("optimizer", "ptm_manifest")
    return {name: content for name, content in found.items() if name not in _ANEW and not name.startswith(ours)}


def same_files(ours: Path, theirs: Path) -> None:
    """The first process compares what is in two folders."""
    dist.barrier()
    if dist.get_rank() == 0:
        there, here = weights_in(theirs), weights_in(ours)
        assert here.keys() == there.keys(), (here.keys(), there.keys())
        assert any(name.endswith(".safetensors") for name in here)
        for name, content in there.items():
            assert here[name] == content, f"{ours / name} differs"
    dist.barrier()


def lora() -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(
        target_modules=["q_proj", "up_proj"], r=8, init_lora_weights=False, modules_to_save=["embed_tokens"]
    )
    return get_peft_model(model(), config)


def prompts() -> nn.Module:
    # Enough of them to be cut.
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=32)
    torch.manual_seed(0)
    return get_peft_model(model(), config)


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    common = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    return MixtralForCausalLM(MixtralConfig(**common, num_hidden_layers=2, vocab_size=131, num_local_experts=4))


class Wrapping(nn.Module):
    """A model that is none of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


class OwnSaving(LlamaForCausalLM):
    """A model that adds something of its own to `save_pretrained`."""

    def save_pretrained(self, folder: Any, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(folder, *args, **kwargs)
        total = sum(float(value.numpy().sum()) for value in self.state_dict().values())
        Path(folder, "sum.json").write_text(f"{total}")


def own_saving() -> nn.Module:
    torch.manual_seed(0)
    return OwnSaving(model().config)


def trained(build: Callable[[], nn.Module], folder: Path, own: dict[str, Any] | None) -> Any:
    args = TrainingArguments(
        output_dir=str(folder),
        hub_model_id=f"somebody/{folder.name}",
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=2,
        max_grad_norm=0.0,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )
    kind, given = (transformers.Trainer, {}) if own is None else (Trainer, {"ptm_config": own})
    trainer = kind(model=build(), args=args, train_dataset=Texts(), **given)
    trainer.train()
    return trainer


def trainers_save_the_same(folder: Path) -> None:
    """Checkpoints, `save_model` and what is uploaded."""
    with pytest.MonkeyPatch.context() as patch:
        hub = LocalHub(folder / "hub", patch)
        for build in (model, lora, prompts, mixtral, Wrapping, own_saving):
            folders = [folder / build.__name__ / way for way in ("plain", "ours")]
            plain = trained(build, folders[0], None)
            ours = trained(build, folders[1], options(folder))
            engine = engine_of(ours.model)
            assert engine is not None
            assert engine.training.shards is not None
            before = engine.training.shards.stats.gathers
            for trainer, each in zip((plain, ours), folders, strict=True):
                trainer.save_model(str(each / "final"))
                trainer.args.push_to_hub = False
                if build is model:
                    trainer.push_to_hub()
            gathered = engine.training.shards.stats.gathers - before
            assert (gathered > 0) == (build is own_saving), f"{gathered} gathers"
            for part in ("checkpoint-2", "final"):
                same_files(folders[1] / part, folders[0] / part)
            if dist.get_rank() == 0:
                assert not (folders[1] / "checkpoint-1").exists()
                sums = check_manifest(folders[1] / "checkpoint-2")
                assert sums is not None
                assert "optimizer-00001-of-00001.safetensors" in sums
                if build is model:
                    assert hub.files("somebody/ours") == hub.files("somebody/plain")
                    LlamaForCausalLM.from_pretrained(folders[1] / "checkpoint-2")
                    stock_trainer_goes_on(folders[1])
            dist.barrier()
            engine.check_integrity()
            engine.detach()


def stock_trainer_goes_on(folder: Path) -> None:
    """The weights of a checkpoint are those that a stock Trainer of one process has after loading it."""
    loaded = transformers.Trainer(
        model=model(), args=TrainingArguments(output_dir=str(folder / "stock"), use_cpu=True, report_to=[])
    )
    loaded._load_from_checkpoint(str(folder / "checkpoint-2"))
    there = LlamaForCausalLM.from_pretrained(folder / "checkpoint-2").state_dict()
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, there[name]), name


def change(values: Iterable[torch.Tensor]) -> None:
    """What somebody does to a model's values between two steps, in every process."""
    with torch.no_grad():
        for value in values:
            value.mul_(0.75)


def accelerators_save_the_same(folder: Path) -> None:
    """`save_state`, `save_model`, and the state dictionary of the main process."""
    ways: dict[str, Any] = {
        "plain": accelerate.Accelerator(cpu=True),
        "ours": PTMAccelerator(cpu=True, ptm_config=options(folder)),
    }
    for build in (model, lora, mixtral):
        for way, accelerator in ways.items():
            base = folder / f"accelerate-{build.__name__}" / way
            network = build()
            optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-2)
            network, optimizer, batches = accelerator.prepare(network, optimizer, DataLoader(Texts(), batch_size=2))
            for _, batch in zip(range(2), batches, strict=False):
                accelerator.backward(network(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            bare = accelerator.unwrap_model(network)
            change(bare.state_dict().values())
            accelerator.save_state(base / "state")
            with ptm_accel.gathered(bare, write=True):
                values = [param.data for param in bare.parameters()]
                for part in ("once", "twice"):
                    # Of which torch counts nothing.
                    change(values)
                    accelerator.save_state(base / part)
            accelerator.save_state(base / "pickled", safe_serialization=False)
            accelerator.save_model(network, base / "model", max_shard_size="300KB")
            hook = accelerator.register_save_state_pre_hook(lambda models, weights, at: weights.reverse())
            accelerator.save_state(base / "hooked")
            hook.remove()
            change(bare.state_dict().values())
            state = accelerator.get_state_dict(network)
            assert bool(state) == (accelerator.is_main_process or way == "plain")
            if build is model:
                bare.save_pretrained(base / "own", is_main_process=accelerator.is_main_process, state_dict=state)
                if way == "ours":
                    with pytest.raises(UnsupportedError, match=r"accelerator\.save_state"):
                        optimizer.state_dict()
            accelerator.free_memory(network, optimizer, batches)
        ours, plain = (folder / f"accelerate-{build.__name__}" / way for way in ("ours", "plain"))
        for part in ("state", "once", "twice", "model", "hooked", *(["own"] if build is model else [])):
            same_files(ours / part, plain / part)
        if dist.get_rank() == 0:
            here, there = (torch.load(each / "pickled" / "pytorch_model.bin") for each in (ours, plain))
            assert all(torch.equal(here[name], value) for name, value in there.items())
            assert here.keys() == there.keys()
        dist.barrier()


def one_alone_is_told(folder: Path) -> None:
    """Whoever saves or loads alone does not wait for the others until torch gives up."""
    accelerator = PTMAccelerator(cpu=True, ptm_config=options(folder))
    network = model()
    network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters()))
    for call, what in ((accelerator.save_state, "saves the state"), (accelerator.load_state, "loads a state")):
        other = partial(accelerator.save_model, network)
        with pytest.raises(UnsupportedError, match=rf"rank 0 {what} ") as raised:
            (call if accelerator.is_main_process else other)(folder / "alone")
        assert "rank 1 saves the model " in str(raised.value)
    accelerator.free_memory(network, optimizer)


def main(folder: Path) -> None:
    trainers_save_the_same(folder)
    accelerators_save_the_same(folder)
    one_alone_is_told(folder)
    assert isinstance(lora(), PeftModel)
    sys.stdout.write("saved alike\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
