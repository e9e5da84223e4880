"""One kind of pass: its trace, its plan, and the next use of each tensor in it."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

from ptm_accel.memory.budget import Tag
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.memory.timeline import Mark
from ptm_accel.schedule.actions import Plan
from ptm_accel.schedule.choice import Choice, Way
from ptm_accel.schedule.simulate import Simulation
from ptm_accel.schedule.trace import Recorder, Trace, Use
from ptm_accel.schedule.updates import GRAD_SUFFIX, Updates, final_gradients
from ptm_accel.schedule.watch import Watch


@dataclass(slots=True)
class Route:
    """One kind of pass.

    Attributes:
        trace: its accesses, with updates.
        plan: what to start at each access; None where none can be made.
        capacity_bytes: the budget that the plan was made for; 0 as long as nothing has been planned.
        recorded: the trace as it was recorded, without updates.
        updates: which updates run beside it.
        simulated: the simulated execution of the plan; None where the link has not been measured.
        on_host: names of the parameters that the plan updates on the CPU beside a device.
        way: how the plan divides the budget.
        least_s: see `Choice`.
        places: the accesses of each item, ascending, by the item's name.
        own: of those, the ones of the pass itself.
        kept: names of the tensors that the plan pins.
        updated: names of the parameters whose updates are in the plan.
        final: names of the parameters whose gradients are whole when they arrive.
        rank: number of accesses of the pass itself before each access; the last entry is the total.
        made_next: for each access, those right behind it that create a tensor (`Trace.made_next`).
        trains: whether there is a backward in it.
        watch: compares the time of such passes with the simulated one.
    """

    trace: Trace
    plan: Plan | None
    capacity_bytes: int
    recorded: Trace
    updates: Updates = Updates.APART
    simulated: Simulation | None = None
    on_host: frozenset[str] = frozenset()
    way: Way | None = None
    least_s: float = math.inf
    places: dict[str, list[int]] = field(default_factory=dict)
    own: dict[str, list[int]] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    updated: frozenset[str] = frozenset()
    final: frozenset[str] = frozenset()
    rank: list[int] = field(default_factory=lambda: [0])
    made_next: list[tuple[int, ...]] = field(default_factory=list)
    trains: bool = False
    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        items = self.trace.items
        self.kept = frozenset(items[item].name for item in self.plan.kept) if self.plan is not None else frozenset()
        used_up = (items[access.item].name for access in self.trace.accesses if access.use is Use.CONSUME)
        self.updated = frozenset(name.removesuffix(GRAD_SUFFIX) for name in used_up)
        self.trains = any(access.backward for access in self.recorded.accesses)
        self.final = frozenset(final_gradients(self.recorded).values())
        self.made_next = self.trace.made_next()
        for index, access in enumerate(self.trace.accesses):
            self.places.setdefault(items[access.item].name, []).append(index)
            if not access.update:
                self.own.setdefault(items[access.item].name, []).append(index)
            self.rank.append(self.rank[-1] + (not access.update))

    @property
    def choice(self) -> Choice | None:
        """What was chosen for it, if a plan has been."""
        if self.way is None:
            return None
        return Choice(self.way, self.trace, self.plan, self.simulated, self.on_host, self.least_s)

    def due(self, position: int) -> int:
        """The next access of the pass itself, from `position` on."""
        accesses = self.trace.accesses
        while position < len(accesses) and accesses[position].update:
            position += 1
        return position

    def next_use(self, tensor: PagedTensor, position: int) -> int:
        """The next use of a tensor from `position` on: an access of this pass, or a number beyond them.

        Tensors of updates are in the trace if updates run beside the pass; otherwise they are used right after it.
        Parameters are used by the pass after it.
        """
        if tensor.name in self.kept:
            # Evicted last.
            return position
        count = len(self.trace.accesses)
        places = self.places.get(tensor.name)
        if places is None:
            # Where updates come after several passes, their tensors are used after the parameters of the next.
            far = tensor.tag in (Tag.STATE, Tag.MASTER) and self.trace is self.recorded
            return 2 * (count + 1) if far else count
        at = bisect_left(places, position)
        if at < len(places):
            return places[at]
        first = self.trace.accesses[places[0]]
        if first.use is Use.CREATE and first.update:
            return self.trace.made_anew + places[0]
        if tensor.tag is Tag.GRAD and not first.update:
            return count
        return count + 1 + places[0]

    def next_own(self, tensor: PagedTensor, position: int) -> int:
        """The next access to a tensor by the pass itself, from `position` on; the number of all if there is none."""
        own = self.own.get(tensor.name, [])
        at = bisect_left(own, position)
        return own[at] if at < len(own) else len(self.trace.accesses)


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
    """

    recorder: Recorder
    route: Route | None
    updates: Updates
    strays: int
    marks: list[Mark]
    evaluates: bool
