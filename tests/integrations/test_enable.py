"""`ptm_accel.enable()`: unchanged scripts with a stock Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from ptm_accel.integrations.transformers import PTMCallback, PTMTrainerMixin

import ptm_accel
from ptm_accel.engine import engine_of
from ptm_accel.errors import ConfigError


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    ptm_accel.disable()


class Mine(transformers.Trainer):
    """A user's own, whose constructor has other arguments."""

    def __init__(self, model: Any, folder: Path, tiny: ModuleType) -> None:
        super().__init__(model=model, args=tiny.arguments(folder, max_steps=3), train_dataset=tiny.data())


def test_every_trainer_built_afterwards_is_on_pages(tiny: ModuleType, tmp_path: Path) -> None:
    plain = Mine(tiny.model(), tmp_path, tiny)
    plain.train()
    assert engine_of(plain.model) is None
    ptm_accel.enable(tiny.budget("tight", tmp_path))
    trainer = Mine(tiny.model(), tmp_path, tiny)
    assert type(trainer).__name__ == "Mine"
    assert isinstance(trainer, Mine)
    assert isinstance(trainer, PTMTrainerMixin)
    assert any(isinstance(callback, PTMCallback) for callback in trainer.callback_handler.callbacks)
    trainer.train()
    engine = engine_of(trainer.model)
    assert engine is not None
    assert engine.pool.stats.evictions > 0
    assert tiny.history(trainer) == tiny.history(plain)
    assert tiny.same(tiny.weights(trainer.model), tiny.weights(plain.model))
    # Built before: stays what it was.
    assert not isinstance(plain, PTMTrainerMixin)


def test_disable_and_the_context(tiny: ModuleType, tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path)
    with ptm_accel.enable({"host_memory": "64MiB"}):
        with ptm_accel.enable({"host_memory": "64MiB"}):
            pass
        inside = transformers.Trainer(model=tiny.model(), args=args)
        assert isinstance(inside, PTMTrainerMixin)
        assert inside.ptm_config.host_memory == "64MiB"
    after = transformers.Trainer(model=tiny.model(), args=args)
    assert type(after) is transformers.Trainer
    ptm_accel.enable()
    ptm_accel.disable()
    ptm_accel.disable()
    assert type(Mine(tiny.model(), tmp_path, tiny)) is Mine


def test_a_trainer_that_is_on_pages_anyway_keeps_its_class(tiny: ModuleType, tmp_path: Path) -> None:
    ptm_accel.enable({"host_memory": "64MiB"})
    trainer = ptm_accel.Trainer(model=tiny.model(), args=tiny.arguments(tmp_path), ptm_config={"host_memory": "32MiB"})
    assert type(trainer) is ptm_accel.Trainer
    assert trainer.ptm_config.host_memory == "32MiB"


def test_enabled_twice_with_other_options(tmp_path: Path) -> None:
    ptm_accel.enable({"host_memory": "64MiB"})
    ptm_accel.enable({"host_memory": "64MiB"})
    with pytest.raises(
        ConfigError, match=r"already enabled with .*64MiB.* cannot be enabled with .*32MiB.*disable\(\)"
    ):
        ptm_accel.enable({"host_memory": "32MiB"})
    with pytest.raises(ConfigError, match="unknown key"):
        ptm_accel.enable({"hots_memory": "32MiB"})
