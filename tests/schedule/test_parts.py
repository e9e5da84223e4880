"""What is said of where the time of a step goes."""

from __future__ import annotations

from ptm_accel.schedule.parts import Parts, StepParts

TWO = StepParts(steps=2, steps_s=10.0, sums=Parts(4.0, 1.0, 0.5, 1.5, 2.0, 0.25))


def test_parts_and_the_rest_are_a_step() -> None:
    rows = TWO.rows(on_thread=True, ranks=False)
    assert rows == {
        "compute": "2.000 s in forward and backward, 0.500 s in updates",
        "waited": "0.250 s for pages",
        "own work": "1.000 s of ptm_accel on the thread that trains; 0.500 s for all else",
        "kernel": "of all these, that thread was in the system's kernel for 0.125 s",
    }
    rows = TWO.rows(on_thread=True, ranks=True)
    assert rows["waited"] == "0.250 s for pages, 0.750 s for other ranks"


def test_of_a_device_only_its_own_time_is_known() -> None:
    queued = StepParts(steps=2, steps_s=10.0, sums=Parts(4.0, 1.0, 0.5))
    assert queued.rows(on_thread=False, ranks=True) == {
        "compute": "2.000 s in forward and backward, 0.500 s in updates",
        "waited": "0.250 s for pages",
        "the rest": "2.250 s outside of forward, backward and updates",
    }


def test_without_a_step_nothing_is_said() -> None:
    assert StepParts().rows(on_thread=True, ranks=True) == {}
    sums = Parts(0.7, 0.2, 0.1)
    exact = StepParts(steps=1, steps_s=sum(sums) - 1e-9, sums=sums)
    assert exact.rows(on_thread=True, ranks=False)["own work"].endswith("; 0.000 s for all else")
