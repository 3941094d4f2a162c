"""Retries of calls to an unavailable store, within a time limit.

Every attempt runs in a separate thread, so a file system that hangs, or a server that never
responds, blocks only that thread.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ludus.env.backoff import doubling
from ludus.proto.errors import StoreUnavailableError, WeightSyncError

T = TypeVar("T")

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 2.0


class RetryDeadline:
    """The time limit of one publish or fetch, over all its calls to the store."""

    def __init__(self, operation: str, timeout_s: float) -> None:
        """`operation` is the subject of messages, such as "publishing weights version 3"."""
        self._operation = operation
        self._timeout_s = timeout_s
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s

    def call(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`; retry while the store is unavailable.

        Raises:
            WeightSyncError: the time limit has passed, or a retry cannot help.
        """
        pauses_s = doubling(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        num_attempts = 0
        while True:
            num_attempts += 1
            try:
                return call_within(attempt, self._timeout_s - self.elapsed_s)
            except StoreUnavailableError as error:
                reason = error
            # Jitter, so that the workers that wait for a store do not all return at once.
            pause_s = next(pauses_s) * random.uniform(0.5, 1.0)
            if self.elapsed_s + pause_s >= self._timeout_s:
                raise WeightSyncError(
                    f"{self._operation} failed for {self.elapsed_s:.1f} s, {num_attempts} attempts "
                    f"(weights.timeout_s = {self._timeout_s:g}); last error: {reason}; check that "
                    "the store is up, or raise weights.timeout_s"
                ) from reason
            time.sleep(pause_s)


def call_within(attempt: Callable[[], T], timeout_s: float) -> T:
    """Return the result of `attempt`; its thread is abandoned if it does not finish in time.

    Raises:
        StoreUnavailableError: it did not finish in time.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(attempt())
        except BaseException as error:  # noqa: BLE001 - raised to the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name="weight-store", daemon=True).start()
    try:
        return outcome.result(timeout=max(timeout_s, 0.0))
    except TimeoutError:
        if outcome.done():  # The attempt raised TimeoutError, or finished just at the deadline.
            return outcome.result()
        raise StoreUnavailableError(f"no response within {timeout_s:.1f} s") from None
