"""A stage of a token pipeline (TeraPipe, arXiv 2102.07988): a range of decoder layers that computes slice after slice.

The model's own code computes each slice, with keys and values of the slices before it in the place of a cache. They are
leaves of the slice's graph: its backward leaves their gradients in them, and the backward of the slice that they belong
to, which comes after it, takes them over. So the order is all slices forward, then all backward in reverse. No graph
spans two slices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ptm_accel.errors import ConfigError, UnsupportedError
from ptm_accel.pipeline.refusals import refuse_shared, refuse_slicing

_IGNORED = -100
"""Labels of tokens that are not predicted."""


class _Cache:
    """Keys and values of all layers of a stage, of the slices before the present one and of itself.

    Args:
        before: for each slice before it, keys and values of the layers in turn.
    """

    def __init__(self, before: Sequence[Sequence[torch.Tensor]]) -> None:
        self._before = before
        self.own: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, *where: Any, **how: Any) -> tuple[torch.Tensor, ...]:
        """Does what `transformers.Cache.update` does; layers come in order."""
        at = len(self.own)
        self.own += [keys, values]
        return tuple(
            torch.cat([*(kept[at + number] for kept in self._before), new], dim=2)
            for number, new in enumerate((keys, values))
        )


@dataclass(slots=True)
class Slice:
    """State of a slice between its forward and its backward.

    Attributes:
        given: what came into the stage; a leaf, but for tokens.
        output: what it made: hidden states, or the slice's part of the loss.
        own: keys and values of its layers, in its graph.
        leaves: the same, in the graphs of the slices after it.
    """

    given: torch.Tensor
    output: torch.Tensor
    own: list[torch.Tensor] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)


class Stage:
    """Some layers of a causal language model, with its embedding if they are first, and its head if they are last.

    Args:
        model: of transformers; its other layers are dropped. It may be put on pages afterwards.
        number: of the stage.
        stages: how many there are.
        checkpoints: slices are recomputed in backward; so they are where the model's own checkpoints are switched on.

    Attributes:
        model: see above.
        first, last: whether it is the first, or the last stage.

    Raises:
        UnsupportedError: a model that cannot be cut.
        ConfigError: more stages than layers.
    """

    def __init__(self, model: nn.Module, number: int, stages: int, *, checkpoints: bool = False) -> None:
        refuse_slicing(model)
        self.model: Any = model
        self.first, self.last = number == 0, number == stages - 1
        self._checkpoints = checkpoints
        inner: Any = self.model.base_model
        self._inner = inner
        if stages > 1:
            refuse_shared(model)
        names = inspect.signature(self._inner.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._cut(number, stages)
        self._slices: list[Slice] = []
        self._part = 0

    def _cut(self, number: int, stages: int) -> None:
        name, layers = max(
            ((name, part) for name, part in self._inner.named_children() if isinstance(part, nn.ModuleList)),
            key=lambda found: len(found[1]),
        )
        count = len(layers)
        if stages > count:
            raise ConfigError(f"pipeline.stages: {stages} stages of {count} layers; set it to at most {count}.")
        head = self.model.get_output_embeddings()
        counts = balanced(count, _numbers_of(layers[0]), _numbers_of(head), stages)
        begin = sum(counts[:number])
        setattr(self._inner, name, _Layers(layers, range(begin, begin + counts[number])))
        if not self.first:
            self.model.set_input_embeddings(None)
            if hasattr(self._inner, "wpe"):
                # Positions have been added in the first stage.
                self._inner.wpe = _Zeros(self.model.config.n_embd, self._inner.wpe.weight.dtype)
                self._inner.drop = nn.Identity()
        if not self.last:
            for norm in ("norm", "ln_f"):
                if hasattr(self._inner, norm):
                    setattr(self._inner, norm, nn.Identity())
            self.model.set_output_embeddings(None)

    # ---- a step ------------------------------------------------------------------------------------------------

    def begin(self) -> list[Slice]:
        """Begins a new batch.

        Returns:
            where its slices are kept, for `backward`.
        """
        self._slices = []
        self._take_over_checkpoints()
        return self._slices

    def _take_over_checkpoints(self) -> None:
        """Recomputes slices where layers are to be recomputed: under checkpoints of their own they see no cache.

        Raises:
            UnsupportedError: they are re-entrant.
        """
        switched_on = [module for module in self.model.modules() if getattr(module, "gradient_checkpointing", False)]
        for module in switched_on:
            if getattr(module._gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
                raise UnsupportedError(
                    "re-entrant checkpoints have no graph for the keys and values of a slice; set "
                    "gradient_checkpointing_kwargs={'use_reentrant': False}."
                )
        for module in switched_on:
            module.gradient_checkpointing = False
            self._checkpoints = True

    def forward(
        self,
        given: torch.Tensor,
        begin: int,
        *,
        mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        predicted: float | torch.Tensor = 1,
        alone: bool = False,
    ) -> torch.Tensor:
        """Computes the next slice.

        Args:
            given: tokens (rows, tokens) in the first stage; elsewhere hidden states (rows, tokens, width).
            begin: its first token; at 0 other rows begin.
            mask: (rows, length), 0 where a row is padded on the right.
            labels: (rows, tokens), for the last stage: what is predicted at each of the slice's tokens.
            predicted: by which the loss is divided: how many are predicted in the whole batch.
            alone: it is the whole sequence, so that it is computed as without slices.

        Returns:
            hidden states, or in the last stage the slice's part of the loss; detached.
        """
        trains = torch.is_grad_enabled()
        if not self.first:
            given = given.detach().requires_grad_(trains)
        if begin == 0:
            self._part = len(self._slices)
        known = [each.leaves for each in self._slices[self._part :]]
        run: Callable[..., Any] = self._run
        if self._checkpoints and trains:
            run = partial(checkpoint, run, use_reentrant=False)
        output, *own = run(given, begin, mask, labels, predicted, None if alone else known)
        leaves = [each.detach().requires_grad_(trains) for each in own]
        self._slices.append(Slice(given, output, own, leaves))
        detached: torch.Tensor = output.detach()
        return detached

    def _run(
        self,
        given: torch.Tensor,
        begin: int,
        mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        predicted: float | torch.Tensor,
        known: list[list[torch.Tensor]] | None,
    ) -> tuple[torch.Tensor, ...]:
        end = begin + given.shape[1]
        cache = _Cache(known or [])
        how: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
        if known is not None:
            # Attention kernels take causal masks to be square.
            seen = self._mask(begin, end, mask, given.device)
            how = {"attention_mask": seen, self._cache_name: cache, "use_cache": True}
        hidden = self._inner(
            **{"input_ids" if self.first else "inputs_embeds": given},
            position_ids=torch.arange(begin, end, device=given.device)[None],
            **how,
        ).last_hidden_state
        if self.last:
            assert labels is not None
            logits = self.model.get_output_embeddings()(hidden)
            # As transformers' own loss, which sums in float32 at least.
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
            hidden = functional.cross_entropy(logits, labels.flatten(), ignore_index=_IGNORED, reduction="sum")
            hidden = hidden / predicted
        return hidden, *cache.own

    def _mask(self, begin: int, end: int, mask: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """What each token of a slice sees: (rows or 1, 1, tokens, end)."""
        seen = torch.ones(end - begin, end, dtype=torch.bool, device=device).tril(begin)[None, None]
        if mask is not None:
            seen = seen & mask[:, None, None, :end].bool()
        if self.model.config._attn_implementation == "sdpa":
            return seen
        dtype = next(self.model.parameters()).dtype
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)

    def backward(self, slices: list[Slice], gradient: torch.Tensor | None = None) -> torch.Tensor | None:
        """Runs the backward of the last slice of a batch that has had none.

        Args:
            slices: of the batch.
            gradient: of what `forward` returned; None for 1, in the last stage.

        Returns:
            the gradient of what came into the stage; None in the first.
        """
        done = slices.pop()
        roots, gradients = [done.output], [None if gradient is None else gradient.to(done.output.dtype)]
        for own, leaf in zip(done.own, done.leaves, strict=True):
            # Of the last slice, nobody has read them.
            if leaf.grad is not None:
                roots.append(own)
                gradients.append(leaf.grad)
        # Of a first stage that is frozen, or of its first layers, nothing has a backward.
        depend = [number for number, root in enumerate(roots) if root.requires_grad]
        if depend:
            torch.autograd.backward([roots[number] for number in depend], [gradients[number] for number in depend])
        return None if self.first else done.given.grad


class _Layers(nn.ModuleList):
    """Some layers of a model, under the names that they have in the whole.

    Args:
        layers: all layers.
        numbers: of those that are kept.
    """

    def __init__(self, layers: nn.ModuleList, numbers: range) -> None:
        super().__init__()
        for number in numbers:
            self.add_module(str(number), layers[number])

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


def balanced(layers: int, each: float, head: float, stages: int) -> list[int]:
    """Divides the layers among stages, so that the one that computes longest computes least.

    Args:
        layers: how many there are, at least one for each stage.
        each: what one takes.
        head: what the last stage takes beside its layers.
        stages: how many.
    """
    if stages == 1:
        return [layers]

    def longest(last: int) -> tuple[float, int]:
        # Of equals the most even.
        return max(-(-(layers - last) // (stages - 1)) * each, last * each + head), -last

    last = min(range(1, layers - stages + 2), key=longest)
    others = layers - last
    return [(number + 1) * others // (stages - 1) - number * others // (stages - 1) for number in range(stages - 1)] + [
        last
    ]


def _numbers_of(module: nn.Module) -> int:
    """A product takes as long as there are numbers in its weights."""
    return sum(param.numel() for param in module.parameters())


class _Zeros(nn.Module):
    """Embeds positions as nothing.

    Args:
        width: of the embeddings.
        dtype: of the embeddings.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.dtype = width, dtype

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Zeros, (rows, tokens, width)."""
        return torch.zeros(*positions.shape, self.width, dtype=self.dtype, device=positions.device)


def shifted(labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What is predicted at each token, and how many that are: (rows, length) labels as transformers takes them."""
    following = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
    return following, int((following != _IGNORED).sum())
