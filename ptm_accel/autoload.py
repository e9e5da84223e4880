"""The entry point that `import torch` calls, for `accelerate launch --use_ptm script.py` with an unchanged script.

torch calls the entry points of the group `torch.backends` at the end of `import torch`, in the launcher and in every
process that it starts. In accelerate's own commands `install` adds our flags; where the environment switches pages on
(`ptm_accel.environment`) it patches the classes of the hosts; in other processes it does nothing.

A finder in front of the others patches a module right after its import, whenever that comes. A module that is being
imported while torch is (`from accelerate import Accelerator` as the first line of a script) is patched at the next
import after it. An error here would fail `import torch`.
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
"""The patches of accelerate's commands, by module."""

HOSTS = {
    "accelerate.accelerator": (f"{_ACCELERATE}.switching", "switch_accelerator"),
    "transformers.trainer": (f"{_TRANSFORMERS}.switching", "switch_trainer"),
    "transformers.modeling_utils": (f"{_TRANSFORMERS}.switching", "switch_models"),
}
"""The patches where pages are switched on, by module."""

_COMMANDS = ("accelerate", "accelerate-launch", "accelerate-config", "ptm-accel")


def install() -> None:
    """Called by torch."""
    found: dict[str, tuple[str, str]] = {}
    program = what_runs(sys.orig_argv)
    if program in _COMMANDS or program.startswith(("accelerate.commands", "ptm_accel.cli")):
        found |= COMMANDS
    elif os.environ.get(SWITCH, "").strip().lower() not in ("", "0", "false", "no", "off"):
        found |= HOSTS
        process = sys.modules.get("multiprocessing.process")
        child = process is not None and process.parent_process() is not None
        if not child and not program.startswith(("torchrun", "torch.distributed")):
            atexit.unregister(tell_of_unused)
            atexit.register(tell_of_unused)
            # Imported by name, as the patches are: a process that does not use pages imports nothing of this package.
            import_module("ptm_accel.uncaught").install()
    if found:
        watch(found, program)


def watch(wanted: dict[str, tuple[str, str]], main: str = "") -> None:
    """Patches modules as they are imported (see `Watcher`); does nothing the second time."""
    if not any(isinstance(finder, Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watcher(wanted, main))


def what_runs(argv: Sequence[str]) -> str:
    """Returns the script's file name, or the module, that Python was started with; `argv` is as `sys.orig_argv`."""
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
    """A finder that patches modules right after their import.

    Args:
        wanted: for each module, the module and name of the function that patches it.
        main: the module that Python was started with (`-m`), if any.
    """

    def __init__(self, wanted: dict[str, tuple[str, str]], main: str = "") -> None:
        self._wanted = dict(wanted)
        self._main = main
        self._importing = {name for name in wanted if name in sys.modules}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Part of the import system; finds nothing by itself."""
        self._patch_imported()
        if name not in self._wanted or name in self._importing:
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
            self._patch(name, module)

        loader.exec_module = exec_module
        return spec

    def _find(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                return spec
        return None

    def _patch_imported(self) -> None:
        found = {name: sys.modules[name] for name in self._importing & sys.modules.keys()}
        ready = {n: module for n, module in found.items() if not getattr(module.__spec__, "_initializing", False)}
        # Before any is patched, which imports modules and so comes here again.
        self._importing -= ready.keys()
        for name, module in ready.items():
            self._patch(name, module)

    def _patch(self, name: str, module: ModuleType) -> None:
        home, function = self._wanted.pop(name)
        getattr(import_module(home), function)(module)


def tell_of_unused() -> None:
    """At exit: says that pages were switched on and no model was put on them."""
    engine = sys.modules.get("ptm_accel.engine")
    if (engine is not None and engine.Engine.count) or hasattr(sys, "last_type") or hasattr(sys, "last_exc"):
        # An error says more.
        return
    sys.stderr.write(
        "ptm_accel: pages were switched on (--use_ptm), and no model was put on them: the script prepares none with "
        "an Accelerator or a transformers Trainer, and reads none with from_pretrained. Leave --use_ptm out, or see "
        "docs/launch.md.\n"
    )
