"""The small equality matrix on a real card, and what may not happen there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ptm_accel.integrations.transformers import Trainer as PagedTrainer
from transformers import Trainer, TrainingArguments

from ptm_accel.engine import engine_of
from tests.zoo import ENTRIES, Entry

pytestmark = pytest.mark.gpu

STEPS = 3


class Batches(torch.utils.data.Dataset[dict[str, Any]]):
    """The zoo's batches, one a step."""

    def __init__(self, entry: Entry) -> None:
        self.batches = [entry.batch_at(step) for step in range(STEPS)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.batches[index])


def train(name: str, directory: Path, ptm_config: dict[str, Any] | None, **arguments: Any) -> tuple[list[Any], Any]:
    entry = ENTRIES[name]
    model = entry.build(0)
    options = TrainingArguments(
        output_dir=str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    common: dict[str, Any] = {
        "model": model,
        "args": options,
        "train_dataset": Batches(entry),
        "data_collator": lambda rows: rows[0],
    }
    trainer = Trainer(**common) if ptm_config is None else PagedTrainer(**common, ptm_config=ptm_config)
    trainer.train()
    log = [(e["loss"], e.get("grad_norm")) for e in trainer.state.log_history if "loss" in e]
    weights = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
    engine = engine_of(model)
    if engine is not None:
        engine.check_integrity()
        # Until one step has been seen, pages get the least they can work with.
        assert engine.pool.stats.evictions > 0
    return log, weights


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert", "mixtral"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_card_with_little_memory_gives_the_same_numbers(
    name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {} if precision == "fp32" else {precision: True}
    plain_log, plain_weights = train(name, tmp_path / "plain", None, **arguments)
    again_log, _ = train(name, tmp_path / "again", None, **arguments)
    assert plain_log == again_log, "the plain run does not repeat itself"

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the whole device was synchronised")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    config = {"host_memory": "2GiB", "page_size": "4KiB"}
    log, weights = train(name, tmp_path / "paged", config, **arguments)
    assert log == plain_log
    assert all(torch.equal(weights[key], plain_weights[key]) for key in plain_weights)
