"""Waits for a store that is unavailable, and never for ever.

An attempt runs in a thread of its own: a file system that hangs, or a server that accepts and
never answers, holds up that thread and nobody else.
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
_LONGEST_PAUSE_S = 2.0


class RetryDeadline:
    """The time that one publish or one fetch may take, over all its calls to the store."""

    def __init__(self, doing: str, timeout_s: float) -> None:
        self._doing = doing
        self._timeout_s = timeout_s
        self._begun = time.monotonic()

    @property
    def spent_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._begun

    def call(self, attempt: Callable[[], T]) -> T:
        """What `attempt` returns, repeated with growing pauses while the store is unavailable.

        Raises:
            WeightSyncError: the time is over, or the attempt failed in a way that waiting does
                not fix.
        """
        pauses_s = doubling(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        num_attempts = 0
        while True:
            num_attempts += 1
            try:
                return answer_within(attempt, self._timeout_s - self.spent_s)
            except StoreUnavailableError as error:
                reason = error
            # Many workers wait for the same store: they must not all come back at once.
            pause_s = next(pauses_s) * random.uniform(0.5, 1.0)
            if self.spent_s + pause_s >= self._timeout_s:
                raise WeightSyncError(
                    f"{self._doing} failed for {self.spent_s:.1f} s, {num_attempts} attempts "
                    f"(weights.timeout_s = {self._timeout_s:g}); the last: {reason}; see that "
                    "the store is up, or raise weights.timeout_s"
                ) from reason
            time.sleep(pause_s)


def answer_within(attempt: Callable[[], T], timeout_s: float) -> T:
    """What `attempt` returns; its thread is left behind when it does not end in time.

    Raises:
        StoreUnavailableError: it did not.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(attempt())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name="weight-store", daemon=True).start()
    try:
        return outcome.result(timeout=max(timeout_s, 0.0))
    except TimeoutError:
        if outcome.done():  # it raised this itself, or ended just when the time was over
            return outcome.result()
        raise StoreUnavailableError(f"no answer within {timeout_s:.1f} s") from None
