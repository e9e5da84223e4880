"""Counts of a run: peaks per tier, bytes per link, faults, stalls."""

from __future__ import annotations

import operator
import resource
import statistics
import time
from dataclasses import dataclass, field, fields, replace

from ptm_accel.distributed.ranks import ShardStats
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.budget import Tier
from ptm_accel.memory.setup import Memory
from ptm_accel.memory.timeline import Span
from ptm_accel.optim.staleness import Staleness
from ptm_accel.schedule.bound import Resource, StepCost, lower_bound
from ptm_accel.schedule.parts import Parts, StepParts
from ptm_accel.schedule.tally import Tally
from ptm_accel.units import format_bytes

_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Reading:
    """Running totals of training at one moment; differences of two readings describe what lies between."""

    steps: int
    timed_tokens: int
    timed_s: float
    faults: int
    hits: int
    loaded_bytes: int
    stored_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    stall_s: float
    own_s: float
    gathered_bytes: int
    reduced_bytes: int
    received_bytes: int
    network_s: float
    tally: Tally
    # It grows by itself.
    kernel_s: float = field(compare=False)


_DAY_S = 24 * 60 * 60
_WARM_UP = 3
"""Steps before plans are carried out and memory has been touched; the summary's times leave them out."""
_MOVES = tuple(
    field.name for field in fields(Reading) if field.name not in ("steps", "timed_tokens", "timed_s", "tally")
)
"""The totals that evaluations add to as well; their passes are not in the tally."""


@dataclass(slots=True)
class TokenCount:
    """Tokens of all batches of training, of all processes; added up by whoever has the batches.

    Attributes:
        total: how many so far, padding included.
    """

    total: int = 0


class Metrics:
    """Reads the counters of one engine's memory, which count all models on the same tiers.

    Args:
        memory: the tiers.
        tally: what passes and updates take.

    Attributes:
        steps: how many have ended.
        tokens: of batches of text.
        rates: of the link between the compute tier and its backing store, where they are known.
        disk_rates: of the disk below host memory that is the backing store of a device, where they are known.
        shards: what ranks have gathered and reduced, where the model is sharded over them.
        staleness: how many steps parameters lack, where updates are lock-free.
    """

    def __init__(self, memory: Memory, tally: Tally | None = None) -> None:
        self._memory = memory
        self._tally = tally if tally is not None else Tally()
        self.rates: LinkRates | None = None
        self.disk_rates: LinkRates | None = None
        self.shards: ShardStats | None = None
        self.staleness: Staleness | None = None
        self._logged_staleness = (0, 0)
        self.steps = 0
        self.tokens = TokenCount()
        # Of steps whose time is known alone: the first one, and one after an evaluation or a save, is not.
        self._timed_s, self._timed_tokens, self._tokens_before = 0.0, 0, 0
        self._ended_s: float | None = None
        self._steps_s: list[float] = []
        self._made_of = StepParts()
        # What evaluations have moved, and the totals when the one began that is under way.
        self._left_out: dict[str, float] = dict.fromkeys(_MOVES, 0)
        self._evaluation: Reading | None = None
        self._evaluates_from_s = 0.0
        self._last = self.read()
        self._warm: Reading | None = None

    def step_ended(self) -> None:
        """Counts a step of training."""
        now = time.perf_counter()
        step_s = None if self._ended_s is None else now - self._ended_s
        if step_s is not None:
            self._steps_s.append(step_s)
            self._timed_s += step_s
            self._timed_tokens += self.tokens.total - self._tokens_before
        if self._tally.passes:
            self._note_parts(step_s)
        self._tokens_before = self.tokens.total
        self._ended_s = now
        self.steps += 1
        if self.steps == _WARM_UP:
            self._warm = self.read()
            self._steps_s.clear()
            self._made_of = StepParts(before=self._made_of.before)

    def _note_parts(self, step_s: float | None) -> None:
        """Adds to what steps are made of, where their passes are counted."""
        known, totals = self._made_of, self._parts(self.read())
        if step_s is not None and known.before is not None:
            known.steps += 1
            known.steps_s += step_s
            known.sums = Parts(*map(operator.add, known.sums, map(operator.sub, totals, known.before)))
        known.before = totals

    def rest(self) -> None:
        """Leaves the time until the next step out of that step."""
        self._ended_s = None

    def leave_out(self, evaluates: bool) -> None:
        """Begins or ends an evaluation, whose moves and time are left out of all figures but the peaks.

        Args:
            evaluates: whether an evaluation runs from now on; the same value twice changes nothing.
        """
        if evaluates and self._evaluation is None:
            self._evaluation, self._evaluates_from_s = self._totals(), time.perf_counter()
        elif not evaluates and self._evaluation is not None:
            if self._ended_s is not None:
                self._ended_s += time.perf_counter() - max(self._evaluates_from_s, self._ended_s)
            before, now = self._evaluation, self._totals()
            for name in _MOVES:
                self._left_out[name] += getattr(now, name) - getattr(before, name)
            self._evaluation = None

    def read(self) -> Reading:
        """Returns the totals now, without those of evaluations."""
        now = self._totals()
        seen = self._evaluation or now
        return replace(now, **{name: getattr(seen, name) - self._left_out[name] for name in _MOVES})

    def _totals(self) -> Reading:
        pool, disk = self._memory.pool, self._memory.disk
        stats, timeline, shards = pool.stats, pool.timeline, self.shards or ShardStats()
        return Reading(
            steps=self.steps,
            timed_tokens=self._timed_tokens,
            timed_s=self._timed_s,
            faults=stats.faults,
            hits=stats.hits,
            loaded_bytes=stats.loaded_bytes,
            stored_bytes=stats.stored_bytes,
            disk_read_bytes=disk.bytes_read if disk is not None else 0,
            disk_written_bytes=disk.bytes_written if disk is not None else 0,
            # A device waits by itself, and what a thread waits for leaves it without work.
            stall_s=stats.stall_s if timeline is None else timeline.spent_s(Span.WAIT),
            own_s=stats.own_s,
            gathered_bytes=shards.gathered_bytes,
            reduced_bytes=shards.reduced_bytes,
            received_bytes=shards.received_bytes,
            network_s=shards.waited_s,
            tally=replace(self._tally),
            kernel_s=resource.getrusage(resource.RUSAGE_THREAD).ru_stime,
        )

    def peaks(self) -> dict[Tier, int]:
        """Returns the most bytes that were charged to each tier, so far."""
        return {tier: budget.peak_bytes for tier, budget in self._memory.budgets.items()}

    def since_last(self) -> dict[str, float]:
        """Keys for the training log: peaks so far, and what moved per step since the last call."""
        now, before = self.read(), self._last
        self._last = now
        steps = max(now.steps - before.steps, 1)
        keys: dict[str, float] = {f"ptm_peak_{t.value}_gib": round(n / _GIB, 4) for t, n in self.peaks().items()}
        keys["ptm_faults"] = round((now.faults - before.faults) / steps, 2)
        keys["ptm_hits"] = round((now.hits - before.hits) / steps, 2)
        moved = ["loaded", "stored", *(["disk_read", "disk_written"] if self._memory.disk is not None else [])]
        moved += ["gathered", "reduced"] if self.shards is not None else []
        for name in moved:
            nbytes = getattr(now, f"{name}_bytes") - getattr(before, f"{name}_bytes")
            keys[f"ptm_{name}_gib"] = round(nbytes / steps / _GIB, 4)
        if tokens_s := self._tokens_s(before, now):
            keys["ptm_tokens_s"] = round(tokens_s, 1)
        keys["ptm_stall_s"] = round((now.stall_s - before.stall_s) / steps, 4)
        if self._memory.pool.timeline is None:
            keys["ptm_own_s"] = round((now.own_s - before.own_s) / steps, 4)
        if self.shards is not None:
            keys["ptm_network_s"] = round((now.network_s - before.network_s) / steps, 4)
        if (staleness := self.staleness) is not None:
            keys["ptm_staleness"] = round(staleness.mean_since(*self._logged_staleness), 2)
            self._logged_staleness = staleness.lacking, staleness.reads
        bound = self._bound(before, now)
        if bound is not None:
            keys["ptm_bound_s"] = round(bound[0], 4)
        return keys

    def _tokens_s(self, before: Reading, now: Reading) -> float:
        """Tokens that the processes took in a second of steps between two readings; 0 where that is not known."""
        seconds = now.timed_s - before.timed_s
        return (now.timed_tokens - before.timed_tokens) / seconds if seconds > 0 else 0.0

    def _bound(self, before: Reading, now: Reading, known: StepParts | None = None) -> tuple[float, Resource] | None:
        """The least that a step between two readings could have taken, and by what; None where that is not known.

        Args:
            before: the first reading.
            now: the second.
            known: of those steps, the ones beside whose time the bound is shown.
        """
        steps = now.steps - before.steps
        first, last = before.tally, now.tally
        if self.rates is None or steps <= 0 or last.passes == first.passes:
            return None
        loaded, stored = now.loaded_bytes - before.loaded_bytes, now.stored_bytes - before.stored_bytes
        read, written = now.disk_read_bytes - before.disk_read_bytes, now.disk_written_bytes - before.disk_written_bytes
        link: LinkRates | None = self.rates
        disk = self.disk_rates
        if self._memory.device is None:
            # What is loaded comes from disk.
            link, disk, read, written = None, self.rates, loaded, stored
        if known is None or not known.steps:
            known = StepParts(steps, sums=Parts(*map(operator.sub, self._parts(now), self._parts(before))))
        each = known.mean
        cost = StepCost(
            forward_s=max(each.compute_s, 0.0),
            backward_s=0.0,
            update_s=each.update_s,
            host_s=(last.host_s - first.host_s) / steps,
            in_bytes=loaded / steps,
            out_bytes=stored / steps,
            read_bytes=read / steps,
            written_bytes=written / steps,
            network_s=(now.network_s - before.network_s) / steps,
        )
        return lower_bound(cost, link, disk)

    def _parts(self, now: Reading) -> Parts:
        """What time has gone to."""
        tally = now.tally
        if self._memory.pool.timeline is not None:
            return Parts(tally.compute_s, tally.update_s, now.stall_s)
        # To plans, by the clock of the thread, our own work is a part of what passes compute, and so is waiting for
        # other ranks.
        compute_s = tally.compute_s - tally.own_s - now.network_s
        return Parts(compute_s, tally.update_s, now.stall_s, now.network_s, now.own_s, now.kernel_s)

    # ---- the summary -------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """A short table for the end of training."""
        now = self.read()
        steps = max(now.steps, 1)
        times = self.times()
        rows = {**self._tiers(now, steps), "pages": self._pages(now, steps)}
        if "waited" not in times:
            # Otherwise it is among them.
            rows["pages"] += f", {now.stall_s / steps:.3f} s waited for"
        if self.shards is not None:
            rows["ranks"] = (
                f"{format_bytes(now.gathered_bytes // steps)} gathered and {format_bytes(now.reduced_bytes // steps)} "
                f"reduced in a step, {now.network_s / steps:.3f} s waited for{self._hidden(now)}"
            )
        if (staleness := self.staleness) is not None:
            rows["late updates"] = (
                f"parameters lacked {staleness.mean_since(0, 0):.2f} steps in a forward, {staleness.most} at most; "
                f"{staleness.waited_s / steps:.3f} s waited for in a step"
            )
        rows |= times
        width = max(map(len, rows))
        return "\n".join([self._head(now), *(f"  {name:{width}}  {text}" for name, text in rows.items())])

    def _head(self, now: Reading) -> str:
        """Steps, their time, tokens."""
        text = f"{now.steps} steps"
        if self._warm is None or not self._steps_s:
            return text
        # Evaluations and saves are no part of it. A step of several kinds is far from the mean.
        text += f" of {statistics.mean(self._steps_s):.3f} s (median {statistics.median(self._steps_s):.3f} s)"
        tokens_s = self._tokens_s(self._warm, now)
        return text + (f", {tokens_s:,.0f} tokens/s" if tokens_s else "")

    def _tiers(self, now: Reading, steps: int) -> dict[str, str]:
        pool, budgets = self._memory.pool, self._memory.budgets
        limits = {tier: budget.capacity_bytes for tier, budget in budgets.items()}
        limits[pool.budget.tier] = pool.admission.limit_bytes
        rows = {
            tier.value: f"at most {format_bytes(nbytes)} of {format_bytes(limits[tier])}"
            for tier, nbytes in self.peaks().items()
        }
        if self._memory.disk is not None:
            rows[Tier.DISK.value] += (
                f"; {format_bytes(now.disk_read_bytes // steps)} read and "
                f"{format_bytes(now.disk_written_bytes // steps)} written in a step{self._a_day(now)}"
            )
        return rows

    def _pages(self, now: Reading, steps: int) -> str:
        hits, faults = now.hits / steps, now.faults / steps
        return f"{hits:.1f} prefetched and {faults:.1f} loaded late in a step"

    def _a_day(self, now: Reading) -> str:
        """Says what steps like these write to the disk in a day."""
        warm = self._warm
        if warm is None or not self._steps_s:
            return ""
        written = (now.disk_written_bytes - warm.disk_written_bytes) / max(now.steps - warm.steps, 1)
        return f", {format_bytes(int(written / statistics.mean(self._steps_s) * _DAY_S))} written in a day of this"

    def times(self) -> dict[str, str]:
        """Returns what a step takes, its lower bound, and a pass beside its prediction; without what is not known."""
        if self._warm is None or not self._steps_s:
            return {}
        now = self.read()
        bound, reason = self._bound(self._warm, now, self._made_of) or (0.0, None)
        if not bound or reason is None:
            return {}
        # The bound is a mean over all steps: beside a median, steps of several kinds would seem to go below it.
        times = statistics.mean(self._steps_s) / bound
        on_thread = self._memory.pool.timeline is None
        rows = self._made_of.rows(on_thread=on_thread, ranks=self.shards is not None)
        rows["lower bound"] = f"{bound:.3f} s ({reason.value}); a step takes {times:.2f} times that"
        first, last = self._warm.tally, now.tally
        if passes := last.foretold - first.foretold:
            took, said = last.foretold_took_s - first.foretold_took_s, last.foretold_s - first.foretold_s
            rows["plan"] = f"a forward and backward took {took / passes:.3f} s, predicted {said / passes:.3f} s"
        return rows

    def _hidden(self, now: Reading) -> str:
        """Says at which rate of the network ranks would not be waited for: what they send, in the rest of a step."""
        warm = self._warm
        # A device waits by itself, in its own time.
        if warm is None or not self._steps_s or self._memory.pool.timeline is not None:
            return ""
        steps = now.steps - warm.steps
        rest_s = statistics.mean(self._steps_s) - (now.network_s - warm.network_s) / steps
        received = (now.received_bytes - warm.received_bytes) / steps
        return f" (hidden, at best, from {format_bytes(int(received / rest_s))}/s on)" if rest_s > 0 else ""
