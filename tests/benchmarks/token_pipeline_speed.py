"""A pipeline of two processes on one long sequence, sliced beside whole, pair by pair.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive torchrun --nproc_per_node 2 tests/benchmarks/token_pipeline_speed.py

Each process has one thread and half of the layers of a Llama. The slices are those of the dynamic program, by what
slices take in the slower of the two processes. Prints the result as Markdown;
given the path of an SVG, draws a step of each kind.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
from machine_facts import facts
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.pipeline.cost import measure
from ptm_accel.pipeline.runner import Pipeline
from ptm_accel.pipeline.scheme import best_scheme
from ptm_accel.pipeline.simulate import Work, simulate
from ptm_accel.pipeline.stage import Stage, shifted

Spans = list[tuple[str, float, float]]
"""What a stage did, and from when to when."""

LENGTH, WIDTH, LAYERS, VOCABULARY, PAIRS, GRAIN = 2048, 256, 8, 2048, 11, 32


def traced(pipeline: Pipeline, batch: dict[str, torch.Tensor], cut: Sequence[int]) -> list[Spans]:
    """What all stages do in a step, by one clock that all processes of a machine share."""
    spans: Spans = []
    stage = pipeline.stage
    kept = {"forward": stage.forward, "backward": stage.backward}

    def noted(name: str) -> Callable[..., Any]:
        def call(*given: Any, **how: Any) -> Any:
            begin = time.perf_counter()
            made = kept[name](*given, **how)
            spans.append((name, begin, time.perf_counter()))
            return made

        return call

    for name in kept:
        setattr(stage, name, noted(name))
    dist.barrier()
    pipeline.step(batch, [(1, cut)])
    for name in kept:
        delattr(stage, name)
    stage.model.zero_grad()
    found: list[Any] = [None, None]
    dist.all_gather_object(found, spans)
    return found


def picture(steps: dict[str, list[Spans]]) -> str:
    """Both steps as lanes of one process each, on one scale of time, as an SVG."""
    colours = {"forward": "#7fb3e6", "backward": "#f0a868"}
    begins = {name: min(span[1] for lane in lanes for span in lane) for name, lanes in steps.items()}
    longest = max(span[2] - begins[name] for name, lanes in steps.items() for lane in lanes for span in lane)
    lines = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 230" font-family="sans-serif" font-size="12">']
    lines.append("<title>A step of a pipeline of two stages, whole and in slices of tokens</title>")
    lines.append('<rect width="760" height="230" fill="white"/>')
    y = 20
    for name, lanes in steps.items():
        for rank, lane in enumerate(lanes):
            lines.append(f'<text x="4" y="{y + 22}">{name}, stage {rank}</text>')
            for kind, begin, end in lane:
                x, width = (610 * seconds / longest for seconds in (begin - begins[name], end - begin))
                lines.append(
                    f'<rect x="{120 + x:.1f}" y="{y}" width="{width:.1f}" height="36" fill="{colours[kind]}" '
                    'stroke="white"/>'
                )
            y += 42
        y += 10
    lines.append(
        f'<text x="120" y="{y + 12}">0 s</text><text x="730" y="{y + 12}" text-anchor="end">{longest:.1f} s</text>'
    )
    lines += [
        f'<rect x="{300 + 130 * number}" y="{y}" width="14" height="14" fill="{colour}"/>'
        f'<text x="{320 + 130 * number}" y="{y + 12}">{kind}</text>'
        for number, (kind, colour) in enumerate(colours.items())
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 704, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, use_cache=False, max_position_embeddings=LENGTH, **sizes)
    stage = Stage(LlamaForCausalLM(config), rank, 2)
    pipeline = Pipeline(stage, WIDTH, torch.float32, torch.device("cpu"))
    ids = torch.randint(0, VOCABULARY, (1, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    labels, _ = shifted(ids)
    given = ids if stage.first else torch.randn(1, LENGTH, WIDTH)
    cost = measure(stage, given, labels, [32, 64, 128, 256, 512, 1024, LENGTH])
    told: list = [None, None]
    dist.all_gather_object(told, cost)

    def seconds(rows: int, tokens: int, before: int) -> float:
        return max(each.seconds(tokens, before) for each in told)

    scheme = best_scheme(seconds, rows=1, length=LENGTH, stages=2, grain=GRAIN)
    ((_, slices),) = scheme.parts
    times: dict[str, list[float]] = {"whole": [], "sliced": []}
    for number in range(PAIRS + 1):
        order = [("whole", (LENGTH,)), ("sliced", slices)]
        for name, cut in order if number % 2 else order[::-1]:
            dist.barrier()
            begin = time.perf_counter()
            pipeline.step(batch, [(1, cut)])
            dist.barrier()
            if number:
                times[name].append(time.perf_counter() - begin)
            stage.model.zero_grad()
    steps = {name: traced(pipeline, batch, cut) for name, cut in (("whole", (LENGTH,)), ("sliced", slices))}
    if rank == 0:
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(picture(steps), encoding="utf-8")
        # Of a slice, a third is its forward; each stage takes what was measured there.
        foretold = {}
        for name, cut in (("whole", (LENGTH,)), ("sliced", slices)):
            work, before = [], 0
            for tokens in cut:
                took = seconds(1, tokens, before)
                work.append(Work(took / 3, took * 2 / 3))
                before += tokens
            foretold[name] = simulate(work, 2)
        ratio = statistics.median(w / s for w, s in zip(times["whole"], times["sliced"], strict=True))
        print(facts("OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 tests/benchmarks/token_pipeline_speed.py"))
        print(f"* model: Llama, {LAYERS} layers of width {WIDTH}, one row of {LENGTH} tokens; {PAIRS} pairs\n")
        print("| | median | simulated | simulated / median |\n| --- | --- | --- | --- |")
        for name in times:
            median = statistics.median(times[name])
            print(f"| {name} | {median:.3f} s | {foretold[name]:.3f} s | {foretold[name] / median:.2f} |")
        simulated = foretold["whole"] / foretold["sliced"]
        print(f"\nSliced is **{ratio:.2f}** times as fast (median of pairs; simulated {simulated:.2f}).")
        print(f"Slices: {list(slices)}.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
