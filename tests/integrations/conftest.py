"""The tiny model, and the check after each test that what was on pages is all accounted for."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ptm_accel import engine
from tests.integrations.adapters import bases as bases
from tests.integrations.adapters import compare as compare
from tests.integrations.launcher import host as host
from tests.integrations.saved_models import saved as saved


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    sys.modules.setdefault("tiny", _load("tiny"))
    return sys.modules["tiny"]


@pytest.fixture
def fresh_accelerate() -> Iterator[Callable[[], None]]:
    """accelerate keeps its state for the whole process: what forgets it, as is done before the test and at its end."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    forget()
    yield forget
    forget()


@pytest.fixture(autouse=True)
def _accounted() -> Iterator[None]:
    """Conservation laws of every engine that is alive after a test, and then their end."""
    yield
    for known in list(engine._engines.values()):
        alive = known()
        if alive is not None:
            alive.check_integrity()
    gc.collect()
