"""Waiting for something that is full: first come, first served, with a deadline.

`SessionSlots` admits to the sessions of one server; a gateway's queue admits to those of a fleet.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ludus.env.sessions.interface import Load, SessionEvents
from ludus.env.sessions.options import CoreOptions
from ludus.proto.errors import CapacityError, ErrorCode, InvalidCallError, UnavailableError

_RETRY_AFTER_S = 1.0


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

    @property
    def size(self) -> int:
        """How much all callers together wait for."""
        return sum(waiter.size for waiter in self._waiters)

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
            # Who is admitted in the very turn in which the wait ends has been given its place.
            return not waiter.admitted.cancelled() and waiter.admitted.result() is None
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
        """Admit from the head of the line; call it whenever something became free."""
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.admitted.done():
                if not self._take(waiter.size):
                    return
                waiter.admitted.set_result(None)
            self._waiters.popleft()

    def refuse_all(self, error: Exception) -> None:
        """End every wait with the error."""
        for waiter in self._waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)
        self._waiters.clear()


class SessionSlots:
    """Room for the sessions of a server: those that are open, being built, and waited for."""

    def __init__(self, options: CoreOptions, events: SessionEvents) -> None:
        self._capacity = options.max_sessions
        self._events = events
        self._num_taken = 0
        self._is_draining = False
        self._queue = AdmissionQueue(
            self._take_now,
            self.give_back,
            timeout_s=options.wait_for_slot_s,
            max_waiting=options.max_waiting,
        )

    @property
    def load(self) -> Load:
        """How many are taken, sessions that are being built included."""
        return Load(self._num_taken, self._capacity, len(self._queue), self._is_draining)

    async def take(self, size: int) -> None:
        """Set `size` slots aside for the caller, together.

        Raises:
            CapacityError: so many did not become free in time.
            UnavailableError: the server drains.
        """
        self._refuse_while_draining()
        if size > self._capacity:
            raise InvalidCallError(
                f"expected a group of at most {self._capacity} sessions, which is all"
                f" this server holds; got {size}"
            )
        await self._events.make_room(self._num_taken + len(self._queue) + size - self._capacity)
        self._refuse_while_draining()
        if not await self._queue.take(size):
            raise CapacityError(
                f"Server at capacity: {self._num_taken}/{self._capacity} sessions active."
                " Cannot accept new connections.",
                retry_after_s=_RETRY_AFTER_S,
            )

    def give_back(self, size: int = 1) -> None:
        """Free slots for whoever waits first."""
        self._num_taken -= size
        self._queue.advance()

    def drain(self) -> None:
        """Admit nobody any more."""
        self._is_draining = True
        self._queue.refuse_all(self._draining())

    def _take_now(self, size: int) -> bool:
        if self._num_taken + size > self._capacity:
            return False
        self._num_taken += size
        return True

    def _refuse_while_draining(self) -> None:
        if self._is_draining:
            raise self._draining()

    def _draining(self) -> UnavailableError:
        return UnavailableError(
            "this server is draining and takes no new sessions; open it elsewhere",
            ErrorCode.DRAINING,
        )
