"""Who gets a new session, and where: the queue in front of a fleet.

    open --take--> AdmissionQueue --Fleet.place--> shares of servers, set aside for the caller

An open waits in order of arrival at most `queue_timeout_s` for room that closes, polls and
new servers make; then it is refused with the time to come back.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from typing import Protocol

from ludus.env.sessions.admission_queue import AdmissionQueue
from ludus.proto.errors import CapacityError, ErrorCode, InvalidCallError, UnavailableError
from ludus.services.gateway.config import SessionsSection
from ludus.services.gateway.fleet.fleet import Fleet, Share
from ludus.services.gateway.fleet.server_link import LinkOptions, ServerLink

RETRY_AFTER_S = 1.0
"""What refused callers are told."""
MIN_DESCRIBE_S = 5.0
"""How long a caller waits for the first server of all, where opens wait less."""


class Supply(Protocol):
    """What brings servers as they are needed."""

    def wake(self) -> None:
        """Hear that an open began to wait, or that a session has ended."""

    def shortage(self) -> str:
        """Why opens still wait."""


class Admission:
    """Room on the servers of one environment, first come, first served.

    Args:
        on_wait: told how long an open has waited in line, whether it was admitted or not.
    """

    def __init__(
        self,
        environment: str,
        limits: SessionsSection,
        links: LinkOptions,
        on_wait: Callable[[float], None],
    ) -> None:
        self._on_wait = on_wait
        self._limits = limits
        self.is_draining = False
        self.supply: Supply | None = None
        self._environment = environment
        self._line = AdmissionQueue(
            self._take,
            self._give_back,
            timeout_s=limits.queue_timeout_s,
            max_waiting=limits.queue_size,
        )
        self.num_undescribed = 0
        """Callers that wait for the first server of all."""
        self.fleet = Fleet(links, self._line.advance, lambda: bool(self._line))
        self._taken: defaultdict[int, deque[list[Share]]] = defaultdict(deque)
        """What waiters of each size were given and did not pick up yet."""

    @property
    def num_waiting(self) -> int:
        """Sessions that are waited for; the fleet grows with them."""
        return self._line.size + self.num_undescribed

    @property
    def num_wanted(self) -> int:
        """Sessions that opens wait for, and one for those who wait for the first server of all."""
        return self._line.size + bool(self.num_undescribed)

    def num_missing(self, size: int) -> int:
        """How many of `size` sessions, and of those that wait before them, find no room now."""
        missing = self.fleet.num_missing(size)
        return missing and missing + self._line.size

    def advance(self) -> None:
        """Admit who waits; call it when a session has ended."""
        self._line.advance()
        self._wake_supply()

    def drain(self) -> None:
        """Refuse all opens from now on, also those that wait."""
        self.is_draining = True
        self._line.refuse_all(self._draining())

    def check(self, size: int) -> None:
        """Refuse an open that may not even wait.

        Raises:
            UnavailableError: the gateway is draining.
            InvalidCallError: so many are never given out together.
        """
        if self.is_draining:
            raise self._draining()
        if size > self._limits.max_group_size:
            raise InvalidCallError(
                f"expected a group of at most {self._limits.max_group_size} sessions, got {size}"
            )

    async def room(
        self, size: int, deadline_s: float, excluded: Collection[ServerLink] = ()
    ) -> list[Share]:
        """Servers with room for `size` together, set aside.

        Args:
            deadline_s: of the event loop's clock.
            excluded: links that refused the same open just now; if only they have room, it
                waits in line.

        Raises:
            CapacityError: there was none in time, or too many wait already.
            UnavailableError: the gateway is draining.
            InvalidCallError: so many are never given out together.
        """
        self.check(size)
        if excluded and not self._line:
            shares = self.fleet.place(size, excluded)
            if shares is not None:
                return shares
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            async with asyncio.timeout_at(deadline_s):
                is_admitted = await self._line.take(size)
        except TimeoutError:
            is_admitted = False
        finally:
            self._on_wait(loop.time() - started_s)
        if not is_admitted:
            raise self.full()
        return self._taken[size].popleft()

    def deadline_s(self) -> float:
        """When an open that begins now is refused, by the event loop's clock."""
        return asyncio.get_running_loop().time() + self._limits.queue_timeout_s

    async def describe(self) -> None:
        """Wait until a server has said what the environment is.

        Raises:
            UnavailableError: none did within the queue's timeout.
        """
        if self.fleet.description is not None:
            return
        within_s = max(self._limits.queue_timeout_s, MIN_DESCRIBE_S)
        self.num_undescribed += 1
        self._wake_supply()
        try:
            is_described = await self.fleet.wait_described(within_s)
        finally:
            self.num_undescribed -= 1
        if not is_described and self.supply is not None:
            raise self.full()
        if not is_described:
            raise UnavailableError(
                f"expected a server of environment '{self._environment}' to answer, none has yet;"
                " see that its servers run",
                retry_after_s=RETRY_AFTER_S,
            )

    def check_keys(self) -> None:
        """Refuse when every server refuses what this gateway signs.

        Raises:
            UnavailableError: they do; waiting would not help.
        """
        links = [link for link in self.fleet.links if link.is_connected]
        if links and all(link.last_refusal for link in links):
            raise UnavailableError(
                f"expected servers of environment '{self._environment}' that share this"
                f" gateway's session key, got a refusal from each: {links[0].last_refusal}"
            )

    def full(self) -> CapacityError | UnavailableError:
        """The refusal."""
        if self.supply is not None:
            return UnavailableError(self.supply.shortage(), retry_after_s=RETRY_AFTER_S)
        links = [link for link in self.fleet.links if link.takes_sessions]
        num_taken = sum(link.max_sessions - link.room for link in links)
        capacity = sum(link.max_sessions for link in links)
        if not capacity:
            return CapacityError(
                f"expected a server of environment '{self._environment}' that takes sessions, found"
                " none; try again when one has started",
                retry_after_s=RETRY_AFTER_S,
            )
        return CapacityError(
            f"Server at capacity: {num_taken}/{capacity} sessions active."
            " Cannot accept new connections.",
            retry_after_s=RETRY_AFTER_S,
        )

    def _draining(self) -> UnavailableError:
        return UnavailableError(
            "this gateway is draining and takes no new sessions; open it through another",
            ErrorCode.DRAINING,
            retry_after_s=RETRY_AFTER_S,
        )

    def _take(self, size: int) -> bool:
        shares = self.fleet.place(size)
        if shares is None:
            self._wake_supply()
            return False
        self._taken[size].append(shares)
        return True

    def _wake_supply(self) -> None:
        if self.supply is not None:
            self.supply.wake()

    def _give_back(self, size: int) -> None:
        for share in self._taken[size].popleft():
            share.give_back()
        self._line.advance()
