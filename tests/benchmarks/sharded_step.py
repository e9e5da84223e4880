"""A step of a model that is sharded over two processes, as a picture: what each computes, gathers, reduces and moves.

    OMP_WAIT_POLICY=passive chrt -f 5 python tests/benchmarks/sharded_step.py FOLDER docs/img/sharded-step.svg

Starts itself by torchrun, in processes of one thread each (gloo). The Llama of `sharding.py` gets a budget that does
not hold its states; the rest is in FOLDER. One step is drawn, once the order of its passes is known; both processes
read one clock. A thread looks every 0.2 ms which gathers have ended; a reduction tells only who waits for it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
from machine_facts import facts
from sharding_contenders import PROCESSES, Trained

from ptm_accel.distributed.ranks import Collectives, Ranks
from ptm_accel.memory.diskio import Lanes
from ptm_accel.optim.arithmetic import Arithmetic

Spans = list[tuple[str, float, float]]
"""What a process did, and from when to when."""

WARM_UP, BUDGET, LOOK_S = 6, "400MiB", 2e-4
WIDTH, LEFT, LANE = 880, 110, 22
LANES = {
    "compute": {"forward": "#7fb3e6", "backward": "#f0a868", "update": "#9b7cc4", "wait for ranks": "#d5d8dc"},
    "gathers": {"gather": "#3d8b6a"},
    "reductions": {"reduction": "#c2571a"},
    "disk": {"read": "#2f74b5", "write": "#8a6d3b"},
}
COLOURS = {kind: colour for lane in LANES.values() for kind, colour in lane.items()}


class Recorder:
    """Notes in `spans` what this process does, from `begin` until `end`, once."""

    def __init__(self) -> None:
        self.spans: Spans = []
        self._open: dict[Collectives, tuple[str, float]] = {}
        self._ends = threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def begin(self) -> None:
        for owner, name, call in (
            (Ranks, "_started", self._start),
            (Collectives, "order", self._order),
            (Arithmetic, "update", lambda original, *given: self.timed("update", original, *given)),
            (Lanes, "_move", lambda original, *given: self.timed(given[2].transfer.direction.value, original, *given)),
        ):
            original = getattr(owner, name)
            setattr(owner, name, lambda *given, original=original, call=call: call(original, *given))
        self._watcher.start()

    def end(self) -> None:
        self._ends.set()
        self._watcher.join()

    def timed(self, kind: str, call: Any, *given: Any) -> Any:
        begin = time.perf_counter()
        result = call(*given)
        self.spans.append((kind, begin, time.perf_counter()))
        return result

    def _start(self, original: Any, *given: Any) -> Collectives:
        begin, started = time.perf_counter(), original(*given)
        self._open[started] = "gather" if given[4].startswith("gathers") else "reduction", begin
        return started

    def _order(self, original: Any, collectives: Collectives) -> None:
        known = self._open.pop(collectives, None)
        self.timed("wait for ranks", original, collectives)
        if known is not None:
            self.spans.append((*known, time.perf_counter()))

    def _watch(self) -> None:
        while not self._ends.wait(LOOK_S):
            for each in list(self._open):
                # Whoever kept the works would keep their memory.
                if all(work.is_completed() for work in each._works) and (known := self._open.pop(each, None)):
                    self.spans.append((*known, time.perf_counter()))


def picture(every: list[Spans]) -> str:
    """Lanes of all processes, one process below the other, on one scale of time, as an SVG."""
    first = min(begin for spans in every for _, begin, _ in spans)
    longest = max(end for spans in every for _, _, end in spans) - first
    scale, y = (WIDTH - LEFT - 10) / longest, 10
    lines = [f'<rect width="{WIDTH}" height="100%" fill="white"/>']
    for rank, spans in enumerate(every):
        for lane, kinds in LANES.items():
            lines.append(f'<text x="4" y="{y + 14}">rank {rank}, {lane}</text>')
            for kind, begin, end in sorted(spans, key=lambda span: list(COLOURS).index(span[0])):
                if kind in kinds:
                    size = f'width="{max((end - begin) * scale, 0.3):.1f}" height="{LANE - 4}"'
                    x = LEFT + (begin - first) * scale
                    lines.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="{kinds[kind]}"/>')
            y += LANE
        y += 14
    lines.append(f'<text x="{LEFT}" y="{y}">0 s</text>')
    lines.append(f'<text x="{WIDTH - 10}" y="{y}" text-anchor="end">{longest:.2f} s</text>')
    for number, (kind, colour) in enumerate(COLOURS.items()):
        box = f'<rect x="{6 + 109 * number}" y="{y + 12}" width="12" height="12" fill="{colour}"/>'
        lines.append(f'{box}<text x="{22 + 109 * number}" y="{y + 22}">{kind}</text>')
    shape = f'viewBox="0 0 {WIDTH} {y + 32}" font-family="sans-serif" font-size="12"'
    title = "<title>A step of a model that is sharded over two processes</title>"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {shape}>', title, *lines, "</svg>"]) + "\n"


def main() -> None:
    folder, path = sys.argv[1:]
    if "RANK" not in os.environ:
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
        subprocess.run([*ranks, __file__, folder, path], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trained = Trained("ptm_accel", argparse.Namespace(dtype="fp32", length=512), BUDGET, folder)
    for _ in range(WARM_UP):
        trained.step()
    recorder = Recorder()
    dist.barrier()
    recorder.begin()
    loss = recorder.timed("forward", lambda: trained.called(input_ids=trained.tokens, labels=trained.tokens).loss)
    recorder.timed("backward", loss.backward)
    for call in (trained.clip, trained.optimizer.step, trained.optimizer.zero_grad):
        call()
    recorder.end()
    every: list[Any] = [None] * PROCESSES
    dist.all_gather_object(every, recorder.spans)
    if dist.get_rank() == 0:
        Path(path).write_text(picture(every), encoding="utf-8")
        print(facts(f"OMP_WAIT_POLICY=passive chrt -f 5 python tests/benchmarks/sharded_step.py {folder} {path}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
