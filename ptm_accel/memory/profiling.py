"""Ranges in torch's profiler, so that its trace says which block a copy or an update is for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch.autograd.profiler

Owner = TypeVar("Owner")
Subject = TypeVar("Subject")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")
Method = Callable[Concatenate[Owner, Subject, Rest], Result]


def ranged(
    what: str, name: Callable[[Subject], str]
) -> Callable[[Method[Owner, Subject, Rest, Result]], Method[Owner, Subject, Rest, Result]]:
    """Makes calls of a method ranges `ptm_accel: WHAT NAME` while a profiler runs.

    Args:
        what: what the method does.
        name: of what it is called with first.
    """

    def decorate(method: Method[Owner, Subject, Rest, Result]) -> Method[Owner, Subject, Rest, Result]:
        @functools.wraps(method)
        def call(self: Owner, subject: Subject, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
            # A range costs microseconds also where nobody looks.
            if not torch.autograd.profiler._is_profiler_enabled:
                return method(self, subject, *args, **kwargs)
            with torch.autograd.profiler.record_function(f"ptm_accel: {what} {name(subject)}"):
                return method(self, subject, *args, **kwargs)

        return call

    return decorate
