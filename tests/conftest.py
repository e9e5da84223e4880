"""What all tests share: the environment, fixed seeds, and the skip of tests that need what this machine lacks."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator

# Before torch is imported: spinning OpenMP threads beside a busy neighbour are tens of times slower, silently.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Of several processes that run tests, each computes with its share of the cores: more threads wait for one another.
if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
# A process that a shell starts in the background ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests make their own models; none may come from a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch

from ptm_accel import sizing
from ptm_accel.model import compiled
from tests.thinning import thin

# What is measured of this machine under a test is not for the user's own cache; child processes share this one, and so
# do xdist's, which find it in their environment.
if "PYTEST_XDIST_WORKER" not in os.environ or "PTM_ACCEL_CACHE" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="ptm_accel-cache-")
    os.environ["PTM_ACCEL_CACHE"] = _CACHE.name


# How long an example takes says nothing on a machine that others use.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


_FAILED = pytest.StashKey[bool]()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Each test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def all_cores() -> Iterator[None]:
    """Computes with a thread a core, whatever runs beside it: where all numbers of a training are compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _nobody_else(request: pytest.FixtureRequest) -> None:
    """Ends what tests before this one have dropped, where threads and descriptors are counted."""
    counts = request.path.parent.name in {"memory", "hardware"}
    if counts and any(thread.name.startswith("ptm-disk-") for thread in threading.enumerate()):
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Closes what a test that failed has left open: it would share its memory with the models of the tests behind."""
    yield
    if item.stash.get(_FAILED, False) and "ptm_accel.engine" in sys.modules:
        for engine in sys.modules["ptm_accel.engine"].living_engines():
            engine.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers that a test failed."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Thins out tests that have many cases, before `-m` looks at their marks; skips those marked `gpu` without CUDA.

    A `process` test that is left to another selection is no more one of those that `-m process` runs at every change.
    pytest counts and lists what is skipped (`-ra`).
    """
    thin(items)
    for item in items:
        if any(item.get_closest_marker(other) is not None for other in ("matrix", "slow", "wide")):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "process"]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs CUDA")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """Leaves what was imported, by now, out of all collections to come.

    The hosts collect at the start of each training; over all that they import, that is half a second each time. Nothing
    is ever let back in (`gc.unfreeze`): that would be everything.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many GPU tests did not run, so that nobody takes their silence for a pass."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "gpu" in report.keywords]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} GPU tests skipped: this machine has no CUDA.")


@pytest.fixture
def exact_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals name figures to the last byte, not rounded up."""
    for module in (sizing, compiled):
        monkeypatch.setattr(module, "format_least", lambda nbytes: f"{nbytes}B")
