"""Scripts in processes of their own that need not import the hosts: that takes five seconds and more each time.

One process (`tests/prepared_server.py`) imports torch, transformers, accelerate, peft and datasets, as a script without
ptm_accel does, and each script is run in a fork of it. For what is shown of imports themselves, of resident memory, or
of how processes are started, a process is started.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SERVER = Path(__file__).with_name("prepared_server.py")
_LONGEST_S = 200


@dataclass(frozen=True)
class Run:
    """How a process ended.

    Attributes:
        code: its exit status; negative for the signal that ended it.
        out: what it printed.
        err: what it complained about.
    """

    code: int
    out: str
    err: str

    @property
    def result(self) -> str:
        """The line of the result, of scripts that print one (`tests/integrations/scripts`)."""
        lines = [line for line in self.out.splitlines() if line.startswith("RESULT")]
        assert len(lines) == 1, f"{self.out}\n{self.err[-3000:]}"
        return lines[0]


def run_prepared(*command: object, cwd: Path, env: Mapping[str, str] | None = None, group: Path | None = None) -> Run:
    """Runs a script (or `-m` and a module, or `-c` and code) as `python` would be given it.

    Args:
        command: the script and its arguments.
        cwd: the folder it is run in.
        env: its environment; by default that of this process.
        group: the kernel's memory group it joins (`tests/capping.py`), for what it takes beyond the prepared process.
    """
    return _asked(command, cwd, [os.environ if env is None else env], group)[0]


def run_alone(*command: object, cwd: Path, env: Mapping[str, str] | None = None) -> Run:
    """The same in a process that `python` starts, for what is shown of imports."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr)


def run_ranks(*command: object, count: int, cwd: Path, env: Mapping[str, str] | None = None) -> list[Run]:
    """Runs a script in several processes that find one another, as `torchrun` does; gives how each ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
    given = os.environ if env is None else env
    return _asked(command, cwd, [{**given, **{name: str(value) for name, value in rank.items()}} for rank in ranks])


def _asked(
    command: Sequence[object], cwd: Path, envs: Sequence[Mapping[str, str]], group: Path | None = None
) -> list[Run]:
    """Runs one script in several environments at the same time."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="ptm_accel-prepared-") as folder:
        said = [(Path(folder, f"{number}.out"), Path(folder, f"{number}.err")) for number in range(len(envs))]
        same = {"command": [str(part) for part in command], "cwd": str(cwd), "timeout_s": _LONGEST_S}
        same["group"] = None if group is None else str(group)
        jobs = [
            {**same, "env": dict(env), "out": str(out), "err": str(err)}
            for env, (out, err) in zip(envs, said, strict=True)
        ]
        server.stdin.write(json.dumps(jobs) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the prepared process has ended"
        return [
            Run(code, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8"))
            for code, (out, err) in zip(json.loads(answer), said, strict=True)
        ]


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Started where it is first needed, for as long as these tests run."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PTM_", "ACCELERATE_"))}
    server = subprocess.Popen(
        [sys.executable, str(_SERVER)], env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)
    return server
