"""What `import torch` calls: makes `accelerate launch --use_ptm script.py` work, with script and hosts unchanged.

accelerate has no registry for others, torch has one: the entry points of the group `torch.backends` are called at the
end of `import torch`, in the launcher and in every process that it starts. There is nothing to do in most processes,
and then this does nothing. In accelerate's own commands it waits for their parser, to add the flags; where the
environment switches pages on (`ptm_accel.environment`) it waits for the classes of the hosts, to put them on pages.

A module is waited for by a finder in front of the others, since it may come at any time, in any order; one that is
being imported while torch is (`from accelerate import Accelerator` as the first line of a script) is met at the next
import after it. Nothing here may raise: that would be an `import torch` that fails.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH = "ACCELERATE_USE_PTM"

_ACCELERATE = "ptm_accel.integrations.accelerate"
_TRANSFORMERS = "ptm_accel.integrations.transformers"

COMMANDS = {
    "accelerate.commands.config.config_args": (f"{_ACCELERATE}.launching", "extend_config"),
    "accelerate.commands.launch": (f"{_ACCELERATE}.launching", "extend_launch"),
}
"""What is done in accelerate's commands, by the module that it is done to."""

HOSTS = {
    "accelerate.accelerator": (f"{_ACCELERATE}.switching", "switch_accelerator"),
    "transformers.trainer": (f"{_TRANSFORMERS}.switching", "switch_trainer"),
    "transformers.modeling_utils": (f"{_TRANSFORMERS}.switching", "switch_models"),
}
"""What is done where pages are switched on."""


_COMMANDS = ("accelerate", "accelerate-launch", "accelerate-config", "ptm-accel")


def install() -> None:
    """Called by torch."""
    found: dict[str, tuple[str, str]] = {}
    program = what_runs(sys.orig_argv)
    if program in _COMMANDS or program.startswith(("accelerate.commands", "ptm_accel.cli")):
        found |= COMMANDS
    elif os.environ.get(SWITCH, "").strip().lower() not in ("", "0", "false", "no", "off"):
        found |= HOSTS
        if not _is_child() and not program.startswith(("torchrun", "torch.distributed")):
            atexit.unregister(tell_of_unused)
            atexit.register(tell_of_unused)
    if found:
        watch(found, program)


def watch(wanted: dict[str, tuple[str, str]], main: str = "") -> None:
    """Has modules met as they are imported, unless that has been done; see `Watcher`."""
    if not any(isinstance(finder, Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watcher(wanted, main))


def _is_child() -> bool:
    """Whether this process was started by `multiprocessing`, for a part of somebody's script."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def what_runs(argv: Sequence[str]) -> str:
    """The script's file name, or the module, that Python was started with.

    Args:
        argv: as `sys.orig_argv`.
    """
    rest = iter(argv[1:])
    for arg in rest:
        if arg in ("-X", "-W"):
            next(rest, None)
        elif arg == "-m":
            return next(rest, "")
        elif not arg.startswith("-"):
            return os.path.basename(arg)
    return ""


class Watcher:
    """A finder that has something done to modules right after they were imported.

    Args:
        wanted: by module, where the function is that is called with it.
        main: the module that Python was started with (`-m`), if any.
    """

    def __init__(self, wanted: dict[str, tuple[str, str]], main: str = "") -> None:
        self._wanted = dict(wanted)
        self._main = main
        self._under_way = {name for name in wanted if name in sys.modules}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Part of the import system; finds nothing by itself."""
        self._meet_those_under_way()
        if name not in self._wanted or name in self._under_way:
            return None
        spec = self._find(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        if name == self._main:
            # `python -m` runs a module's code without importing it; so it is given code that does.
            self._main = ""
            loader.get_code = lambda fullname: compile(f"import {name}\n{name}.main()\n", fullname, "exec")
            return spec
        run: Callable[[ModuleType], None] = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._do(name, module)

        loader.exec_module = exec_module
        return spec

    def _find(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                return spec
        return None

    def _meet_those_under_way(self) -> None:
        for name in list(self._under_way):
            module = sys.modules.get(name)
            spec = None if module is None else module.__spec__
            if module is not None and not getattr(spec, "_initializing", False):
                self._under_way.discard(name)
                self._do(name, module)

    def _do(self, name: str, module: ModuleType) -> None:
        home, function = self._wanted.pop(name)
        getattr(import_module(home), function)(module)


def tell_of_unused() -> None:
    """At the end of a process that was to train on pages: says so, if no model came onto any."""
    engine = sys.modules.get("ptm_accel.engine")
    if (engine is not None and engine.Engine.count) or hasattr(sys, "last_type") or hasattr(sys, "last_exc"):
        # It has trained on pages, or has ended by an error, which says more.
        return
    sys.stderr.write(
        "ptm_accel: pages were switched on (--use_ptm), and no model was put on them: the script prepares none with "
        "an Accelerator or a transformers Trainer, and reads none with from_pretrained. Leave --use_ptm out, or see "
        "docs/launch.md.\n"
    )
