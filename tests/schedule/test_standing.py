"""What is said of a plan, layer by layer."""

from __future__ import annotations

import re
from dataclasses import replace

from ptm_accel.hardware.profile import LinkRates
from ptm_accel.schedule.choice import choose_plan
from ptm_accel.schedule.standing import describe
from ptm_accel.schedule.trace import Access, Item, Trace, Use

NAMES = ["embed.weight", *(f"model.layers.{number}[1]" for number in range(6)), "lm_head.weight"]
SIZE = 100


def recorded() -> Trace:
    items = [Item(f"{name}{end}", SIZE) for end in ("", ".grad") for name in NAMES]
    count = len(NAMES)
    accesses = [Access(number, Use.READ, 0.001) for number in range(count)]
    for number in reversed(range(count)):
        accesses += [Access(number, Use.READ, 0.001, backward=True)]
        accesses += [Access(count + number, Use.CREATE, 0.0, backward=True)]
    return Trace(None, tuple(items), tuple(accesses))


def said(capacity: int, **more: float) -> str:
    updates = {name: [Item(f"{name}.exp_avg", SIZE), Item(f"{name}.grad", SIZE)] for name in NAMES}
    rates = LinkRates(1e5, 1e5, 1e5)
    choice = choose_plan(
        recorded(), capacity_bytes=capacity, updates=updates, repeats=True, rates=rates, update_s=1e-6, **more
    )
    text = describe(choice, recorded())
    assert text is not None
    return text


def test_with_room_for_all_everything_stays() -> None:
    assert said(100 * SIZE) == (
        "parameters that stay: model.layers.0-5, embed.weight, lm_head.weight; that leave: none; "
        "optimizer state that stays: 800 B of 800 B"
    )


def test_with_less_room_layers_leave() -> None:
    text = said(22 * SIZE)
    left = re.search(r"that leave: model\.layers\.([\d,-]+)", text)
    assert left is not None, text
    stays = re.search(r"state that stays: (\d+) B of 800 B", text)
    assert stays is not None, text
    assert int(stays[1]) < 800


def test_what_is_updated_on_the_cpu_is_named() -> None:
    assert "; updated on the CPU: model.layers." in said(10 * SIZE, host_s=1e-9)


def test_without_a_plan_nothing_is_said() -> None:
    choice = choose_plan(recorded(), capacity_bytes=9 * SIZE, updates={}, repeats=True, rates=None, update_s=0.0)
    assert describe(replace(choice, plan=None), recorded()) is None
