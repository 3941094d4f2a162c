"""A queue for limited capacity: first come, first served, with a deadline.

`SessionSlots` limits the sessions of one server. A gateway uses a queue for its whole fleet.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ludus.env.sessions.interface import Load, SessionEvents
from ludus.env.sessions.options import ServerOptions
from ludus.proto.errors import CapacityError, ErrorCode, InvalidCallError, UnavailableError

GrantT = TypeVar("GrantT")

_RETRY_AFTER_S = 1.0
_MAX_WAITING_OPENS = 1024


@dataclass(slots=True, eq=False)
class _Waiter(Generic[GrantT]):
    num_units: int
    grant: asyncio.Future[GrantT]


class AdmissionQueue(Generic[GrantT]):
    """A queue of callers, each of which waits until all units that it requests are free.

    Callers are served in strict order, so that small requests cannot starve a large one.

    Args:
        take: takes `num_units` units and returns a grant for them, or returns None.
        give_back: returns the units of a grant whose caller was cancelled.
        timeout_s: maximum wait of a caller; 0 does not wait.
        max_waiting: maximum number of waiting callers; more are refused immediately.
    """

    def __init__(
        self,
        take: Callable[[int], GrantT | None],
        give_back: Callable[[GrantT], None],
        *,
        timeout_s: float,
        max_waiting: int,
    ) -> None:
        self._take_units = take
        self._return_units = give_back
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._waiters: deque[_Waiter[GrantT]] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def num_requested_units(self) -> int:
        """Number of units that all callers wait for."""
        return sum(waiter.num_units for waiter in self._waiters)

    async def take(self, num_units: int = 1) -> GrantT | None:
        """Take units together and return a grant, or None if too few became free in time.

        Raises the error that was passed to `refuse_all`.
        """
        if not self._waiters and (grant := self._take_units(num_units)) is not None:
            return grant
        if self._timeout_s <= 0 or len(self._waiters) >= self._max_waiting:
            return None
        waiter = _Waiter[GrantT](num_units, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            return await asyncio.wait_for(waiter.grant, self._timeout_s)
        except TimeoutError:
            # The grant may have arrived in the same turn of the event loop as the timeout.
            return None if waiter.grant.cancelled() else waiter.grant.result()
        except asyncio.CancelledError:
            if waiter.grant.done() and not waiter.grant.cancelled():
                self._return_units(waiter.grant.result())
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self.advance()

    def advance(self) -> None:
        """Grant units to the first callers; call this whenever units became free."""
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.grant.done():
                grant = self._take_units(waiter.num_units)
                if grant is None:
                    return
                waiter.grant.set_result(grant)
            self._waiters.popleft()

    def refuse_all(self, error: Exception) -> None:
        """Raise an error in all waiting callers."""
        for waiter in self._waiters:
            if not waiter.grant.done():
                waiter.grant.set_exception(error)
        self._waiters.clear()


class SessionSlots:
    """Slots for a server's sessions, including sessions that are being opened."""

    def __init__(self, options: ServerOptions, events: SessionEvents) -> None:
        self._max_sessions = options.max_sessions
        self._events = events
        self._num_taken = 0
        self._is_draining = False
        self._queue = AdmissionQueue(
            self._take_free_slots,
            self.give_back,
            timeout_s=options.wait_for_slot_s,
            max_waiting=_MAX_WAITING_OPENS,
        )

    @property
    def load(self) -> Load:
        """Load of the server, including sessions that are being opened."""
        return Load(self._num_taken, self._max_sessions, len(self._queue), self._is_draining)

    async def take(self, num_slots: int) -> None:
        """Reserve slots together.

        Raises:
            CapacityError: too few slots became free in time.
            UnavailableError: the server is draining.
        """
        self._refuse_while_draining()
        if num_slots > self._max_sessions:
            raise InvalidCallError(
                f"a group cannot have more sessions than this server has"
                f" ({self._max_sessions}); got {num_slots}"
            )
        await self._events.make_room(
            self._num_taken + len(self._queue) + num_slots - self._max_sessions
        )
        self._refuse_while_draining()
        if await self._queue.take(num_slots) is None:
            raise CapacityError(
                f"Server at capacity: {self._num_taken}/{self._max_sessions} sessions active."
                " Cannot accept new connections.",
                retry_after_s=_RETRY_AFTER_S,
            )

    def give_back(self, num_slots: int = 1) -> None:
        """Free slots for the next caller."""
        self._num_taken -= num_slots
        self._queue.advance()

    def drain(self) -> None:
        """Refuse all opens from now on."""
        self._is_draining = True
        self._queue.refuse_all(self._make_draining_error())

    def _take_free_slots(self, num_slots: int) -> int | None:
        if self._num_taken + num_slots > self._max_sessions:
            return None
        self._num_taken += num_slots
        return num_slots

    def _refuse_while_draining(self) -> None:
        if self._is_draining:
            raise self._make_draining_error()

    def _make_draining_error(self) -> UnavailableError:
        return UnavailableError(
            "this server is draining and opens no new sessions; use another server",
            ErrorCode.DRAINING,
        )
