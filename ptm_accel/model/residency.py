"""Hooks that keep parameters in the compute tier while they are used, in forwards of their modules and outside."""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from ptm_accel.model.accesses import Accesses
from ptm_accel.model.addresses import ExtentTable
from ptm_accel.model.compiled import CompiledRegions
from ptm_accel.model.forwards import Forwards
from ptm_accel.model.hooks import Hook, RootHook
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.runtime.executor import Executor

_LIBRARIES = ("torch.", "transformers.", "peft.")
"""Packages whose modules do not write to weights through `.data` in their own forwards, which torch does not count.
The parameters of other modules are `AwayParameter`s in their own forward too, where such a write is noticed."""


class Residency:
    """Keeps parameters in the compute tier while they are used.

    Args:
        executor: serves accesses.
        slots: the model's slots.
        table: finds the slot of a storage.

    Attributes:
        executor: see above.
        regions: the model's compiled regions.
        forwards: those of its modules.
        accesses: serves uses of parameters and gradients outside of forwards.
    """

    def __init__(self, executor: Executor, slots: SlotTable, table: ExtentTable) -> None:
        self.slots = slots
        self.executor = executor
        self.regions = CompiledRegions(self)
        self.forwards = Forwards(executor, slots, table, self.regions)
        self.accesses = Accesses(executor, slots, self.forwards)

    def install(self, model: nn.Module) -> None:
        """Puts forward hooks on modules that own parameters, and on modules around them, which may read some."""
        self.forwards.root = model
        readers = {""}
        for name, module in model.named_modules(remove_duplicate=False):
            if module._parameters:
                parts = name.split(".")
                readers.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
        for name, module in model.named_modules(remove_duplicate=False):
            if name in readers:
                self.hook(module)
        self.forwards.find_owners(model)
        self.regions.install(model)

    def hook(self, module: nn.Module) -> None:
        """Puts the forward hooks on a module that has none of them yet."""
        forwards, stats = self.forwards, self.executor.pool.stats
        if module in forwards.hooked:
            return
        if type(module).__module__.startswith(_LIBRARIES) and "forward" not in vars(module):
            forwards.trusted.add(module)
        if module is forwards.root:
            hook = RootHook(forwards.enter_root, stats)
            before = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        else:
            before = module.register_forward_pre_hook(Hook(forwards.call_begins, stats), prepend=True)
        after = module.register_forward_hook(Hook(forwards.call_ends, stats), always_call=True)
        forwards.hooked[module] = before, after

    def covers(self, model: nn.Module) -> bool:
        """Returns whether all modules that own parameters have the hooks."""
        return all(module in self.forwards.hooked for module in model.modules() if module._parameters)

    def remove(self) -> None:
        """Takes the hooks off again."""
        self.regions.remove()
        for handle in self.hooks:
            handle.remove()
        self.forwards.hooked.clear()

    @property
    def hooks(self) -> tuple[RemovableHandle, ...]:
        """Hooks on the model's modules."""
        return tuple(handle for handles in list(self.forwards.hooked.values()) for handle in handles)
