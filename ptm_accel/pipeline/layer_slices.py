"""Long sequences on one device: each layer computes one slice of the tokens after the other.

What a layer holds while it computes, and again while its backward does, is that of a slice: in backward the layer is
recomputed slice by slice. What goes into the layer is kept, and so are its keys and values. In this order, unlike that
of a pipeline (TeraPipe, arXiv 2102.07988), a layer's weights are brought in once for all slices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ptm_accel.errors import ConfigError
from ptm_accel.pipeline.refusals import refuse_slicing

AUTO_TOKENS = 2048
"""Tokens of a slice where their number is chosen."""


class KeysAndValues:
    """Those of a layer's slices so far; takes the place of a cache of transformers in its attention.

    Args:
        before: keys and values of the slices before, (batch, heads, tokens, width) each.

    Attributes:
        own: those of the slice that is computed.
    """

    def __init__(self, before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._before = before
        self.own: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *where: Any, **how: Any) -> tuple[torch.Tensor, ...]:
        """Takes those of the slice, and returns those up to its end."""
        self.own = keys, values
        return tuple(torch.cat(both, dim=2) for both in zip(*self._before, self.own, strict=True))


class SlicedForward:
    """A layer's forward, over slices of tokens.

    Args:
        layer: a decoder layer of transformers.
        slices: how many; None for as many as have about `AUTO_TOKENS` tokens.
    """

    def __init__(self, layer: nn.Module, slices: int | None) -> None:
        self.slices = slices
        stock: Any = type(layer).forward
        # Since 5.24 transformers checkpoints within `forward`; there the slices come in between.
        self._checkpoints = stock.__code__.co_name == "forward_with_checkpointing"
        self._stock: Callable[..., Any] = stock.__wrapped__ if self._checkpoints else stock
        names = inspect.signature(self._stock).parameters
        self._cache = "cache" if "cache" in names else "past_key_values"
        # Behind the layer itself and its hidden states; GPT-2 gives some of them by position.
        self._names = list(names)[2:]
        self._layer: Any = layer

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own forward.

        Raises:
            ConfigError: the sequence is shorter than there are slices.
        """
        layer = self._layer
        if args:
            kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        length = hidden.shape[1]
        # The first forward under a re-entrant checkpoint has no gradients.
        trains = torch.is_grad_enabled() or layer.training
        count = max(1, round(length / AUTO_TOKENS)) if self.slices is None else self.slices
        if count > length and trains:
            raise ConfigError(f"token_slices: {count} slices of {length} tokens; set it to at most {length}.")
        if count == 1 or not trains or kwargs.get(self._cache) is not None:
            return type(layer).forward(layer, hidden, **kwargs)
        run = partial(self._run, count, kwargs)
        if self._checkpoints and layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(run, hidden)
        return run(hidden)

    def _run(self, count: int, kwargs: dict[str, Any], hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.shape[1]
        outputs: list[torch.Tensor] = []
        # Handed over as arguments: an object that has them all would refer to the graph that refers to it.
        known: list[torch.Tensor] = []
        for begin, end in cuts(length, count):
            parts = {name: _cut(name, value, begin, end, length) for name, value in kwargs.items()}
            if parts.get("attention_mask") is None:
                parts["attention_mask"] = _causal(begin, end, hidden, self._layer)
            output, *own = checkpoint(self._slice, parts, hidden[:, begin:end], *known, use_reentrant=False)
            outputs.append(output)
            known += own
        return torch.cat(outputs, dim=1)

    def _slice(self, parts: dict[str, Any], hidden: torch.Tensor, *known: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = KeysAndValues(list(zip(known[::2], known[1::2], strict=True)))
        output: torch.Tensor = self._stock(self._layer, hidden, **{**parts, self._cache: cache})
        assert cache.own is not None
        return output, *cache.own


def cuts(length: int, count: int) -> Iterator[tuple[int, int]]:
    """Iterates over the first token of each slice and the one after its last; sizes differ by one at most."""
    return pairwise(number * length // count for number in range(count + 1))


def _cut(name: str, value: Any, begin: int, end: int, length: int) -> Any:
    """What a slice is given of a layer's argument."""
    if isinstance(value, tuple):
        return tuple(_cut(name, each, begin, end, length) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    if name == "attention_mask":
        # (batch, heads, queries, keys): a slice sees what comes before its end.
        return value[..., begin:end, :end]
    # Positions, and the embeddings of them: (batch, tokens, ...).
    return value[:, begin:end] if value.dim() > 1 and value.shape[1] == length else value


def _causal(begin: int, end: int, hidden: torch.Tensor, layer: Any) -> torch.Tensor:
    """Returns the mask of a slice (1, 1, queries, keys); attention kernels take causal masks to be square."""
    seen = torch.ones(end - begin, end, dtype=torch.bool, device=hidden.device).tril(begin)[None, None]
    attention = getattr(layer, "self_attn", None) or layer.attn
    if attention.config._attn_implementation == "sdpa":
        return seen
    least = torch.finfo(hidden.dtype).min
    return torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device).masked_fill(~seen, least)


def slice_layers(model: nn.Module, slices: int | None) -> int:
    """Has the decoder layers of a causal language model compute slices of tokens, one after the other, in training.

    Args:
        model: of transformers, one of `MODEL_TYPES`; on pages or not. Calling it again changes the number.
        slices: how many; None for slices of about `AUTO_TOKENS` tokens.

    Returns:
        how many layers there are.

    Raises:
        UnsupportedError: a model that cannot be sliced.
    """
    refuse_slicing(model)
    layers = _layers_of(model)
    for layer in layers:
        layer.forward = SlicedForward(layer, slices)
    return len(layers)


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the decoder layers: those of the longest list of modules."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)
