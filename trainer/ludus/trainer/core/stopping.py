"""Rules for stopping, shared by every kind of training.

Language models, networks and reward models have different training loops. Each loop stops after
its current step on request, and fails after too many skipped updates.
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
"""Number of consecutive skipped updates that fails a run: the model or the data is broken."""


class RunStopped(Exception):
    """A stop of a run before its last step. A checkpoint was written."""

    def __init__(self, message: str, *, is_from_control_file: bool = False) -> None:
        super().__init__(message)
        self.is_from_control_file = is_from_control_file
        """True if the run's control file requested the stop. The exit code is then 0."""


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
    """Handle SIGINT and SIGTERM within the block.

    The first signal stops the run after its current step, and the second one stops it at once.

    Args:
        request: set by the first signal.
        interrupt: called by a signal after a stop was requested. Default: raise KeyboardInterrupt.
    """

    def handle_signal(signal_number: int, frame: FrameType | None) -> None:
        if not request.is_set:
            _log.warning("stopping after this step; repeat the signal to stop at once")
            request.set()
        elif interrupt is not None:
            interrupt()
        else:
            raise KeyboardInterrupt

    signal_numbers = (signal.SIGINT, signal.SIGTERM)
    previous_handlers = [signal.signal(number, handle_signal) for number in signal_numbers]
    try:
        yield
    finally:
        for number, handler in zip(signal_numbers, previous_handlers, strict=True):
            signal.signal(number, handler)


def check_skipped_updates(num_skipped: int, remedy: str) -> None:
    """Check that a run has not skipped too many consecutive updates.

    Raises:
        TrainingStalledError: `num_skipped` has reached MAX_SKIPPED_UPDATES.
    """
    if num_skipped >= MAX_SKIPPED_UPDATES:
        raise TrainingStalledError(
            f"{num_skipped} updates in a row were skipped, because their gradients were not "
            f"finite; {remedy}"
        )
