"""An optimizer to try things on: what its steps change belongs to the copy, and nothing of the training is touched."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_LARGEST_TENSOR = 4096
"""Elements of the largest tensor that is copied; of a larger one, only its shape."""
_DEEPEST = 16
"""How many containers within one another are looked into."""


def optimizers_in(value: Any, depth: int = 0) -> Iterator[torch.optim.Optimizer]:
    """The optimizers that something is, or has in its lists, sets and dictionaries."""
    if isinstance(value, torch.optim.Optimizer):
        yield value
    elif depth < _DEEPEST and isinstance(value, (list, tuple, set, frozenset, deque, Mapping)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from optimizers_in(entry, depth + 1)


def knows_parameters(optimizer: torch.optim.Optimizer) -> str | None:
    """The attribute by which an optimizer looks parameters up by the object, or goes by some of its groups; or None.

    A list of parameters may be for anything; a set of them, and a dictionary that has them for keys, are for that.
    """
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    groups = {id(group) for group in optimizer.param_groups}

    def known(value: Any, depth: int = 0) -> bool:
        if depth == _DEEPEST or not isinstance(value, (list, tuple, set, frozenset, deque, Mapping)):
            return False
        if isinstance(value, (set, frozenset, Mapping)) and any(
            id(key) in params or (type(key) is int and key in params) for key in value
        ):
            return True
        inside = value.values() if isinstance(value, Mapping) else value
        return any(id(entry) in groups or known(entry, depth + 1) for entry in inside)

    own = ("state", "param_groups", "defaults")
    return next((name for name, value in vars(optimizer).items() if name not in own and known(value)), None)


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Leaves the random numbers of Python and of numpy as they were; torch's are for whoever draws them."""
    numpy = sys.modules.get("numpy")
    before, theirs = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(theirs)


def copy_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, Copied]:
    """A copy of an optimizer, without its parameters, its state and those who asked to be called at its steps.

    Returns:
        the copy, and what copies other things so that they go with it.

    Raises:
        TypeError: the optimizer keeps something of which there can be no second one to try things on.
    """
    copy = object.__new__(type(optimizer))
    copied = Copied(optimizer, copy)
    left_out: dict[str, Any] = {"state": defaultdict(dict), "param_groups": []}
    # Whoever asked to be called at steps means those of the training.
    left_out |= {name: OrderedDict() for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")}
    for name, value in vars(optimizer).items():
        # What somebody has put in the place of its step, to count its calls, is not what is called here.
        if name != "step":
            vars(copy)[name] = left_out[name] if name in left_out else copied.of(value)
    return copy, copied


class Copied:
    """Copies what an optimizer keeps; what was met before is the same copy again.

    Args:
        optimizer: whose it is.
        copy: what is in its place among the copies.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, copy: torch.optim.Optimizer) -> None:
        # With the original, so that its identity stays its own.
        self._known: dict[int, tuple[Any, Any]] = {id(optimizer): (optimizer, copy)}

    def of(self, value: Any) -> Any:
        """A copy that may be changed; functions, classes and what Python itself made are as they were.

        Raises:
            TypeError: there can be no second one of what is in it: a module, an optimizer, what acts as it goes.
        """
        if id(value) not in self._known:
            made = self._made(value)
            if made is value:
                return value
            self._known.setdefault(id(value), (value, made))
        return self._known[id(value)][1]

    def _made(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            large = value.numel() > _LARGEST_TENSOR
            return torch.empty_like(value, device="meta") if large else value.detach().clone()
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, partial):
            return partial(self.of(value.func), *map(self.of, value.args), **self.of(value.keywords))
        if isinstance(value, FunctionType):
            if self._is_bound(value):
                raise TypeError(f"it keeps a function that is bound to it ({value.__name__})")
            return value
        if isinstance(value, random.Random) or type(value).__module__.partition(".")[0] == "numpy":
            return deepcopy(value)
        if isinstance(value, (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
            raise TypeError(f"it keeps a {type(value).__name__}, which cannot be tried on small tensors")
        if isinstance(value, (dict, list, set, deque)):
            return self._container(value)
        if type(value) in (tuple, frozenset):
            return type(value)(self.of(entry) for entry in value)
        if not _is_somebodys(value):
            return value
        if hasattr(value, "__del__"):
            raise TypeError(f"it keeps a {type(value).__name__}, which does something when it goes")
        return self._with_attributes(value, object.__new__(type(value)))

    def _is_bound(self, function: Any, depth: int = 0) -> bool:
        """Whether what a function closes over is the optimizer, a method of it, or another such function."""
        for cell in getattr(function, "__closure__", None) or ():
            try:
                inside = cell.cell_contents
            except ValueError:
                # Not filled yet.
                continue
            if id(inside) in self._known or id(getattr(inside, "__self__", None)) in self._known:
                return True
            if depth < _DEEPEST and isinstance(inside, FunctionType) and self._is_bound(inside, depth + 1):
                return True
        return False

    def _container(self, value: Any) -> Any:
        """Known before it is filled, since it may be among what it contains."""
        cls: Any = type(value)
        made = cls(maxlen=value.maxlen) if isinstance(value, deque) else cls.__new__(cls)
        if isinstance(value, defaultdict):
            made.default_factory = value.default_factory
        self._known[id(value)] = (value, made)
        if isinstance(value, dict):
            # Not by a method of a class that counts or checks.
            dict.update(made, {key: self.of(entry) for key, entry in value.items()})
        elif isinstance(value, set):
            made.update(value)
        else:
            made.extend(map(self.of, value))
        return self._with_attributes(value, made) if hasattr(value, "__dict__") else made

    def _with_attributes(self, value: Any, made: Any) -> Any:
        self._known[id(value)] = (value, made)
        vars(made).update((name, self.of(entry)) for name, entry in vars(value).items())
        return made


def _is_somebodys(value: Any) -> bool:
    """Whether an object is of a class that somebody wrote, and may keep what its methods change."""
    library = type(value).__module__.partition(".")[0]
    if library in sys.stdlib_module_names or library == "torch" or not hasattr(value, "__dict__"):
        return False
    return not isinstance(value, (type, Enum, int, float, complex, str, bytes))
