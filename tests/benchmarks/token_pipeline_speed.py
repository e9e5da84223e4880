"""A pipeline of two processes on one long sequence, sliced beside whole, pair by pair.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive torchrun --nproc_per_node 2 tests/benchmarks/token_pipeline_speed.py

Each process has one thread and half of the layers of a Llama. The slices are those of the dynamic program, by what
slices take in the slower of the two processes. Prints the result as Markdown.
"""

from __future__ import annotations

import os
import statistics
import time

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

LENGTH, WIDTH, LAYERS, VOCABULARY, PAIRS, GRAIN = 2048, 256, 8, 2048, 11, 32


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
            pipeline.step(batch, cut)
            dist.barrier()
            if number:
                times[name].append(time.perf_counter() - begin)
            stage.model.zero_grad()
    if rank == 0:
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
