"""Whether a model loads its state in a way of its own, which reading it tensor by tensor would leave out."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import nn

_METHODS = ("_load_from_state_dict", "get_extra_state", "set_extra_state")
_KNOWN = ("torch.nn.modules.", "transformers.", "ptm_accel.model.hooks")
"""Whose methods and hooks may be left out: those that are for older files, which `from_pretrained` leaves out as well,
and ours."""


def own_loading(model: nn.Module) -> str | None:
    """What a model adds to `load_state_dict`, by name; None if torch's own is all there is.

    Args:
        model: the model, not compiled.
    """
    if getattr(model.load_state_dict, "__func__", None) is not nn.Module.load_state_dict:
        return f"{type(model).__name__}.load_state_dict"
    for name, module in model.named_modules():
        where = f"{type(module).__name__} {name}".rstrip()
        for method in _METHODS:
            if _is_own(getattr(module, method)):
                return f"{method}() of {where}"
        if any(map(_is_own, _hooks(module))):
            return f"a hook on load_state_dict() of {where}"
    return None


def _hooks(module: nn.Module) -> Iterator[object]:
    for hook in (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()):
        # Those before are wrapped by torch.
        yield getattr(hook, "hook", hook)


def _is_own(call: object) -> bool:
    while isinstance(call, functools.partial):
        call = call.func
    return not str(call.__module__).startswith(_KNOWN)
