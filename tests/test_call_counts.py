"""How many Python functions of ours a training step calls, for each parameter, through the Trainer.

What these calls cost is what a step on pages costs beside its arithmetic and its transfers. Counted by `sys.setprofile`
in the training thread; of some steps, the one with the fewest counts, since planning anew is no part of a step.

Figures when the bounds were set: where all fits 30 calls a step, of any number of parameters, the same in each step
and run (29 from Python 3.12 on, where a comprehension is no call); where hooks stay on, as with masters, 194 for each
parameter and step; where it streams, with decoder layers as groups, 360 to 390, since how often transfers are asked for
depends on the machine (46 of them are of pages of 4 KiB, which nobody has). With each parameter alone they were 333 and
1000 to 1033, before away parameters and one I/O engine 370.4 and 1638 to 1722. A bound is 5% above its figure; lower
that when calls are saved. In all threads there are 615 to 676 calls where it streams, 44% of them in the threads of
the disk; the step with the fewest files enters 68 of them, and each step 56 where hooks stay on.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
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
EVERYWHERE = {"hooks": 199.0, "streams": 696.0}
"""Calls in all threads, 3% above their figures."""
FILES = {"hooks": 56, "streams": 68}
"""Files in which functions are called in a step."""
PLAIN_STEP = 30


class Counts(TrainerCallback):
    """Counts the calls of each of some steps; in a step that plans anew there are more.

    Attributes:
        steps: of each step, the calls in the training thread by function.
        everywhere: the same in all threads that have begun since this was made.
    """

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []
        self.everywhere: list[Counter[str]] = []
        self._calls: Counter[Any] = Counter()
        self._elsewhere: Counter[Any] = Counter()
        self._counting = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= FIRST - 1:
            self._calls, self._elsewhere = Counter(), Counter()
            self._counting = True
            sys.setprofile(self._note)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(None)
        self._counting = False
        if state.global_step >= FIRST:
            self.steps.append(self._ours(self._calls))
            self.everywhere.append(self.steps[-1] + self._ours(self._elsewhere))

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._calls[frame.f_code] += 1

    def note_elsewhere(self, frame: FrameType, event: str, argument: Any) -> None:
        """For `threading.setprofile`."""
        if event == "call" and self._counting:
            self._elsewhere[frame.f_code] += 1

    def _ours(self, calls: Counter[Any]) -> Counter[str]:
        """Calls by function, of those that are defined in the package; its adapters count as well."""
        return Counter(
            {
                f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno} {code.co_qualname}": count
                for code, count in list(calls.items())
                # Called by torch for any module that is set anywhere, which tests before this one may cause.
                if code.co_qualname != "_CompileWatch._registered"
                and str(Path(code.co_filename).resolve()).startswith(ROOTS)
            }
        )


def model(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": layers, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


@pytest.fixture
def counts() -> Iterator[Counts]:
    """Nothing is counted behind the test, whatever becomes of it."""
    made = Counts()
    threading.setprofile(made.note_elsewhere)
    yield made
    threading.setprofile(None)  # type: ignore[arg-type]
    sys.setprofile(None)


@pytest.mark.parametrize("budget", ["fits", "hooks", "streams"])
def test_calls_of_a_step(budget: str, counts: Counts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    if budget == "hooks":
        monkeypatch.setattr(PagedOptimizer, "can_be_plain", lambda optimizer: False)
    trainer = adapter.Trainer(
        model=model(16 if budget == "streams" else 4),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row}] * LAST,
        callbacks=[counts],
        ptm_config=options,
    )
    trainer.train()
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
    everywhere = min(counts.everywhere, key=Counter.total).total() / params
    files = min(len({name.partition(":")[0] for name in step}) for step in counts.everywhere)
    assert each <= everywhere <= EVERYWHERE[budget], f"{budget}: {everywhere:.1f} calls per parameter in all threads"
    assert 1 < files <= FILES[budget], f"{budget}: calls of a step are in {files} files"
