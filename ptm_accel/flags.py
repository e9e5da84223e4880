"""What is said of flags that are not known, or do not stand where they count."""

from __future__ import annotations

import difflib

from ptm_accel.environment import CONFIG_FILE, TEXT_DIALS

PREFIX = "ptm_"
"""What the flags of the dials begin with."""
SWITCH_FLAG = "use_ptm"
"""The launcher's flag that switches pages on."""


def is_flag(text: str) -> bool:
    """Whether an argument is meant for us."""
    return text.replace("-", "_").startswith((f"__{SWITCH_FLAG}", f"__{PREFIX}"))


def unknown_flag(flag: str, *switches: str) -> str:
    """What is said of a flag that there is not.

    Args:
        flag: as it was typed.
        switches: flags that there are beside those of the dials.
    """
    known = [*switches, *(f"--{PREFIX}{dial}" for dial in (*TEXT_DIALS, CONFIG_FILE))]
    if not switches and flag.replace("-", "_") == f"__{SWITCH_FLAG}":
        return f"{flag} is a flag of accelerate launch; here pages are switched on without it."
    close = difflib.get_close_matches("--" + flag[2:].replace("-", "_"), known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown flag {flag}; {hint}The flags are: {', '.join(known)}."


def misplaced_flag(flag: str, script: str) -> str:
    """What is said of a flag that the script would be given.

    Args:
        flag: as it was typed.
        script: what it stands behind.
    """
    return f"{flag} stands behind the script {script}, to which it would be given; put it before."
