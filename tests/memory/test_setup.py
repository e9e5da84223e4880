"""Memory is closed whole, whatever goes wrong meanwhile."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ptm_accel.memory.budget import Tag
from ptm_accel.memory.host_store import HostStore
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.units import GIB, MIB
from tests.mock_device import MockDevice
from tests.tiers import MEMORIES, open_memory


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_pin_that_is_left_keeps_nothing_else_open(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = set(threading.enumerate())
    memory = open_memory(kind, 1 << 20, tmp_path)
    closed: list[type] = []
    for part in {type(part): part for part in memory.parts}.values():

        def closing(part: object, close: object = type(part).close) -> None:
            closed.append(type(part))
            close(part)  # type: ignore[operator]

        monkeypatch.setattr(type(part), "close", closing)

    def told() -> None:
        raise OSError("of whoever is told")

    memory.parts.append(SimpleNamespace(close=told))  # type: ignore[arg-type]
    tensor = memory.pool.create("left", Tag.PARAM, torch.Size([1024]), torch.float32, fill=0.0)
    pin = memory.pool.pin(tensor)
    with caplog.at_level(logging.ERROR), pytest.raises(AssertionError, match=r"left.* is pinned"):
        memory.close()
    assert set(closed) == {type(part) for part in memory.parts[:-1]}
    assert memory.disk is None or memory.disk.closed
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.is_alive()]
    assert "of whoever is told" in caplog.text, "a later error is not lost"
    memory.close()
    pin.release()


FORKED = """
import os, sys, torch
from pathlib import Path
from ptm_accel.memory.budget import Tag
from tests.mock_device import MockDevice
from ptm_accel.memory.setup import Capacities, build_memory

disk = [Path(sys.argv[1])] if len(sys.argv) > 1 else []
capacities = Capacities(page_bytes=4096, host_bytes=1 << 20, device_bytes=64 << 10, disk_paths=disk)
memory = build_memory(capacities, MockDevice())
tensors = [memory.pool.create(f"t{n}", Tag.PARAM, (4096,), torch.float32) for n in range(12)]
for n, tensor in enumerate(tensors):
    memory.pool.fault(tensor, write=True).fill_(n)
child = os.fork()
if child == 0:
    memory.close()
    sys.exit(0)
status = os.waitpid(child, 0)[1]
print(status, all(bool((memory.pool.fault(t) == n).all()) for n, t in enumerate(tensors)))
memory.close()
"""


@pytest.mark.filterwarnings("ignore:ptm_accel. the disk path")
@pytest.mark.parametrize("disk", [False, True])
def test_what_a_fork_closes_is_not_its_parents(disk: bool, tmp_path: Path) -> None:
    """Memory under a device is shared with it."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, *([str(tmp_path)] if disk else [])]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 True\n"


@pytest.mark.parametrize(
    ("host", "device", "pages"),
    [
        (64 * GIB, 16 * GIB, 8),
        (8 * GIB, 16 * GIB, 4),
        (64 * GIB, 2 * GIB, 4),
        (GIB, 16 * GIB, 1),
        (64 * GIB, GIB // 4, 1),
    ],
)
def test_frames_under_a_device_hold_several_pages_where_there_is_room(host: int, device: int, pages: int) -> None:
    capacities = Capacities(page_bytes=4 * MIB, host_bytes=host, device_bytes=device)
    memory = build_memory(capacities, MockDevice())
    assert isinstance(memory.pool.backing, HostStore)
    assert memory.pool.backing.page_bytes == pages * 4 * MIB
    memory.close()
