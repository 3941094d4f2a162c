"""Waiting for something that is full: first come, first served, with a deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Waiter:
    size: int
    admitted: asyncio.Future[None]


class AdmissionQueue:
    """Callers that wait until `size` of something can be taken together.

    Nobody overtakes: a large request at the head is not starved by small ones behind it.

    Args:
        take: takes `size` at once and returns True, or takes nothing and returns False.
        give_back: undoes a `take` whose caller has gone meanwhile.
        timeout_s: how long a caller waits; 0 does not wait.
        max_waiting: callers that may wait at once; more are refused right away.
    """

    def __init__(
        self,
        take: Callable[[int], bool],
        give_back: Callable[[int], None],
        *,
        timeout_s: float,
        max_waiting: int,
    ) -> None:
        self._take = take
        self._give_back = give_back
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._waiters: deque[_Waiter] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    async def take(self, size: int = 1) -> bool:
        """True when `size` were taken for the caller; False when the wait was in vain.

        Raises whatever `refuse_all` was given.
        """
        if not self._waiters and self._take(size):
            return True
        if self._timeout_s <= 0 or len(self._waiters) >= self._max_waiting:
            return False
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await asyncio.wait_for(waiter.admitted, self._timeout_s)
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                self._give_back(size)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self.advance()
        return True

    def advance(self) -> None:
        """Admits from the head of the line; call it whenever something became free."""
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.admitted.done():
                if not self._take(waiter.size):
                    return
                waiter.admitted.set_result(None)
            self._waiters.popleft()

    def refuse_all(self, error: Exception) -> None:
        """Ends every wait with the error."""
        for waiter in self._waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)
        self._waiters.clear()
