"""Whether a model loads or gives its state in a way of its own, which handling it tensor by tensor would leave out."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import nn

_METHODS = ("_load_from_state_dict", "get_extra_state", "set_extra_state")
_SAVING_METHODS = ("_save_to_state_dict", "get_extra_state")
_SAVING = ("torch.nn.modules.", "transformers.modeling_utils", "peft.peft_model")
"""Whose `save_pretrained` and `state_dict` only name, split and join tensors, and write them by `save_file`."""
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


def own_saving(model: nn.Module) -> bool:
    """Returns whether a model adds something to `save_pretrained` or `state_dict`, which may look at values.

    Args:
        model: the model, not compiled.
    """
    saves = getattr(model, "save_pretrained", nn.Module.state_dict)
    if _is_own(saves, _SAVING) or _is_own(model.state_dict, _SAVING):
        return True
    return any(
        any(_is_own(getattr(module, method)) for method in _SAVING_METHODS)
        or any(map(_is_own, (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())))
        for module in model.modules()
    )


def _hooks(module: nn.Module) -> Iterator[object]:
    for hook in (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()):
        # Those before are wrapped by torch.
        yield getattr(hook, "hook", hook)


def _is_own(call: object, known: tuple[str, ...] = _KNOWN) -> bool:
    while isinstance(call, functools.partial):
        call = call.func
    return not str(call.__module__).startswith(known)
