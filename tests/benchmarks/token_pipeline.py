"""TeraPipe's published settings, simulated: sequences in slices beside whole sequences, by a cost model of a V100.

    python tests/benchmarks/token_pipeline.py

Takes seconds, needs no GPU and measures nothing. Prints the result as Markdown.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from ptm_accel.pipeline.scheme import Seconds, best_scheme
from ptm_accel.pipeline.simulate import Work, simulate

LENGTH = 2048
FLOPS = 68e12
"""What a V100 reaches in large products: with it 175B in 48 x 8 takes the published 5.82 s without slices."""
OVERHEAD_S = 1.28e-3
"""What each slice costs a layer's forward beside its products, where the layer is shared by several GPUs (sums over all
of them, small products): with it 175B in 48 x 8 takes the published 1.16 s with slices. All else is foretold.
"""
LEAST_TOKENS = 256
"""A layer of the 1B model takes as long for fewer tokens (published): its kernels wait for their launch."""
NETWORK = 25e9 / 8
"""Bytes a second between machines (p3.16xlarge)."""


@dataclass(frozen=True)
class Setting:
    """One of the paper's.

    Attributes:
        name: of the model.
        layers, width: of the model.
        rows: of the batch, of one pipeline.
        stages: of the pipeline.
        shards: GPUs that share each layer.
        published: speed-up by slices.
    """

    name: str
    layers: int
    width: int
    rows: int
    stages: int
    shards: int
    published: float


SETTINGS = (
    Setting("1B", 24, 2048, 72, 24, 1, 1.0),
    Setting("13B", 40, 5120, 32, 40, 8, 1.40),
    Setting("175B", 96, 12288, 2, 48, 8, 5.02),
    Setting("175B", 96, 12288, 2, 96, 4, 6.75),
)


def forward_s(setting: Setting, rows: int, tokens: int, context: int) -> float:
    """A stage's forward: products with weights, attention to all tokens before, and kernels that take a least time."""
    width = setting.width
    flops = 24 * rows * tokens * width**2 + 4 * rows * tokens * (context + tokens) * width
    least = 24 * LEAST_TOKENS * 2048**2
    shared = OVERHEAD_S if setting.shards > 1 else 0.0
    return setting.layers / setting.stages * (max(flops / setting.shards, least) / FLOPS + shared)


def link_s(setting: Setting, rows: int, tokens: int) -> float:
    """Until the hidden states of a slice have arrived in the next stage, in 16 bits."""
    return rows * tokens * setting.width * 2 / NETWORK


def step_s(setting: Setting, grain: int) -> tuple[float, tuple[tuple[int, tuple[int, ...]], ...]]:
    """A step with the best scheme whose slices are multiples of `grain`."""

    def seconds(rows: int, tokens: int, context: int) -> float:
        # A link that is busy is a stage as well: the program sees the longer of the two.
        return max(3 * forward_s(setting, rows, tokens, context), 2 * link_s(setting, rows, tokens))

    stage: Seconds = seconds
    scheme = best_scheme(stage, rows=setting.rows, length=LENGTH, stages=setting.stages, grain=grain)
    work = []
    for rows, slices in scheme.parts:
        context = 0
        for tokens in slices:
            once = forward_s(setting, rows, tokens, context)
            work.append(Work(once, 2 * once, link_s(setting, rows, tokens)))
            context += tokens
    return simulate(work, setting.stages), scheme.parts


def main() -> None:
    print("| model | stages x shards | rows | whole | sliced | speed-up | published | scheme of the first rows |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for setting in SETTINGS:
        whole, _ = step_s(setting, LENGTH)
        sliced, parts = step_s(setting, 16)
        runs = [f"{tokens} x {len(list(same))}" for tokens, same in groupby(parts[0][1])]
        shown = f"{parts[0][0]}: {', '.join(runs)}"
        print(
            f"| {setting.name} | {setting.stages} x {setting.shards} | {setting.rows} | {whole:.3f} s | {sliced:.3f} s "
            f"| **{whole / sliced:.2f}** | {setting.published:.2f} | {shown} |"
        )


if __name__ == "__main__":
    main()
