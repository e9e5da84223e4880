"""Every error a user can meet, under one base class.

Each message has three parts: what failed (with its name), the numbers (asked, used, limit), and what to set.
Each class is also the standard exception that callers already catch (`ValueError`, `OSError`, `MemoryError`, ...).
"""

from __future__ import annotations

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 2


def shown(value: object) -> str:
    """Returns a value that a user gave as messages show it: shortened if it is long or deep."""
    # Python refuses to write very long numbers out.
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    return _SHORT.repr(value)


class PTMError(Exception):
    """Base class of all errors raised by ptm_accel."""


class ConfigError(PTMError, ValueError):
    """A configuration that cannot be used: unknown key, value that does not parse, contradiction."""


class UnsupportedError(PTMError, ValueError):
    """A combination that is refused by name, before anything is changed."""


class BudgetError(PTMError, MemoryError):
    """A memory or disk budget that does not suffice; the message gives asked, used, limit and the option to set."""


class DeviceBudgetError(BudgetError, RuntimeError):
    """The device budget does not suffice.

    Also a `RuntimeError` whose message contains " out of memory.", so `auto_find_batch_size` tries a smaller batch:
    on a device, unlike in host memory, a smaller batch leaves more room for pages.
    """


class DiskError(PTMError, OSError):
    """A failed transfer to or from the scratch files; carries `errno` and `filename`."""


class PagedModelError(PTMError, TypeError):
    """An operation that cannot work on a model whose parameters are on pages (deepcopy, pickle, dtype change)."""


class StaleGraphError(PTMError, RuntimeError):
    """A parameter was changed between a forward and its backward, or another tensor that backward needs."""


class LostStepError(PTMError, RuntimeError):
    """A save after an update that has failed: optimizer and weights are between two steps."""


class CheckpointError(PTMError, ValueError):
    """A checkpoint that is incomplete, damaged, or of another model or optimizer."""


class ScheduleError(PTMError, ValueError):
    """A plan that cannot be made, since one access alone needs more than the budget."""
