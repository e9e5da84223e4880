"""How many Python functions of ours a training step calls, for each parameter, through the Trainer.

What these calls cost is what a step on pages costs beside its arithmetic and its transfers. Counted by `sys.setprofile`
in the training thread; of some steps, the one with the fewest counts, since planning anew is no part of a step.

Figures when the bounds were set: where all fits 30 calls a step, of any number of parameters, the same in each step
and run (29 from Python 3.12 on, where a comprehension is no call); where hooks stay on, as with masters, 194 for each
parameter and step; where it streams, with decoder layers as groups, 360 to 390, since how often transfers are asked for
depends on the machine (46 of them are of pages of 4 KiB, which nobody has). With each parameter alone they were 333 and
1000 to 1033, before away parameters and one I/O engine 370.4 and 1638 to 1722. A bound is 5% above its figure; lower
that when calls are saved.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations import transformers as adapter
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

import ptm_accel
from ptm_accel.engine import engine_of
from ptm_accel.optim.optimizer import PagedOptimizer
from tests.tiers import members

FIRST, LAST = 8, 14
ROOTS = tuple(str(Path(module.__file__ or "").parent.resolve()) for module in (ptm_accel, adapter))
FIGURES = {"hooks": 197.0, "streams": 365.0}
PLAIN_STEP = 30


class Counts(TrainerCallback):
    """Counts the calls of each of some steps; in a step that plans anew there are more."""

    def __init__(self) -> None:
        self.calls: Counter[Any] = Counter()
        self.steps: list[Counter[str]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= FIRST - 1:
            self.calls.clear()
            sys.setprofile(self._note)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(None)
        if state.global_step >= FIRST:
            self.steps.append(self.ours())

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.calls[frame.f_code] += 1

    def ours(self) -> Counter[str]:
        """Calls by function, of those that are defined in the package; its adapters count as well."""
        return Counter(
            {
                f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_qualname}": count
                for code, count in self.calls.items()
                # Called by torch for any module that is set anywhere, which tests before this one may cause.
                if code.co_qualname != "_CompileWatch._registered"
                and str(Path(code.co_filename).resolve()).startswith(ROOTS)
            }
        )


def model(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": layers, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


@pytest.mark.parametrize("budget", ["fits", "hooks", "streams"])
def test_calls_of_a_step(budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.arange(16)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=1,
        max_steps=LAST,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    options: dict[str, Any] = {"host_memory": "64MiB"}
    if budget == "streams":
        options = {"host_memory": 5 << 20, "page_size": 4096, "disk": str(tmp_path)}
    counts = Counts()
    if budget == "hooks":
        monkeypatch.setattr(PagedOptimizer, "can_be_plain", lambda optimizer: False)
    trainer = adapter.Trainer(
        model=model(16 if budget == "streams" else 4),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row}] * LAST,
        callbacks=[counts],
        ptm_config=options,
    )
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
    engine = engine_of(trainer.model)
    assert engine is not None
    assert (engine.pool.stats.evictions > 0) == (budget == "streams")
    assert members(engine) == 9
    params = len(list(trainer.model.parameters()))
    calls = min(counts.steps, key=Counter.total)
    each = calls.total() / params
    table = "\n".join(f"{count / params:8.2f}  {name}" for name, count in calls.most_common(10))
    table += f"\neach step: {[round(step.total() / params, 1) for step in counts.steps]}"
    if budget == "fits":
        assert 0 < calls.total() <= PLAIN_STEP, f"{calls.total()} calls a step\n{table}"
        return
    assert 0 < each <= FIGURES[budget] * 1.05, f"{budget}: {each:.1f} calls per parameter and step\n{table}"
