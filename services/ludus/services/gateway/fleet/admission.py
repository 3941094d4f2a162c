"""Admission of new sessions: the queue in front of a fleet.

    open --reserve--> AdmissionQueue --Fleet.reserve--> shares of servers

An open is a request to open one session or a group. Opens wait in order of arrival. The end of a
session, a poll or a new server may free capacity for them. An open that has waited for
`queue_timeout_s` is refused, with a retry delay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from ludus.env.sessions.admission_queue import AdmissionQueue
from ludus.proto.errors import CapacityError, ErrorCode, InvalidCallError, UnavailableError
from ludus.services.gateway.config import ServersSection, SessionsSection
from ludus.services.gateway.fleet.fleet import Fleet, Share
from ludus.services.gateway.fleet.server_link import ServerLink

RETRY_AFTER_S = 1.0
"""Retry delay for refused callers, in seconds."""
MIN_DESCRIBE_TIMEOUT_S = 5.0
"""Minimum time that a caller waits for the first server to respond, in seconds."""


class ServerSupply(Protocol):
    """A source that creates servers on demand."""

    def wake(self) -> None:
        """Check the demand now, because an open started to wait or a session ended."""

    def explain_shortage(self) -> str:
        """Return the reason why no server became available, with a remedy."""


class FleetAdmission:
    """The queue in which opens of one environment wait until they have reserved capacity.

    Args:
        on_wait: called with the number of seconds that an open waited, even if it was refused.
    """

    def __init__(
        self,
        environment: str,
        limits: SessionsSection,
        servers: ServersSection,
        on_wait: Callable[[float], None],
    ) -> None:
        self._environment, self._limits, self._on_wait = environment, limits, on_wait
        self.is_draining = False
        self.supply: ServerSupply | None = None
        self._queue: AdmissionQueue[list[Share]] = AdmissionQueue(
            self._reserve_now,
            self._cancel_shares,
            timeout_s=limits.queue_timeout_s,
            max_waiting=limits.queue_size,
        )
        self.num_waiting_for_description = 0
        """Number of callers that wait for the first server to respond."""
        self.fleet = Fleet(servers, self._queue.advance, lambda: bool(self._queue))

    @property
    def num_waiting(self) -> int:
        """Number of sessions that waiting callers requested; autoscalers use this number."""
        return self._queue.num_requested_units + self.num_waiting_for_description

    @property
    def num_requested(self) -> int:
        """Number of sessions that need a server, plus one if callers wait for a description."""
        return self._queue.num_requested_units + bool(self.num_waiting_for_description)

    def count_missing(self, size: int) -> int:
        """Return how many sessions must end to make room for waiting opens and `size` sessions."""
        num_missing = self.fleet.count_missing(size)
        return num_missing and num_missing + self._queue.num_requested_units

    def advance(self) -> None:
        """Admit waiting opens if there is capacity; call this after a session has ended."""
        self._queue.advance()
        self._wake_supply()

    def drain(self) -> None:
        """Refuse all opens from now on, including waiting ones."""
        self.is_draining = True
        self._queue.refuse_all(self._make_draining_error())

    def check_open(self, size: int) -> None:
        """Check that an open may wait for capacity.

        Raises:
            UnavailableError: the gateway is draining.
            InvalidCallError: the group is empty or too large.
        """
        if self.is_draining:
            raise self._make_draining_error()
        max_size = self._limits.max_group_size
        if not 1 <= size <= max_size:
            raise InvalidCallError(f"a group must have 1 to {max_size} sessions, got {size}")

    async def reserve(
        self, size: int, deadline_s: float, excluded_links: Collection[ServerLink] = ()
    ) -> list[Share]:
        """Reserve capacity for `size` sessions and return the servers' shares.

        Args:
            deadline_s: event-loop time until which the open may wait.
            excluded_links: links to servers that just refused this open. If no other server has
                capacity, the open waits in the queue.

        Raises:
            CapacityError: no capacity became free in time, or the queue is full.
            UnavailableError: the gateway is draining.
        """
        self.check_open(size)
        if excluded_links and not self._queue:
            shares = self.fleet.reserve(size, excluded_links)
            if shares is not None:
                return shares
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            async with asyncio.timeout_at(deadline_s):
                shares = await self._queue.take(size)
        except TimeoutError:
            shares = None
        finally:
            self._on_wait(loop.time() - started_s)
        if shares is None:
            raise self.make_capacity_error()
        return shares

    def compute_deadline_s(self) -> float:
        """Return the event-loop time until which an open that starts now may wait."""
        return asyncio.get_running_loop().time() + self._limits.queue_timeout_s

    async def wait_until_described(self) -> None:
        """Wait until a server has described the environment.

        Raises:
            UnavailableError: no server responded in time.
        """
        if self.fleet.description is not None:
            return
        timeout_s = max(self._limits.queue_timeout_s, MIN_DESCRIBE_TIMEOUT_S)
        self.num_waiting_for_description += 1
        self._wake_supply()
        try:
            is_described = await self.fleet.wait_until_described(timeout_s)
        finally:
            self.num_waiting_for_description -= 1
        if not is_described and self.supply is not None:
            raise self.make_capacity_error()
        if not is_described:
            raise UnavailableError(
                f"no server of environment '{self._environment}' has responded yet; check that its"
                " servers run",
                retry_after_s=RETRY_AFTER_S,
            )

    def check_keys(self) -> None:
        """Check that at least one server accepts the session ids that this gateway signs.

        Raises:
            UnavailableError: every server refuses them, so it is useless to wait.
        """
        links = [link for link in self.fleet.links if link.is_connected]
        if links and all(link.last_refusal for link in links):
            raise UnavailableError(
                f"every server of environment '{self._environment}' refuses this gateway's"
                " session ids; check that they have the same session key and clock:"
                f" {links[0].last_refusal}"
            )

    def make_capacity_error(self) -> CapacityError | UnavailableError:
        """Return the error for an open that found no capacity."""
        if self.supply is not None:
            return UnavailableError(self.supply.explain_shortage(), retry_after_s=RETRY_AFTER_S)
        links = [link for link in self.fleet.links if link.accepts_sessions]
        num_used = sum(link.max_sessions - link.num_free for link in links)
        capacity = sum(link.max_sessions for link in links)
        message = (
            f"Server at capacity: {num_used}/{capacity} sessions active."
            " Cannot accept new connections."
        )
        if not capacity:
            message = (
                f"no server of environment '{self._environment}' accepts sessions; try again when a"
                " server has started"
            )
        return CapacityError(message, retry_after_s=RETRY_AFTER_S)

    def _make_draining_error(self) -> UnavailableError:
        return UnavailableError(
            "this gateway is draining and accepts no new sessions; open the session on a new"
            " connection, which reaches another gateway",
            ErrorCode.DRAINING,
            retry_after_s=RETRY_AFTER_S,
        )

    def _reserve_now(self, size: int) -> list[Share] | None:
        shares = self.fleet.reserve(size)
        if shares is None:
            self._wake_supply()
        return shares

    def _wake_supply(self) -> None:
        if self.supply is not None:
            self.supply.wake()

    def _cancel_shares(self, shares: list[Share]) -> None:
        for share in shares:
            share.cancel()
        self._queue.advance()
