"""Calls of a layer, one for each micro-batch: what its first run keeps, and its backward, which runs it again.

The first run keeps nothing for backward but what goes into the layer: a checkpoint. It returns leaves, so that the
backward of what is above them ends there. Later the layer is run again with gradients, and its own backward begins
with those of the leaves.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ptm_accel.errors import UnsupportedError

_PLAIN = (bool, int, float, str, torch.dtype, torch.device)


class Caught(Protocol):
    """What a library's hooks catch of what happens within layers, such as router logits, for a loss to use."""

    def counts(self) -> dict[str, int]:
        """Returns how many values each list has so far."""
        ...

    def since(self, counts: Mapping[str, int], change: Callable[[Any], Any]) -> list[Any]:
        """Changes the values that came since then in place; returns them."""
        ...

    def anew(self) -> None:
        """Has an empty list of each kind from now on, in the caller's context."""
        ...


@dataclass
class LayerCall:
    """One call of a layer.

    Attributes:
        module: the layer.
        given: its hidden states, as the model's loop gave them.
        args, kwargs: all other arguments.
        random: states of random numbers before the call; None where none may be drawn.
        autocast: as it was then.
        variables: context variables, as they were then.
        leaves: what it has returned, and what was caught meanwhile.
        gradients: of the leaves, once those have been let go of.
    """

    module: nn.Module
    given: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomStates | None
    autocast: Autocast
    variables: contextvars.Context
    leaves: list[torch.Tensor]
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    def let_go(self) -> None:
        """Takes the gradients of what it has returned, which nobody uses any more."""
        if self.leaves:
            self.gradients, self.leaves = [leaf.grad for leaf in self.leaves], []


class RandomStates:
    """States of the random numbers of the CPU and of a device, when it was made.

    Args:
        device: where layers compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._other = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Sets them again."""
        torch.set_rng_state(self._cpu)
        if self._other is not None:
            torch.cuda.set_rng_state(self._other, self._device)

    def same_as(self, other: RandomStates) -> bool:
        """Whether nothing was drawn in between."""
        if self._other is not None and other._other is not None and not torch.equal(self._other, other._other):
            return False
        return torch.equal(self._cpu, other._cpu)


class Autocast:
    """Whether and how operations are cast, when it was made.

    Args:
        device: where layers compute.
    """

    def __init__(self, device: torch.device) -> None:
        kinds = {"cpu", device.type}
        self._kinds = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self._cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context in which it is so again."""
        with ExitStack() as stack:
            for kind, (enabled, dtype) in self._kinds.items():
                if enabled or torch.is_autocast_enabled(kind):
                    cast = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache)
                    stack.enter_context(cast)
            yield


def run_first(
    module: nn.Module,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    caught: Caught,
    *,
    may_draw: bool,
    reentrant: bool,
) -> tuple[Any, LayerCall]:
    """Runs a layer for one micro-batch, with gradients, of which nothing is kept.

    Args:
        module: the layer.
        call: calls it.
        args: its arguments; hidden states come first.
        kwargs: its named ones.
        caught: what hooks catch meanwhile.
        may_draw: whether it may draw random numbers.
        reentrant: in plain accumulation a re-entrant checkpoint runs it, with which what is caught has no gradient.

    Returns:
        what the layer returns, as leaves; and the call.

    Raises:
        UnsupportedError: the layer is given what cannot be given twice, or writes to it.
    """
    if "hidden_states" in kwargs:
        args = (kwargs.pop("hidden_states"), *args)
    given, *others = args
    rest, kwargs = tree_map(_checked, (tuple(others), dict(kwargs)), is_leaf=_is_cache)
    device = given.device
    variables = contextvars.copy_context()
    random = RandomStates(device) if may_draw else None
    kept = LayerCall(module, given, rest, kwargs, random, Autocast(device), variables, [])
    others, named = _fresh((rest, kwargs))
    before = [(tensor, tensor._version) for tensor in (given, *_tensors((others, named)), *module.buffers())]
    held = _contents((others, named))
    counts = caught.counts()
    # What gets out beside the output (by hooks, by attributes) and into the loss is met by `_lost` in its backward;
    # without gradients it would be a constant there.
    with torch.autograd.graph.saved_tensors_hooks(_dropped, _lost):
        output = call(_leaf(given, given.requires_grad), *others, **named)
    if any(tensor._version != version for tensor, version in before) or _contents((others, named)) != held:
        raise UnsupportedError(
            f"micro_batches: by_layer: {type(module).__name__} writes to its arguments or to its buffers, and each "
            "layer is run twice. Leave micro_batches out."
        )
    with torch.no_grad():
        trains = given.requires_grad or any(param.requires_grad for param in module.parameters())

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return _leaf(value, trains and value.is_floating_point())

    output = tree_map(leaf, output)
    outputs = _tensors(output)
    trains = trains and not reentrant
    kept.leaves = [*outputs, *_tensors(caught.since(counts, leaf))]
    return output, kept


def run_backward(
    kept: LayerCall, call: Callable[..., Any], caught: Caught, *, draws: bool, reentrant: bool
) -> torch.Tensor | None:
    """Runs a layer again, and its backward.

    Args:
        kept: its first call.
        call: calls it.
        caught: what hooks catch meanwhile.
        draws: whether it draws random numbers, which are to be the same again.
        reentrant: in plain accumulation a re-entrant checkpoint gives it its hidden states, as a leaf.

    Returns:
        the gradient of its hidden states; None where there is none.
    """
    kept.let_go()
    gradients, kept.gradients = kept.gradients, []
    if all(gradient is None for gradient in gradients):
        return None
    trains = kept.given.requires_grad
    given = kept.given.detach().requires_grad_(trains) if reentrant else _leaf(kept.given, trains)
    if draws:
        assert kept.random is not None, "draws are refused where they are not kept"
        kept.random.restore()

    def again() -> tuple[Any, list[Any]]:
        # In the call's own context variables: what is caught here is nobody else's.
        caught.anew()
        counts = dict.fromkeys(caught.counts(), 0)
        output = call(given, *_fresh(kept.args), **_fresh(kept.kwargs))
        return output, caught.since(counts, lambda value: value)

    with torch.enable_grad(), kept.autocast.entered():
        made = _tensors(kept.variables.run(again))
    pairs = [(t, g) for t, g in zip(made, gradients, strict=True) if g is not None and t.requires_grad]
    torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
    return given.grad


def _leaf(tensor: torch.Tensor, trains: bool) -> torch.Tensor:
    """Returns a tensor as a leaf that is cast like one in the middle of a model.

    Autocast casts a leaf once for all that read it, and adds their gradients up in the lower precision; a view, or
    what another operation has returned, it casts for each of them.
    """
    with torch.no_grad():
        return tensor.detach().view_as(tensor).requires_grad_(trains)


def _dropped(tensor: torch.Tensor) -> None:
    return None


def _lost(packed: object) -> torch.Tensor:
    raise UnsupportedError(
        "micro_batches: by_layer: the loss uses inner results of a layer, of which only the output is kept. Leave "
        "micro_batches out."
    )


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def _checked(value: Any) -> Any:
    """Refuses an argument that a layer cannot be given twice."""
    if _is_cache(value):
        # Each run gets an empty one of its own.
        reason = "a cache that is not empty" if value.get_seq_length() else ""
    elif isinstance(value, torch.Tensor):
        reason = "an argument that requires a gradient, beside its hidden states" if value.requires_grad else ""
    else:
        known = value is None or isinstance(value, _PLAIN)
        reason = "" if known else f"an argument of type {type(value).__name__}"
    if reason:
        raise UnsupportedError(
            f"micro_batches: by_layer: a layer is given {reason}, and each layer is run twice. Leave micro_batches out."
        )
    return value


def _fresh(given: Any) -> Any:
    return tree_map(lambda value: copy.deepcopy(value) if _is_cache(value) else value, given, is_leaf=_is_cache)


def _contents(given: Any) -> Any:
    """Returns what tells whether something else is in the lists and dicts of arguments than before."""
    leaves, form = tree_flatten(given, is_leaf=_is_cache)
    return form, [id(leaf) for leaf in leaves]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(tree) if isinstance(value, torch.Tensor)]


def states_of(layers: Sequence[nn.Module]) -> list[Any]:
    """Returns what may be changed around a forward for the whole process: modes, adapters, backends."""
    names = ("training", "_disable_adapters", "_active_adapter", "merged_adapters")
    # What PEFT has not changed is of the class. Lists are changed in place.
    modules = [str([known.get(name) for name in names]) for layer in layers for known in map(vars, layer.modules())]
    trained = [param.requires_grad for layer in layers for param in layer.parameters()]
    cuda = torch.backends.cuda
    backends = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]
    return [modules, trained, backends, torch.get_default_dtype()]
