"""Opens sessions on the servers of a fleet, under ids that the gateway signs.

    Admission --shares--> open upstream --full, gone, draining?--> other servers, or the queue
                              |
                              +--> sessions with the links they are on

A group stays together where it fits; else its shares begin on one seed and their first
observations are compared. What was opened for a caller that has gone meanwhile is closed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ludus.env.encoding import DefaultSeeds, ResetArgs
from ludus.env.messages.protobuf import fill_open_args, read_opened
from ludus.env.security.session_ids import SessionKey
from ludus.env.sessions.interface import OpenArgs, Opened
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import (
    AuthenticationError,
    CapacityError,
    GroupMismatchError,
    InvalidCallError,
    SessionLostError,
    UnavailableError,
)
from ludus.services.gateway.fleet.admission import Admission
from ludus.services.gateway.fleet.fleet import Share
from ludus.services.gateway.fleet.server_link import ServerLink
from ludus.services.gateway.tenancy.tenants import Tenant

_MIN_ATTEMPTS = 8
"""Servers that are tried also where nobody may wait."""


@dataclass(frozen=True, slots=True)
class PlacedSession:
    """A new session and the link to its server."""

    link: ServerLink
    opened: Opened


class SessionOpener:
    """Opens sessions of one environment.

    Args:
        make_room: told how many sessions are wanted that a server had no room for after all.
        id_lifetime_s: how long the ids can be used.
    """

    def __init__(
        self,
        environment: str,
        key: SessionKey,
        admission: Admission,
        make_room: Callable[[int], Awaitable[None]],
        id_lifetime_s: float,
    ) -> None:
        self._environment = environment
        self._key = key
        self._admission = admission
        self._make_room = make_room
        self._id_lifetime_s = id_lifetime_s
        self._seeds = DefaultSeeds()
        self._tasks: set[asyncio.Task[Any]] = set()

    def check(self, args: OpenArgs, size: int) -> None:
        """Refuse an open that no server is asked for.

        Raises:
            InvalidCallError: it is malformed, or too large.
            UnavailableError: the gateway is draining.
        """
        if args.session_id:
            raise InvalidCallError(
                "expected no session id in an open, got one: the gateway chooses it"
            )
        if size < 1:
            raise InvalidCallError(f"expected a group of at least 1 session, got {size}")
        self._admission.check(size)

    async def open(
        self, args: OpenArgs, size: int, tenant: Tenant, *, is_group: bool
    ) -> list[PlacedSession]:
        """New sessions, all or none; continues to other servers when one turns out full.

        Raises:
            CapacityError: so many did not become free together in time.
            GroupMismatchError: they begin differently; all are closed again.
        """
        if is_group:
            args = dataclasses.replace(args, reset=self._seeds.fill(args.reset or ResetArgs()))
        open_on = self._open_group if is_group else self._open_one
        deadline_s = self._admission.deadline_s()
        refused: set[ServerLink] = set()
        for attempt in itertools.count(1):
            shares = await self._admission.room(size, deadline_s, refused)
            try:
                return await self._finish(shares, open_on(shares, args, tenant))
            except (CapacityError, UnavailableError, SessionLostError, AuthenticationError):
                refused.update(share.link for share in shares)
            self._admission.check_keys()
            await self._make_room(size)
            is_late = asyncio.get_running_loop().time() >= deadline_s
            if is_late and attempt >= _MIN_ATTEMPTS:
                break
        raise self._admission.full()

    def sign(self, link: ServerLink, tenant: Tenant) -> str:
        """An id under which a session may be opened on the link's server."""
        return self._key.sign(
            self._environment, link.server_id, tenant=tenant.name, lifetime_s=self._id_lifetime_s
        )

    async def _open_one(
        self, shares: list[Share], args: OpenArgs, tenant: Tenant
    ) -> list[PlacedSession]:
        link = shares[0].link
        args = dataclasses.replace(args, session_id=self.sign(link, tenant))
        reply = await _ask(link, lambda call: fill_open_args(call.open, args))
        return [self._placed(link, reply.open)]

    async def _open_group(
        self, shares: list[Share], args: OpenArgs, tenant: Tenant
    ) -> list[PlacedSession]:
        outcomes = await asyncio.gather(
            *(self._open_share(share, args, tenant) for share in shares), return_exceptions=True
        )
        failure = next((o for o in outcomes if isinstance(o, BaseException)), None)
        placed = [one for o in outcomes if not isinstance(o, BaseException) for one in o]
        if failure is None and len({one.opened.view for one in placed}) == 1:
            return placed
        for one in placed:
            one.link.send_close(one.opened.session_id)
        if failure is not None:
            raise failure
        seed = args.reset.seed if args.reset else None
        raise GroupMismatchError(
            f"expected {len(placed)} sessions on seed {seed} to begin alike on {len(shares)}"
            " servers, got different first observations; see: ludus env check"
            f" {self._environment}"
        )

    async def _open_share(
        self, share: Share, args: OpenArgs, tenant: Tenant
    ) -> list[PlacedSession]:
        link = share.link
        ids = [self.sign(link, tenant) for _ in range(share.num_sessions)]

        def write(call: pb.Call) -> None:
            fill_open_args(call.open_group.open, args)
            call.open_group.size = len(ids)
            call.open_group.session_ids.extend(ids)

        reply = await _ask(link, write)
        return [self._placed(link, one) for one in reply.open_group.sessions]

    def _placed(self, link: ServerLink, message: pb.OpenResponse) -> PlacedSession:
        """The session, with an id for its tools that every gateway understands."""
        opened = read_opened(message)
        if opened.tools_session_id:
            tools_id = self._key.tools_id(opened.session_id)
            opened = dataclasses.replace(opened, tools_session_id=tools_id)
        return PlacedSession(link, opened)

    async def _finish(
        self, shares: list[Share], work: Coroutine[Any, Any, list[PlacedSession]]
    ) -> list[PlacedSession]:
        """The work's value; it runs to its end even when the caller gives up."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def settle(done: asyncio.Task[list[PlacedSession]]) -> None:
            self._tasks.discard(done)
            failed = done.cancelled() or done.exception() is not None
            for share in shares:
                if failed:
                    share.give_back()
                else:
                    share.opened()
            self._admission.advance()

        task.add_done_callback(settle)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_close_unwanted)
            raise


def _close_unwanted(done: asyncio.Task[list[PlacedSession]]) -> None:
    if done.cancelled() or done.exception() is not None:
        return
    for one in done.result():
        one.link.send_close(one.opened.session_id)
        one.link.closed(1)


async def _ask(link: ServerLink, write: Callable[[pb.Call], None]) -> pb.Reply:
    """The reply to an open; a server that cannot take it gets no more of them for now."""
    try:
        return await link.call(link.server_id, write)
    except (CapacityError, UnavailableError):
        link.found_full()
        raise
    except (AuthenticationError, SessionLostError) as error:
        link.refuse(error.message)
        raise
