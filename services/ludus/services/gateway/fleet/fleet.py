"""The servers of one environment: their links, their load and the placement of sessions.

source --whole list--> publish --> one ServerLink each
reserve(n) --> the less loaded of two servers with capacity, or several that share a group
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ludus.env.types import EnvironmentDescription
from ludus.services.gateway.config import ServersSection
from ludus.services.gateway.fleet.server_link import ServerLink
from ludus.services.gateway.fleet.sources import ServerEndpoint

_MAX_REMOVED = 4096
_MAX_PAIRS = 4
"""Number of random pairs that are tried before all servers are checked."""
_MIN_POLL_INTERVAL_S = 0.1
_MAX_POLLS_PER_S = 200
"""Maximum poll rate of the whole fleet; each poll costs some tenths of a millisecond."""


@dataclass(frozen=True, slots=True)
class Share:
    """Capacity for sessions reserved on one server."""

    link: ServerLink
    num_sessions: int
    num_polls: int
    """Value from `ServerLink.reserve`."""

    def confirm(self) -> None:
        """Record that the sessions were opened."""
        self.link.confirm(self.num_sessions)

    def cancel(self) -> None:
        """Free the capacity because no session was opened."""
        self.link.cancel(self.num_sessions, self.num_polls)


class Fleet:
    """The servers of one environment, each with its link.

    Args:
        on_change: called when a server starts or stops accepting sessions, or frees capacity.
        has_waiting: returns whether opens wait for capacity.
    """

    def __init__(
        self,
        options: ServersSection,
        on_change: Callable[[], None],
        has_waiting: Callable[[], bool],
    ) -> None:
        self._options = options
        self._on_change = on_change
        self._has_waiting = has_waiting
        self._links: dict[str, ServerLink] = {}
        self._order: list[ServerLink] = []
        """The links as a list, for random choices."""
        self._by_server_id: dict[str, ServerLink] = {}
        self._removal_reasons: OrderedDict[str, str] = OrderedDict()
        self.is_published = False
        """True when the source has published its first list of servers."""
        self.description: EnvironmentDescription | None = None
        """The latest server's description of the environment; None until a server was reached."""
        self._changed = asyncio.Event()
        """Event of the next change; replaced after each change."""
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def links(self) -> Collection[ServerLink]:
        """The links to all servers that the source lists."""
        return self._links.values()

    def publish(self, endpoints: Sequence[ServerEndpoint]) -> None:
        """Replace the list of servers by the source's current list."""
        listed = {endpoint.key: endpoint for endpoint in endpoints}
        for key in [key for key in self._links if key not in listed]:
            self._remove(key)
        for key, endpoint in listed.items():
            link = self._links.get(key)
            if link is not None and link.endpoint.grpc_address != endpoint.grpc_address:
                self._remove(key)
                link = None
            if link is None:
                self._links[key] = self._new_link(endpoint)
            else:
                link.endpoint = endpoint
        self._order = list(self._links.values())
        self.is_published = True
        self._notify_changed()

    def find_link(self, server_id: str) -> ServerLink | None:
        """Return the link to a server, even if the server has restarted with another id."""
        return self._by_server_id.get(server_id)

    def find_link_by_key(self, key: str) -> ServerLink | None:
        """Return the link to the server with this key in the source."""
        return self._links.get(key)

    def read_pod_loads(self) -> dict[str, tuple[int, int]]:
        """Return the number of sessions and the capacity of each reached server, by pod name."""
        return {
            link.endpoint.pod_name: (link.num_sessions, link.max_sessions)
            for link in self._links.values()
            if link.endpoint.pod_name and link.max_sessions
        }

    def explain_removal(self, server_id: str) -> str:
        """Return the reason why a server is not in the list."""
        return self._removal_reasons.get(server_id) or (
            f"no server {server_id} is known here (it was stopped or replaced)"
        )

    def reserve(self, size: int, excluded: Collection[ServerLink] = ()) -> list[Share] | None:
        """Reserve capacity for `size` sessions, on one server if possible.

        Args:
            excluded: links that just refused the open.

        Returns:
            The shares of the servers, or None if the capacity is too small.
        """
        link = self._choose_link(size, excluded)
        if link is not None:
            parts = {link: size}
        else:
            parts = _split(size, [other for other in self._order if other not in excluded])
        return [Share(part, num, part.reserve(num)) for part, num in parts.items()] or None

    def num_missing(self, size: int) -> int:
        """Return how many of `size` sessions exceed the capacity of servers that accept sessions.

        Return 0 while no server accepts sessions: ending a session frees no capacity on a server
        that is silent or gone.
        """
        accepting = [link for link in self._order if link.accepts_sessions]
        if not accepting or self._choose_link(size, ()) is not None:
            return 0
        return max(size - sum(link.num_free for link in accepting), 0)

    def may_include(self, server_id: str) -> bool:
        """Return whether a listed server that was not yet reached could have this id."""
        if server_id in self._removal_reasons:
            return False
        return not self.is_published or any(
            not (link.is_connected or link.endpoint.server_id) for link in self._order
        )

    async def wait_for_link(self, server_id: str, timeout_s: float) -> ServerLink | None:
        """Return the link to a server, after waiting while an unreached server could be it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.find_link(server_id) is None and self.may_include(server_id):
                    await self._changed.wait()
        return self.find_link(server_id)

    async def wait_until_settled(self, timeout_s: float) -> None:
        """Wait until the servers are listed and each was tried once, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.is_published:
                    await self._changed.wait()
                for link in list(self._links.values()):
                    await link.first_attempt.wait()

    async def wait_until_described(self, timeout_s: float) -> bool:
        """Wait until a server has described the environment; return False on timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.description is None:
                    await self._changed.wait()
        return self.description is not None

    async def close(self, reason: str) -> None:
        """Close every link; the servers keep their sessions for their linger time."""
        for key in list(self._links):
            self._remove(key, reason)
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    # -- links -------------------------------------------------------------------------

    def _new_link(self, endpoint: ServerEndpoint) -> ServerLink:
        link = ServerLink(endpoint, self._options, lambda: self._link_changed(link), self._pause_s)
        if endpoint.server_id:
            self._by_server_id[endpoint.server_id] = link
        return link

    def _link_changed(self, link: ServerLink) -> None:
        if self._links.get(link.endpoint.key) is not link:
            return
        if link.server_id and self._by_server_id.get(link.server_id) is not link:
            self._by_server_id[link.server_id] = link
            self._removal_reasons.pop(link.server_id, None)
        if link.description is not None:
            self.description = link.description
        self._notify_changed()

    def _notify_changed(self) -> None:
        change_event, self._changed = self._changed, asyncio.Event()
        change_event.set()
        self._on_change()

    def _remove(self, key: str, reason: str = "") -> None:
        link = self._links.pop(key)
        reason = reason or f"its server at {link.endpoint.grpc_address} was removed"
        for server_id in [i for i, other in self._by_server_id.items() if other is link]:
            del self._by_server_id[server_id]
            self._removal_reasons[server_id] = reason
            if len(self._removal_reasons) > _MAX_REMOVED:
                self._removal_reasons.popitem(last=False)
        task = asyncio.create_task(link.close(reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _choose_link(self, size: int, excluded: Collection[ServerLink]) -> ServerLink | None:
        """Return the less loaded of two random servers with capacity.

        This spreads sessions almost as evenly as the least loaded of all servers would, and
        several gateways do not all choose the same server.
        """
        order = self._order
        for _ in range(_MAX_PAIRS if len(order) > _MAX_PAIRS else 0):
            pair = random.sample(order, 2)
            if all(link.num_free >= size and link not in excluded for link in pair):
                return _less_loaded(pair)
        candidates = [link for link in order if link.num_free >= size and link not in excluded]
        if not candidates:
            return None
        return _less_loaded(random.sample(candidates, 2) if len(candidates) > 2 else candidates)

    def _pause_s(self) -> float:
        """Return the seconds until the next poll: few while opens wait, more in a large fleet."""
        pause_s = self._options.poll_interval_s
        if self._has_waiting():
            pause_s = min(pause_s, _MIN_POLL_INTERVAL_S)
        return max(pause_s, len(self._order) / _MAX_POLLS_PER_S) * random.uniform(0.8, 1.2)


def _less_loaded(links: Sequence[ServerLink]) -> ServerLink:
    return min(links, key=lambda link: link.num_sessions / link.max_sessions)


def _split(size: int, links: Sequence[ServerLink]) -> dict[ServerLink, int]:
    """Split `size` over servers, most free capacity first; empty if the capacity is too small."""
    parts: dict[ServerLink, int] = {}
    for link in sorted(links, key=lambda link: link.num_free, reverse=True):
        if not link.num_free:
            break
        num_sessions = min(link.num_free, size)
        parts[link] = num_sessions
        size -= num_sessions
        if size == 0:
            return parts
    return {}
