"""One kind of pass: its trace, and its plan in the form that it is carried out in."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from ptm_accel.memory.timeline import Mark
from ptm_accel.schedule.actions import Move
from ptm_accel.schedule.choice import Choice
from ptm_accel.schedule.trace import Recorder, Trace, Use
from ptm_accel.schedule.updates import GRAD_SUFFIX, UpdateTiming, final_gradients
from ptm_accel.schedule.watch import Watch


class Route:
    """One kind of pass. Its accesses are counted without those of the updates that are planned beside it.

    Args:
        recorded: the trace as it was recorded, without updates.
        updates: which updates run beside it.
        choice: the plan; None as long as nothing has been planned.
        capacity_bytes: the budget that it was made for; 0 as long as nothing has been planned.
        watch: tells when such passes are to be planned anew.
        elements: of the largest batch so far, for which the trace has the times.

    Attributes:
        recorded, updates, choice, capacity_bytes, watch, elements: see above.
        count: number of accesses.
        places: the accesses of each tensor, ascending, by its name.
        starts: for each access, what the plan starts up to it: the move, the tensor's name, the access it is due at.
        uses: before which accesses each tensor is used, by its updates too, ascending.
        first: the tensors that are used at its first access or by the updates before it, by name, with that access.
        expected: the tensors that the plan expects to be resident or arriving as the pass begins, by name, each with
            its first access.
        updated: names of the parameters whose updates are in the plan.
        final: names of the parameters whose gradients are whole when they arrive.
        trains: whether there is a backward in it.
    """

    def __init__(
        self,
        recorded: Trace,
        updates: UpdateTiming,
        choice: Choice | None = None,
        capacity_bytes: int = 0,
        watch: Watch | None = None,
        elements: int = 0,
    ) -> None:
        self.recorded = recorded
        self.updates = updates
        self.choice = choice
        self.capacity_bytes = capacity_bytes
        self.elements = elements
        self.watch = Watch() if watch is None else watch
        self.final = frozenset(final_gradients(recorded).values())
        self.trains = any(access.backward for access in recorded.accesses)
        trace = recorded if choice is None else choice.trace
        used_up = (trace.items[access.item].name for access in trace.accesses if access.use is Use.CONSUME)
        self.updated = frozenset(name.removesuffix(GRAD_SUFFIX) for name in used_up)
        self.count = 0
        self.places: dict[str, list[int]] = {}
        self.uses: dict[str, list[int]] = {}
        # How many accesses of the pass itself come before each one of the trace.
        rank: list[int] = []
        for access in trace.accesses:
            name = trace.items[access.item].name
            rank.append(self.count)
            self.uses.setdefault(name, []).append(self.count)
            if not access.update:
                self.places.setdefault(name, []).append(self.count)
                self.count += 1
        self.first = {name: 0 for name, uses in self.uses.items() if not uses[0]}
        plan = None if choice is None else choice.plan
        self.starts: list[list[tuple[Move, str, int]]] = [[] for _ in range(self.count)]
        self.expected: dict[str, int] = {}
        if plan is not None:
            rank += [self.count + before for before in rank]
            for at, actions in zip(rank[: len(plan.starts)], plan.starts, strict=True):
                if at < self.count:
                    self.starts[at] += [(each.move, trace.items[each.item].name, rank[each.due]) for each in actions]
            names = (trace.items[item].name for item in plan.resident | plan.coming)
            self.expected = {name: self.uses[name][0] for name in names}

    def next_use(self, name: str, position: int) -> int:
        """The next access from `position` on that a tensor is used at; that of the next such pass counts from the end.

        What such passes do not use is wanted after all else.
        """
        uses = self.uses.get(name)
        if uses is None:
            return 2 * self.count + 1
        place = bisect_left(uses, position)
        return uses[place] if place < len(uses) else self.count + uses[0]

    @property
    def has_plan(self) -> bool:
        """Whether there is a plan to carry out."""
        return self.choice is not None and self.choice.plan is not None

    @property
    def foretold_s(self) -> float | None:
        """Seconds that such a pass should take; None where the link has not been measured, or nothing is planned."""
        simulated = None if self.choice is None else self.choice.simulated
        return None if simulated is None else simulated.seconds


@dataclass(frozen=True, slots=True)
class Ended:
    """A pass that has ended for the thread that computes; on a device its times may not be known yet.

    Attributes:
        recorder: its accesses.
        route: the route it followed.
        updates: when the updates that concern it ran.
        strays: number of accesses that differed from the trace.
        marks: of its begin, each access, and its end.
        evaluates: whether it is not part of training.
        elements: of its batch.
    """

    recorder: Recorder
    route: Route | None
    updates: UpdateTiming
    strays: int
    marks: list[Mark] = field(default_factory=list)
    evaluates: bool = False
    elements: int = 0
