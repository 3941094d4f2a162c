"""The servers of one environment: their links, their load and the placement of sessions.

source --whole list--> replace_servers --> one ServerLink each
reserve(n) --> the less loaded of two random servers, or several servers that share a group
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

_MAX_REMOVAL_REASONS = 4096
_MAX_PAIRS = 4
"""Number of random pairs that are tried before all servers are checked."""
_MIN_POLL_INTERVAL_S = 0.1
_MAX_POLLS_PER_S = 200
"""Maximum poll rate of the whole fleet, because each poll takes some tenths of a millisecond."""


@dataclass(frozen=True, slots=True)
class Share:
    """Capacity that is reserved on one server for some sessions of an open."""

    link: ServerLink
    num_sessions: int
    num_polls: int
    """The value that `ServerLink.reserve` returned."""

    def confirm(self) -> None:
        """Record that the sessions were opened."""
        self.link.confirm(self.num_sessions)

    def cancel(self) -> None:
        """Free the capacity, because no session was opened."""
        self.link.cancel(self.num_sessions, self.num_polls)


class Fleet:
    """The servers of one environment, each with a link.

    Args:
        on_change: called when a server starts or stops accepting sessions, or frees capacity.
        has_waiting_opens: returns whether opens wait for capacity.
    """

    def __init__(
        self,
        options: ServersSection,
        on_change: Callable[[], None],
        has_waiting_opens: Callable[[], bool],
    ) -> None:
        self._options = options
        self._on_change = on_change
        self._has_waiting_opens = has_waiting_opens
        self._links: dict[str, ServerLink] = {}
        """The links by the keys of their servers in the source."""
        self._link_list: list[ServerLink] = []
        """The links as a list, for random choices."""
        self._link_by_id: dict[str, ServerLink] = {}
        """The links by the ids that their servers have or once had."""
        self._removal_reasons: OrderedDict[str, str] = OrderedDict()
        self.has_server_list = False
        """True when the source has published its first list of servers."""
        self.description: EnvironmentDescription | None = None
        """The environment's description from the latest connected server; None before the first."""
        self._change_event = asyncio.Event()
        """Event that the next change will set; it is then replaced by a new event."""
        self._close_tasks: set[asyncio.Task[None]] = set()

    @property
    def links(self) -> Collection[ServerLink]:
        """The links to all servers that the source lists."""
        return self._links.values()

    def replace_servers(self, endpoints: Sequence[ServerEndpoint]) -> None:
        """Replace the list of servers by the source's current list."""
        endpoint_by_key = {endpoint.key: endpoint for endpoint in endpoints}
        for key in [key for key in self._links if key not in endpoint_by_key]:
            self._remove_link(key)
        for key, endpoint in endpoint_by_key.items():
            link = self._links.get(key)
            if link is not None and link.endpoint.grpc_address != endpoint.grpc_address:
                self._remove_link(key)
                link = None
            if link is None:
                self._links[key] = self._make_link(endpoint)
            else:
                link.endpoint = endpoint
        self._link_list = list(self._links.values())
        self.has_server_list = True
        self._notify_change()

    def find_link(self, server_id: str) -> ServerLink | None:
        """Return the link to the server that has or once had this id."""
        return self._link_by_id.get(server_id)

    def find_link_by_key(self, key: str) -> ServerLink | None:
        """Return the link to the server with this key in the source."""
        return self._links.get(key)

    def read_pod_loads(self) -> dict[str, tuple[int, int]]:
        """Return (number of sessions, capacity) of each server that responded, by pod name."""
        return {
            link.endpoint.pod_name: (link.num_sessions, link.max_sessions)
            for link in self._links.values()
            if link.endpoint.pod_name and link.max_sessions
        }

    def explain_removal(self, server_id: str) -> str:
        """Return the reason why a server is not in the list."""
        return self._removal_reasons.get(server_id) or (
            f"this gateway has no server {server_id} (it was stopped or replaced)"
        )

    def reserve(self, size: int, excluded_links: Collection[ServerLink] = ()) -> list[Share] | None:
        """Reserve capacity for `size` sessions, on one server if possible.

        Args:
            excluded_links: links that just refused the open.

        Returns:
            The shares of the servers, or None if the capacity is too small.
        """
        best_link = self._choose_link(size, excluded_links)
        sizes = {best_link: size} if best_link else self._split(size, excluded_links)
        return [Share(link, size, link.reserve(size)) for link, size in sizes.items()] or None

    def count_missing(self, size: int) -> int:
        """Return how many of `size` sessions have no capacity on the servers that accept sessions.

        Return 0 if no server accepts sessions, because then ending other sessions would not help.
        """
        accepting_links = [link for link in self._link_list if link.accepts_sessions]
        if not accepting_links or self._choose_link(size, ()) is not None:
            return 0
        return max(size - sum(link.num_free for link in accepting_links), 0)

    def may_include(self, server_id: str) -> bool:
        """Return whether a server that has not connected yet could have this id."""
        if server_id in self._removal_reasons:
            return False
        return not self.has_server_list or any(
            not (link.is_connected or link.endpoint.server_id) for link in self._link_list
        )

    async def wait_for_link(self, server_id: str, timeout_s: float) -> ServerLink | None:
        """Return the link to a server; wait while it may be one that is not connected yet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.find_link(server_id) is None and self.may_include(server_id):
                    await self._change_event.wait()
        return self.find_link(server_id)

    async def wait_until_settled(self, timeout_s: float) -> None:
        """Wait until all servers are listed and tried once, or until the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.has_server_list:
                    await self._change_event.wait()
                for link in list(self._links.values()):
                    await link.first_attempt_event.wait()

    async def wait_until_described(self, timeout_s: float) -> bool:
        """Wait until a server has described the environment; return False on timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.description is None:
                    await self._change_event.wait()
        return self.description is not None

    async def close(self, reason: str) -> None:
        """Close every link; the servers keep their sessions for their linger time."""
        for key in list(self._links):
            self._remove_link(key, reason)
        if self._close_tasks:
            await asyncio.gather(*self._close_tasks, return_exceptions=True)

    def _make_link(self, endpoint: ServerEndpoint) -> ServerLink:
        link = ServerLink(
            endpoint, self._options, lambda: self._handle_link_change(link), self._choose_pause_s
        )
        if endpoint.server_id:
            self._link_by_id[endpoint.server_id] = link
        return link

    def _handle_link_change(self, link: ServerLink) -> None:
        if self._links.get(link.endpoint.key) is not link:
            return
        if link.server_id and self._link_by_id.get(link.server_id) is not link:
            self._link_by_id[link.server_id] = link
            self._removal_reasons.pop(link.server_id, None)
        if link.description is not None:
            self.description = link.description
        self._notify_change()

    def _notify_change(self) -> None:
        change_event, self._change_event = self._change_event, asyncio.Event()
        change_event.set()
        self._on_change()

    def _remove_link(self, key: str, reason: str = "") -> None:
        link = self._links.pop(key)
        reason = reason or f"its server at {link.endpoint.grpc_address} was removed"
        server_ids = [server_id for server_id, owner in self._link_by_id.items() if owner is link]
        for server_id in server_ids:
            del self._link_by_id[server_id]
            self._removal_reasons[server_id] = reason
            if len(self._removal_reasons) > _MAX_REMOVAL_REASONS:
                self._removal_reasons.popitem(last=False)
        task = asyncio.create_task(link.close(reason))
        self._close_tasks.add(task)
        task.add_done_callback(self._close_tasks.discard)

    def _choose_link(self, size: int, excluded_links: Collection[ServerLink]) -> ServerLink | None:
        """Return the less loaded of two random servers with capacity.

        This balances load almost as well as choosing the least loaded of all servers. It also keeps
        several gateways from choosing the same server at the same time.
        """
        links = self._link_list
        for _ in range(_MAX_PAIRS if len(links) > _MAX_PAIRS else 0):
            pair = random.sample(links, 2)
            if all(link.num_free >= size and link not in excluded_links for link in pair):
                return _choose_less_loaded(pair)
        choices = [link for link in links if link.num_free >= size and link not in excluded_links]
        return _choose_less_loaded(random.sample(choices, min(len(choices), 2)))

    def _split(self, size: int, excluded_links: Collection[ServerLink]) -> dict[ServerLink, int]:
        """Split `size` sessions over servers, those with the most free capacity first.

        Return the number of sessions by link, or {} if the capacity is too small.
        """
        sizes: dict[ServerLink, int] = {}
        links = [link for link in self._link_list if link.num_free and link not in excluded_links]
        for link in sorted(links, key=lambda link: link.num_free, reverse=True):
            sizes[link] = min(link.num_free, size)
            size -= sizes[link]
            if size == 0:
                return sizes
        return {}

    def _choose_pause_s(self) -> float:
        """Return the seconds until the next poll: fewer while opens wait, more in a large fleet."""
        pause_s = self._options.poll_interval_s
        if self._has_waiting_opens():
            pause_s = min(pause_s, _MIN_POLL_INTERVAL_S)
        return max(pause_s, len(self._link_list) / _MAX_POLLS_PER_S) * random.uniform(0.8, 1.2)


def _choose_less_loaded(links: Sequence[ServerLink]) -> ServerLink | None:
    return min(links, key=lambda link: link.num_sessions / link.max_sessions, default=None)
