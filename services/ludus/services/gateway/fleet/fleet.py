"""The servers of one environment: which there are, how full they are, where sessions go.

    source --whole list--> publish --> one ServerLink each
    place(n) --> the less loaded of two servers with room, or several that share a group

Who waits here: `wait_settled`, for the first list and the first connections, and `find`, for a
server that another gateway has reached before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ludus.env.types import EnvironmentDescription
from ludus.services.gateway.fleet.endpoints import Endpoint
from ludus.services.gateway.fleet.server_link import LinkOptions, ServerLink

_MAX_GONE = 4096
_NUM_DRAWS = 4
"""So often two servers are drawn blindly before all of them are looked at."""
_HURRIED_POLL_S = 0.1
_MAX_POLLS_PER_S = 200
"""Of all servers together: each costs some tenths of a millisecond."""


@dataclass(frozen=True, slots=True)
class Share:
    """A server and how many sessions were set aside on it."""

    link: ServerLink
    num_sessions: int
    num_polls: int
    """Of the link, when they were set aside."""

    def opened(self) -> None:
        """Note that the sessions were opened."""
        self.link.opened(self.num_sessions)

    def give_back(self) -> None:
        """Free the room: no session was opened there."""
        self.link.give_back(self.num_sessions, self.num_polls)


class Fleet:
    """The servers of one environment, each with its link.

    Args:
        on_change: called when a server takes sessions again, stops, or gets room.
        in_a_hurry: True while somebody waits for room.
    """

    def __init__(
        self,
        options: LinkOptions,
        on_change: Callable[[], None],
        in_a_hurry: Callable[[], bool],
        draw: random.Random | None = None,
    ) -> None:
        self._options = options
        self._on_change = on_change
        self._in_a_hurry = in_a_hurry
        self._draw = draw or random.Random()
        self._links: dict[str, ServerLink] = {}
        self._order: list[ServerLink] = []
        """The same, to draw from."""
        self._by_server_id: dict[str, ServerLink] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._published = asyncio.Event()
        self._described = asyncio.Event()
        self._changed = asyncio.Event()
        """Another one after each change."""
        self._description: EnvironmentDescription | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def links(self) -> Collection[ServerLink]:
        """The links to all servers that the source lists."""
        return self._links.values()

    @property
    def description(self) -> EnvironmentDescription | None:
        """What the latest server said of the environment; None until one was reached."""
        return self._description

    @property
    def is_published(self) -> bool:
        """True when the source has said at least once which servers there are."""
        return self._published.is_set()

    def publish(self, endpoints: Sequence[Endpoint]) -> None:
        """Take over the source's whole list."""
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
        self._published.set()
        self._tell_changed()

    def link_of(self, server_id: str) -> ServerLink | None:
        """The link to a server, also to one that restarted under another id since."""
        return self._by_server_id.get(server_id)

    def link_at(self, key: str) -> ServerLink | None:
        """The link to the server that the source lists under the key."""
        return self._links.get(key)

    def num_sessions_of(self, key: str) -> int:
        """Sessions on the server that the source lists under the key."""
        link = self._links.get(key)
        return link.num_sessions if link is not None else 0

    def loads_of_pods(self) -> dict[str, tuple[int, int]]:
        """Sessions and capacity by pod, of the servers in a cluster that were reached."""
        return {
            link.endpoint.pod_name: (link.num_sessions, link.max_sessions)
            for link in self._links.values()
            if link.endpoint.pod_name and link.max_sessions
        }

    def reason_gone(self, server_id: str) -> str:
        """Why a server is not there."""
        return self._gone.get(server_id) or (
            f"no server {server_id} is known here (it was stopped or replaced)"
        )

    def place(self, size: int, excluded: Collection[ServerLink] = ()) -> list[Share] | None:
        """Room for `size` sessions, set aside: on one server if it fits; None if it does not.

        Args:
            excluded: links that refused just now.
        """
        link = self._find(size, excluded)
        if link is not None:
            parts = {link: size}
        else:
            parts = _split(size, [one for one in self._order if one not in excluded])
        return [Share(one, num, one.reserve(num)) for one, num in parts.items()] or None

    def num_missing(self, size: int) -> int:
        """How many of `size` sessions find no place on servers that take some.

        None while no server takes any: one that is silent or away gets no room from a session that
        ends.
        """
        taking = [link for link in self._order if link.takes_sessions]
        if not taking or self._find(size, ()) is not None:
            return 0
        return max(size - sum(link.room for link in taking), 0)

    def may_have(self, server_id: str) -> bool:
        """True while a server that is not reached might be this one, also under another id."""
        if server_id in self._gone:
            return False
        return not self.is_published or any(
            not (link.is_connected or link.endpoint.server_id) for link in self._order
        )

    async def find(self, server_id: str, timeout_s: float) -> ServerLink | None:
        """The link to a server; waits at most so long while one that is not reached may be it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.link_of(server_id) is None and self.may_have(server_id):
                    await self._changed.wait()
        return self.link_of(server_id)

    async def wait_settled(self, timeout_s: float) -> bool:
        """True when the servers are listed and each was tried once; waits at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._published.wait()
                for link in list(self._links.values()):
                    await link.tried.wait()
        except TimeoutError:
            return False
        return True

    async def wait_described(self, timeout_s: float) -> bool:
        """True when a server has said what the environment is; waits at most so long."""
        try:
            await asyncio.wait_for(self._described.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self, reason: str) -> None:
        """End every link; the servers keep their sessions for their linger."""
        for key in list(self._links):
            self._remove(key, reason)
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    # -- links -------------------------------------------------------------------------

    def _new_link(self, endpoint: Endpoint) -> ServerLink:
        link = ServerLink(endpoint, self._options, lambda: self._link_changed(link), self._pause_s)
        if endpoint.server_id:
            self._by_server_id[endpoint.server_id] = link
        return link

    def _link_changed(self, link: ServerLink) -> None:
        if self._links.get(link.endpoint.key) is not link:
            return
        if link.server_id and self._by_server_id.get(link.server_id) is not link:
            self._by_server_id[link.server_id] = link
            self._gone.pop(link.server_id, None)
        if link.description is not None:
            self._description = link.description
            self._described.set()
        self._tell_changed()

    def _tell_changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._on_change()

    def _remove(self, key: str, reason: str = "") -> None:
        link = self._links.pop(key)
        reason = reason or f"its server at {link.endpoint.grpc_address} was removed"
        for server_id in [i for i, known in self._by_server_id.items() if known is link]:
            del self._by_server_id[server_id]
            self._gone[server_id] = reason
            if len(self._gone) > _MAX_GONE:
                self._gone.popitem(last=False)
        task = asyncio.create_task(link.close(reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _find(self, size: int, excluded: Collection[ServerLink]) -> ServerLink | None:
        """The less loaded of two with room: nearly as even as the least of all, no stampede."""
        order = self._order
        for _ in range(_NUM_DRAWS if len(order) > _NUM_DRAWS else 0):
            pair = self._draw.sample(order, 2)
            if all(link.room >= size and link not in excluded for link in pair):
                return _less_loaded(pair)
        fitting = [link for link in order if link.room >= size and link not in excluded]
        if not fitting:
            return None
        return _less_loaded(self._draw.sample(fitting, 2) if len(fitting) > 2 else fitting)

    def _pause_s(self) -> float:
        """Between two polls of a server: short while somebody waits, longer in a large fleet."""
        wanted_s = self._options.poll_interval_s
        if self._in_a_hurry():
            wanted_s = min(wanted_s, _HURRIED_POLL_S)
        return max(wanted_s, len(self._order) / _MAX_POLLS_PER_S) * self._draw.uniform(0.8, 1.2)


def _less_loaded(links: Sequence[ServerLink]) -> ServerLink:
    return min(links, key=lambda link: link.num_sessions / link.max_sessions)


def _split(size: int, links: Sequence[ServerLink]) -> dict[ServerLink, int]:
    """Parts that together are `size`, the roomiest servers first; empty if there is no room."""
    parts: dict[ServerLink, int] = {}
    for link in sorted(links, key=lambda link: link.room, reverse=True):
        if not link.room:
            break
        num_sessions = min(link.room, size)
        parts[link] = num_sessions
        size -= num_sessions
        if size == 0:
            return parts
    return {}
