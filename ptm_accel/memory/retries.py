"""Transfers that failed and are made again, as a disk may fail once and then go on."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ptm_accel.errors import DiskError

logger = logging.getLogger(__name__)

_TOLD_EVERY = 100
"""Of how many failures one is told of."""


class Retries:
    """Counts transfers that are made again, and says so now and then.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        self.count = 0

    def note(self, error: DiskError) -> None:
        """A transfer has failed, and is made again now or when it is needed; if it fails then, that is raised."""
        self.count += 1
        if self.count % _TOLD_EVERY == 1:
            logger.warning(
                "a transfer failed (%d so far). Nothing is lost: it is made again, and the run ends if that fails. %s",
                self.count,
                # As text: an error refers to the frames that it has passed, and so to pages, and handlers keep records.
                str(error),
            )

    def twice(self, transfer: Callable[[], None]) -> None:
        """Makes a transfer that is waited for, and makes it once more if it fails.

        Args:
            transfer: makes it, from its start, each time that it is called.

        Raises:
            DiskError: it failed, twice.
        """
        try:
            transfer()
        except DiskError as error:
            self.note(error)
        else:
            return
        # Not within the handler: the first error would go on as the context of the second, with all that it holds.
        transfer()
