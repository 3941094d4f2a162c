"""Rules for stopping, shared by every kind of training.

Language models, networks and reward models have different training loops. Each loop stops after its
current step on request, and fails after too many skipped updates.

    request --> the step has `grace_s` to finish --> it is abandoned --> checkpoint, exit
                                                ^
                      a second signal does not wait for it; a third writes no checkpoint

The checkpoint of a run whose step was abandoned is that of the step before it. A loop in an event
loop waits for `StopRequest.wait_until_overdue`. A loop without one does its work within
`StopRequest.interrupts_step`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ludus.proto.config.training_run import DEFAULT_STOP_GRACE_S
from ludus.proto.errors import TrainingStalledError
from ludus.trainer.core.output import warn_user

_log = logging.getLogger(__name__)

MAX_SKIPPED_UPDATES = 10
"""Number of consecutive skipped updates that fails a run: the model or the data is broken."""
_POLL_INTERVAL_S = 0.1


class RunStopped(Exception):
    """A stop of a run before its last step. A checkpoint was written."""

    def __init__(self, message: str, *, is_from_control_file: bool = False) -> None:
        super().__init__(message)
        self.is_from_control_file = is_from_control_file
        """True if the run's control file requested the stop. The exit code is then 0."""


class StepAbandoned(BaseException):
    """The end of a step that takes too long to finish after a stop request.

    It is no Exception, so that no handler of errors in environments or models catches it.
    """


class StopRequest:
    """A request to stop a run after its current step, or in the middle of a long one.

    Args:
        grace_s: time that the current step has to finish.
    """

    def __init__(self, grace_s: float = DEFAULT_STOP_GRACE_S) -> None:
        self.is_set = False
        """True after `set` was called."""
        self.is_hurried = False
        """True if the current step must be abandoned at once."""
        self.is_from_control_file = False
        """True if the run's control file requested the stop."""
        self.grace_s = grace_s
        self._deadline_s = 0.0
        self._is_in_step = False

    @property
    def is_overdue(self) -> bool:
        """True if the stop was requested and the current step may take no more time."""
        return self.is_set and (self.is_hurried or time.monotonic() >= self._deadline_s)

    def set(self, *, from_control_file: bool = False) -> None:
        """Request the stop."""
        if not self.is_set:
            self._deadline_s = time.monotonic() + self.grace_s
        self.is_set = True
        self.is_from_control_file |= from_control_file

    def hurry(self) -> None:
        """Request that the current step is abandoned at once."""
        self.set()
        self.is_hurried = True

    async def wait_until_overdue(self) -> None:
        """Wait until the current step may take no more time."""
        while not self.is_overdue:
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def wait_until_hurried(self) -> None:
        """Wait until the current step must be abandoned at once."""
        while not self.is_hurried:
            await asyncio.sleep(_POLL_INTERVAL_S)

    @contextmanager
    def interrupts_step(self) -> Iterator[None]:
        """Interrupt the block, which runs in the main thread, as soon as the request is overdue.

        Raises:
            StepAbandoned: the request is overdue. The block's objects are in an undefined state.
        """
        self._is_in_step = True
        try:
            self.interrupt_if_overdue()
            yield
        finally:
            self._is_in_step = False

    def interrupt_if_overdue(self) -> None:
        """Raise StepAbandoned if the request is overdue, within `interrupts_step`."""
        if self._is_in_step and self.is_overdue:
            self._is_in_step = False
            raise StepAbandoned


@contextmanager
def stop_on_signals(
    request: StopRequest, interrupt: Callable[[], object] | None = None
) -> Iterator[None]:
    """Handle SIGINT and SIGTERM within the block.

    The first signal stops the run after its current step, the second abandons this step, and the
    third stops the run at once.

    Args:
        request: set by the first signal, hurried by the second.
        interrupt: called by the third signal. Default: raise KeyboardInterrupt.
    """

    def handle_stop(signal_number: int, frame: FrameType | None) -> None:
        if not request.is_set:
            warn_user(
                f"stopping: the current step has {request.grace_s:g} s to finish, then a "
                "checkpoint of the last complete step is written; signal again to abandon the step"
            )
            request.set()
            signal.setitimer(signal.ITIMER_REAL, max(request.grace_s, _POLL_INTERVAL_S))
        elif not request.is_hurried:
            warn_user("stopping at once: signal again to stop without a checkpoint")
            request.hurry()
            request.interrupt_if_overdue()
        elif interrupt is not None:
            interrupt()
        else:
            raise KeyboardInterrupt

    def handle_timer(signal_number: int, frame: FrameType | None) -> None:
        request.interrupt_if_overdue()

    handlers = {
        signal.SIGINT: handle_stop,
        signal.SIGTERM: handle_stop,
        signal.SIGALRM: handle_timer,
    }
    previous_handlers = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous_handlers.items():
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
