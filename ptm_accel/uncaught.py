"""How an error of ours that nothing catches ends a script: with its text on one line, which a traceback would bury.

`PTM_DEBUG=1` shows the traceback.
"""

from __future__ import annotations

import json
import os
import sys
import time
from traceback import print_exception
from types import TracebackType
from typing import NoReturn

from ptm_accel.errors import PTMError

DEBUG = "PTM_DEBUG"
"""The environment variable."""


def wants_traceback() -> bool:
    """Returns whether the environment asks for tracebacks."""
    return os.environ.get(DEBUG, "").strip().lower() not in ("", "0", "false", "no", "off")


def install() -> None:
    """Becomes the hook for errors that nothing catches, unless a session or debugger has its own."""
    interactive = hasattr(sys, "ps1") or sys.flags.interactive or sys.flags.inspect
    if sys.excepthook is sys.__excepthook__ and not interactive:
        sys.excepthook = show


def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Shows an error as Python does, or one of ours on one line; the exit status is the same.

    Args:
        kind: as `sys.excepthook` is given it.
        error: the error.
        traceback: its own.
    """
    if not isinstance(error, PTMError) or wants_traceback():
        sys.__excepthook__(kind, error, traceback)
        return
    text = f"{kind.__name__}: {' '.join(str(error).split())}"
    _end_bars()
    sys.stderr.write(f"ptm_accel: {text}\n")
    _tell_elastic(text)


def refuse(program: str, said: object) -> NoReturn:
    """Ends a command that cannot be carried out: with one line, and exit status 2.

    Args:
        program: the command.
        said: what is wrong, or the error.
    """
    if isinstance(said, PTMError) and wants_traceback():
        print_exception(said)
    sys.stderr.write(f"{program}: error: {' '.join(str(said).split())}\n")
    raise SystemExit(2)


def _end_bars() -> None:
    """Ends progress bars, which would draw themselves behind the error once more when Python ends."""
    tqdm = sys.modules.get("tqdm")
    for bar in list(getattr(getattr(tqdm, "tqdm", None), "_instances", ())):
        bar.close()


def _tell_elastic(text: str) -> None:
    """Has torchrun's report name the error, unless the script has written its own (`@record`)."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and not os.path.exists(file):
        told = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with open(file, "w", encoding="utf-8") as opened:
            json.dump(told, opened)
