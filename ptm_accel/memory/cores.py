"""The cores of this process, and those that threads of our own are to run on.

Where nothing is bound the kernel moves threads to whichever core is free, and nothing is done here. OpenMP can bind its
threads to cores (`OMP_PROC_BIND`, `GOMP_CPU_AFFINITY`, `KMP_AFFINITY`; torch's launcher for Xeons sets them). It then
binds the thread that trains as well, already when torch is imported, and a thread inherits the cores of the one that
starts it: all of ours would share one core with that one, and an update over 16 cores would take the time of one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Set
from functools import cache


def usable_cores() -> frozenset[int]:
    """The cores that this process may run on, also where the calling thread is bound to some of them.

    Nothing that was taken from the whole process (`taskset`, a control group) is among them: OpenMP makes its places
    of what the process had at its start.
    """
    return frozenset(os.sched_getaffinity(0)) | _places()


def bound() -> bool:
    """Whether the calling thread is bound to some of the cores of its process, as threads that it starts would be."""
    return usable_cores() != os.sched_getaffinity(0)


def cores_of_own_threads(count: int, usable: Set[int], taken: Set[int]) -> frozenset[int]:
    """The cores that threads of our own are to run on beside threads that are bound.

    Args:
        count: how many threads want to run at once.
        usable: the cores of the process.
        taken: those that others are bound to.

    Returns:
        Those that nobody is bound to, if there is one for each; all cores otherwise, among which the kernel chooses.
    """
    free = frozenset(usable - taken)
    return free if len(free) >= count else frozenset(usable)


def leave_inherited_cores(count: int, own: Set[int]) -> None:
    """Lets the calling thread, one of our own, run on more than the core of the thread that has started it.

    Without threads that are bound nothing is changed.

    Args:
        count: how many threads like this one want to run at once.
        own: the kernel's numbers of all threads of our own, which are bound by nobody else.
    """
    usable = usable_cores()
    if usable == os.sched_getaffinity(0):
        return
    os.sched_setaffinity(0, cores_of_own_threads(count, usable, _bound_cores(usable, own)))


def _bound_cores(usable: Set[int], own: Set[int]) -> frozenset[int]:
    """The cores of OpenMP's threads, as far as these have begun, and of what has inherited from them."""
    bound: set[int] = set()
    others = {int(name) for name in os.listdir("/proc/self/task")} - own
    for thread in others:
        try:
            cores = os.sched_getaffinity(thread)
        except ProcessLookupError:  # It has ended meanwhile.
            continue
        if cores < usable:
            bound |= cores
    return frozenset(bound)


@cache
def _places() -> frozenset[int]:
    """The cores of OpenMP's places: it makes them at its start, and only where threads are bound."""
    # torch loads its OpenMP, or the one that was preloaded, where all can see it.
    openmp = ctypes.CDLL(None)
    try:
        count = openmp.omp_get_num_places
        size_of, cores_of = openmp.omp_get_place_num_procs, openmp.omp_get_place_proc_ids
    except AttributeError:  # torch without OpenMP: nothing binds its threads.
        return frozenset()
    found: set[int] = set()
    for place in range(count()):
        cores = (ctypes.c_int * size_of(place))()
        cores_of(place, cores)
        found.update(cores)
    return frozenset(found)
