"""Rules for stopping, shared by every kind of training.

Language models, networks and reward models train in different loops. All of them stop after the
current step on request, and fail after too many skipped updates.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ludus.proto.errors import TrainingStalledError

_log = logging.getLogger(__name__)

MAX_SKIPPED_UPDATES = 10
"""Maximum number of consecutive skipped updates. After that, the model or the data is broken."""


class RunStopped(Exception):
    """A run stopped before its last step. A checkpoint was written."""

    def __init__(self, message: str, *, is_intended: bool = False) -> None:
        super().__init__(message)
        self.is_intended = is_intended
        """True if the run's control file requested the stop, so that the exit code is 0."""


class StopRequest:
    """A request to stop a run after its current step."""

    def __init__(self) -> None:
        self.is_set = False
        """True after `set` was called."""
        self.is_from_control_file = False
        """True if the run's control file requested the stop."""

    def set(self, *, from_control_file: bool = False) -> None:
        """Request the stop."""
        self.is_set = True
        self.is_from_control_file |= from_control_file


@contextmanager
def stop_on_signals(
    request: StopRequest, interrupt: Callable[[], object] | None = None
) -> Iterator[None]:
    """Handle SIGINT and SIGTERM within the block: stop after the step, then at once.

    Args:
        request: set by the first signal.
        interrupt: called when a stop was requested before. Default: raise KeyboardInterrupt.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if not request.is_set:
            _log.warning("stopping after this step; repeat the signal to stop at once")
            request.set()
        elif interrupt is not None:
            interrupt()
        else:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous_handlers = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def check_skipped_updates(num_consecutive: int, remedy: str) -> None:
    """Check that the run has not skipped too many updates in a row.

    Raises:
        TrainingStalledError: `num_consecutive` has reached MAX_SKIPPED_UPDATES.
    """
    if num_consecutive >= MAX_SKIPPED_UPDATES:
        raise TrainingStalledError(
            f"{num_consecutive} updates in a row were skipped, because their gradients were not "
            f"finite; {remedy}"
        )
