"""What an installation without extras lacks is not missed: everything imports and trains without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import importlib, pkgutil, sys

ABSENT = ("datasets", "peft", "trl")


class Without:
    "A finder that finds what another one finds, but for what is absent."

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
for name in ABSENT:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} is not absent")

import ptm_accel
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

for module in pkgutil.walk_packages(ptm_accel.__path__, "ptm_accel."):
    importlib.import_module(module.name)

rows = [{"input_ids": list(range(i, i + 8)), "labels": list(range(i, i + 8))} for i in range(16)]
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
)
options = {"host_memory": "512KiB", "disk": ".", "page_size": "16KiB"}
args = TrainingArguments(
    "run", max_steps=2, save_steps=1, logging_steps=1, report_to="none", use_cpu=True
)
trainer = ptm_accel.Trainer(model=model, args=args, train_dataset=rows, ptm_config=options)
result = trainer.train()
assert result.global_step == 2
assert trainer.state.log_history[1]["ptm_disk_written_gib"] > 0, trainer.state.log_history
trainer.train(resume_from_checkpoint="run/checkpoint-1")
trainer.save_model("saved")
assert not sys.modules.keys() & {*ABSENT}
"""


@pytest.mark.process
def test_trained_without_datasets_and_peft(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved" / "model.safetensors").is_file()
