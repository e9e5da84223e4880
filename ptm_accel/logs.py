"""What is said to a person who has not configured logging."""

from __future__ import annotations

import logging
import sys


def speak() -> None:
    """Lets the messages of ptm_accel be seen on stderr, unless the program has its own idea of logging.

    The resolved dials, hints and the summary are information, which Python hides by default.
    """
    logger = logging.getLogger("ptm_accel")
    if logger.handlers or logging.getLogger().handlers or logger.level != logging.NOTSET:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[ptm_accel] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
