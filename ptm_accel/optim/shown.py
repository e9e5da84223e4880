"""`optimizer.state` of an optimizer on pages: reads and writes what is on pages, as if it were a dictionary.

Counting, naming and asking what is there brings nothing in. A full-size tensor comes in when it is asked for by name,
and is the optimizer's own, as in torch: it may be changed in place, and stays as long as somebody holds it. What is
assigned is copied onto pages. What is not of a parameter on pages is in an ordinary dictionary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

from ptm_accel.errors import PagedModelError, UnsupportedError
from ptm_accel.optim.units import ParamState

if TYPE_CHECKING:
    from ptm_accel.optim.states import States

_NONE = object()


class ShownEntries(MutableMapping[str, Any]):
    """What an optimizer keeps for one parameter.

    Args:
        kept: what is shown.
        states: where it is kept.
        settle: carries out what is left of the last step.

    Attributes:
        kept: see above; something else once it has been removed from the optimizer's state.
    """

    __slots__ = ("__weakref__", "_settle", "_states", "kept")

    def __init__(self, kept: ParamState, states: States, settle: Callable[[], None]) -> None:
        self.kept = kept
        self._states = states
        self._settle = settle

    def __getitem__(self, key: str) -> Any:
        self._settle()
        tensor = self.kept.paged.get(key)
        return self.kept.small[key] if tensor is None else self._states.pool.handouts.give(tensor)

    def __setitem__(self, key: str, value: Any) -> None:
        self._settle()
        self._states.assign(self.kept, key, value)

    def __delitem__(self, key: str) -> None:
        self._settle()
        self._states.remove(self.kept, key)

    def __contains__(self, key: object) -> bool:
        self._settle()
        return key in self.kept.paged or key in self.kept.small

    def __iter__(self) -> Iterator[str]:
        self._settle()
        return iter([*self.kept.small, *self.kept.paged])

    def __len__(self) -> int:
        self._settle()
        return len(self.kept.small) + len(self.kept.paged)

    def copy(self) -> dict[str, Any]:
        """As `dict.copy`: an ordinary dictionary of the same tensors, all of which stay in memory with it."""
        return dict(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _not_pickled(len(self))

    def __repr__(self) -> str:
        paged = {key: f"<{tuple(t.shape)} of {t.dtype} on pages>" for key, t in self.kept.paged.items()}
        return repr({**self.kept.small, **paged})


class ShownState(MutableMapping[Any, Any]):
    """`optimizer.state`: what is kept for each parameter, by the parameter.

    As a `defaultdict(dict)` it gives something for every key.

    Args:
        states: what is on pages.
        plain: all the rest, by its key.
        settle: carries out what is left of the last step.
    """

    def __init__(self, states: States, plain: MutableMapping[Any, Any], settle: Callable[[], None]) -> None:
        self._states = states
        self._plain = plain
        self._settle = settle

    def _of(self, key: object) -> ParamState | None:
        """What is on pages for `key`, as the last step leaves it; None if it is no parameter on pages."""
        state = self._states.known(key)
        # The step itself, which asks for what it is given in the place of parameters, is not to be waited for.
        if state is not None:
            self._settle()
        return state

    def __getitem__(self, key: Any) -> Any:
        state = self._of(key)
        return self._plain[key] if state is None else self._states.entries_shown(state, self._settle)

    def __setitem__(self, key: Any, value: Any) -> None:
        state = self._of(key)
        if state is None:
            self._plain[key] = value
        elif not (isinstance(value, ShownEntries) and value.kept is state):
            _check_mapping(value, f"optimizer.state of {state.slot.name}")
            self._states.exchange(state, value)

    def __delitem__(self, key: Any) -> None:
        state = self._of(key)
        if state is None:
            del self._plain[key]
        elif state.empty:
            raise KeyError(key)
        else:
            self._states.exchange(state, {})

    def __contains__(self, key: object) -> bool:
        state = self._of(key)
        return key in self._plain if state is None else not state.empty

    def __iter__(self) -> Iterator[Any]:
        self._settle()
        return iter([*(state.slot.param for state in self._states if not state.empty), *self._plain])

    def __len__(self) -> int:
        self._settle()
        return sum(not state.empty for state in self._states) + len(self._plain)

    # `MutableMapping` goes by what `[]` raises, and this one gives something for every key.

    def get(self, key: Any, default: Any = None) -> Any:
        """As `dict.get`."""
        return self[key] if key in self else default  # noqa: SIM401

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As `dict.setdefault`."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, default: Any = _NONE) -> Any:
        """As `dict.pop`; what is on pages stays there as long as it is held."""
        if key not in self:
            if default is _NONE:
                raise KeyError(key)
            return default
        value = self[key]
        del self[key]
        return value

    def clear(self) -> None:
        """As `dict.clear`."""
        self.become({})

    def become(self, value: object) -> None:
        """What is done by `optimizer.state = value`: all that it holds is copied onto pages, all else is forgotten.

        Raises:
            UnsupportedError: it is not a dictionary of dictionaries; nothing has been changed.
            BudgetError: no room for it.
        """
        if value is self:
            return
        self._settle()
        given = dict(_check_mapping(value, "optimizer.state"))
        for key, entries in given.items():
            state = self._states.known(key)
            if state is not None:
                _check_mapping(entries, f"optimizer.state of {state.slot.name}")
        for state in self._states:
            if state.slot.param in given:
                self[state.slot.param] = given.pop(state.slot.param)
            elif not state.empty:
                self._states.exchange(state, {})
        self._plain.clear()
        self._plain.update(given)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _not_pickled(len(self))

    def __repr__(self) -> str:
        return f"<optimizer.state of {len(self)} parameters, on pages>"


def _check_mapping(value: object, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise UnsupportedError(
            f"{what} was given a {type(value).__name__}, and 1 dictionary is wanted; nothing was changed. Assign a "
            "dictionary of what the optimizer keeps, such as {} to begin anew."
        )
    return value


def _not_pickled(count: int) -> PagedModelError:
    return PagedModelError(
        f"optimizer.state ({count} entries) is on pages and cannot be copied or pickled as a whole. Use "
        "optimizer.state_dict(), which has the values, or copy.deepcopy(optimizer.state[param])."
    )
