"""Cost of a slice on this machine, by its tokens and those before it: measured at some points, fitted between.

TeraPipe's cost model (eq. 9 of arXiv 2102.07988): a time for the tokens alone, measured, and a part that is linear in
tokens, context and their product.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ptm_accel.pipeline.stage import Stage

_REPEATS = 3
_LONG_S = 0.3
"""What takes so long is measured well enough by one of them."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a stage's forward and backward of a slice of one number of rows.

    Attributes:
        tokens: lengths that were measured without context, ascending.
        alone_s: what they took.
        context: a0 to a3, of 1, tokens, context and tokens x context.
    """

    tokens: tuple[int, ...]
    alone_s: tuple[float, ...]
    context: tuple[float, float, float, float]

    def seconds(self, tokens: int, before: int) -> float:
        """Cost of a slice.

        Args:
            tokens: of it.
            before: tokens before it.
        """
        if not before:
            return self._alone(tokens)
        a0, a1, a2, a3 = self.context
        return self._alone(tokens) + max(0.0, a0 + a1 * tokens + a2 * before + a3 * tokens * before)

    def _alone(self, tokens: int) -> float:
        """Between two lengths that were measured, on the line through both; what is shorter takes no less."""
        known, times = self.tokens, self.alone_s
        if tokens <= known[0]:
            return times[0]
        at = min(max(bisect.bisect_left(known, tokens), 1), len(known) - 1)
        left, right = known[at - 1], known[at]
        return times[at - 1] + (times[at] - times[at - 1]) * (tokens - left) / (right - left)


def measure(stage: Stage, given: torch.Tensor, labels: torch.Tensor, lengths: Sequence[int]) -> Cost:
    """Measures a stage; gradients are left in its parameters.

    Args:
        stage: of this process.
        given: what comes into it for all tokens: (rows, length) tokens or (rows, length, width) hidden states.
        labels: (rows, length), for the last stage.
        lengths: of the slices to measure, two at least.
    """
    length = given.shape[1]
    lengths = sorted({tokens for tokens in lengths if tokens <= length})
    alone = {tokens: _least(stage, given, labels, tokens, 0) for tokens in lengths}
    rows, values = [], []
    for tokens in lengths:
        for part in (1, 2):
            before = (length - tokens) * part // 2
            if before > 0:
                rows.append([1.0, tokens, before, tokens * before])
                values.append(_least(stage, given, labels, tokens, before) - alone[tokens])
    fitted = [0.0] * 4
    if len(rows) >= len(fitted):
        solution = torch.linalg.lstsq(torch.tensor(rows).double(), torch.tensor(values).double()[:, None]).solution
        fitted = solution.flatten().tolist()
    a0, a1, a2, a3 = fitted
    # By chance a slice may have taken longer than one with more tokens.
    return Cost(tuple(lengths), tuple(accumulate(alone.values(), max)), (a0, a1, a2, a3))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _least(stage: Stage, given: torch.Tensor, labels: torch.Tensor, tokens: int, before: int) -> float:
    """Returns the median of a few times that a slice takes, with one slice of all that is before it."""
    found = []
    for _ in range(_REPEATS):
        slices = stage.begin()
        if before:
            stage.forward(given[:, :before], 0, labels=labels[:, :before], predicted=1)
        part = slice(before, before + tokens)
        begin = _now(given.device)
        made = stage.forward(
            given[:, part], before, labels=labels[:, part], predicted=1, alone=tokens == given.shape[1]
        )
        stage.backward(slices, None if stage.last else torch.ones_like(made))
        found.append(_now(given.device) - begin)
        if min(found) > _LONG_S:
            break
    stage.begin()
    return sorted(found)[len(found) // 2]
