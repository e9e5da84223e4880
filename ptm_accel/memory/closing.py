"""Closing several things, whatever goes wrong with one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ptm_accel.memory.raising import raise_first

logger = logging.getLogger(__name__)


def close_all(steps: Iterable[Callable[[], object]], what: str) -> None:
    """Does all steps in order: threads, files and memory would stay for good where an error kept one from being done.

    Args:
        steps: what there is to do.
        what: what is closed, for the log.

    Raises:
        BaseException: the first error of a step; later ones are logged.
    """
    errors: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as error:
            errors.append(error)
    for later in errors[1:]:
        logger.error("closing %s failed a further time", what, exc_info=later)
    raise_first(errors)
