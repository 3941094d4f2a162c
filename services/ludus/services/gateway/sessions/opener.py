"""Opens sessions on the servers of a fleet, with ids that the gateway signs.

    FleetAdmission --shares--> open on servers --full, gone, draining?--> other servers, or queue
                                   |
                                   +--> sessions with their links

A group stays on one server if it fits. Otherwise its shares start with the same seed, and their
first observations are compared. Sessions whose caller disconnected meanwhile are closed.
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
from ludus.env.sessions.interface import OpenArgs, OpenResult
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import (
    AuthenticationError,
    CapacityError,
    GroupMismatchError,
    SessionLostError,
    UnavailableError,
)
from ludus.services.gateway.fleet.admission import FleetAdmission
from ludus.services.gateway.fleet.fleet import Share
from ludus.services.gateway.fleet.server_link import ServerLink
from ludus.services.gateway.tenancy.tenants import Tenant

_MIN_ATTEMPTS = 8
"""Minimum number of attempts, even after the deadline."""


@dataclass(frozen=True, slots=True)
class PlacedSession:
    """A new session and the link to its server."""

    link: ServerLink
    opened: OpenResult


class SessionOpener:
    """Opens sessions of one environment.

    Args:
        make_room: called with the number of sessions to free, after a server refused an open.
        id_lifetime_s: lifetime of the session ids, in seconds.
    """

    def __init__(
        self,
        environment: str,
        key: SessionKey,
        admission: FleetAdmission,
        make_room: Callable[[int], Awaitable[None]],
        id_lifetime_s: float,
    ) -> None:
        self._environment = environment
        self._key = key
        self._admission = admission
        self.make_room = make_room
        self._id_lifetime_s = id_lifetime_s
        self._seeds = DefaultSeeds()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(
        self, args: OpenArgs, size: int, tenant: Tenant, *, is_group: bool
    ) -> list[PlacedSession]:
        """Open sessions, all or none; try other servers if one refuses.

        Raises:
            CapacityError: not enough capacity became free in time.
            GroupMismatchError: the first observations differ; all sessions are closed again.
        """
        if is_group:
            args = dataclasses.replace(args, reset=self._seeds.fill(args.reset or ResetArgs()))
        open_on = self._open_group if is_group else self._open_one
        deadline_s = self._admission.deadline_s()
        refused_links: set[ServerLink] = set()
        for attempt in itertools.count(1):
            shares = await self._admission.reserve(size, deadline_s, refused_links)
            try:
                return await self._complete(shares, open_on(shares, args, tenant))
            except (CapacityError, UnavailableError, SessionLostError, AuthenticationError):
                refused_links.update(share.link for share in shares)
            self._admission.check_keys()
            await self.make_room(size)
            is_late = asyncio.get_running_loop().time() >= deadline_s
            if is_late and attempt >= _MIN_ATTEMPTS:
                break
        raise self._admission.make_capacity_error()

    def _sign_id(self, link: ServerLink, tenant: Tenant) -> str:
        return self._key.sign(
            self._environment, link.server_id, tenant=tenant.name, lifetime_s=self._id_lifetime_s
        )

    async def _open_one(
        self, shares: list[Share], args: OpenArgs, tenant: Tenant
    ) -> list[PlacedSession]:
        link = shares[0].link
        args = dataclasses.replace(args, session_id=self._sign_id(link, tenant))
        reply = await _call_server(link, lambda call: fill_open_args(call.open, args))
        return [self._make_placed(link, reply.open)]

    async def _open_group(
        self, shares: list[Share], args: OpenArgs, tenant: Tenant
    ) -> list[PlacedSession]:
        outcomes = await asyncio.gather(
            *(self._open_share(share, args, tenant) for share in shares), return_exceptions=True
        )
        failure = next((o for o in outcomes if isinstance(o, BaseException)), None)
        placed = [
            session
            for outcome in outcomes
            if not isinstance(outcome, BaseException)
            for session in outcome
        ]
        if failure is None and len({session.opened.view for session in placed}) == 1:
            return placed
        for session in placed:
            session.link.send_close(session.opened.session_id)
        if failure is not None:
            raise failure
        seed = args.reset.seed if args.reset else None
        raise GroupMismatchError(
            f"{len(placed)} sessions with seed {seed} returned different first observations on"
            f" {len(shares)} servers; see: ludus env check {self._environment}"
        )

    async def _open_share(
        self, share: Share, args: OpenArgs, tenant: Tenant
    ) -> list[PlacedSession]:
        link = share.link
        ids = [self._sign_id(link, tenant) for _ in range(share.num_sessions)]

        def write(call: pb.Call) -> None:
            fill_open_args(call.open_group.open, args)
            call.open_group.size = len(ids)
            call.open_group.session_ids.extend(ids)

        reply = await _call_server(link, write)
        return [self._make_placed(link, message) for message in reply.open_group.sessions]

    def _make_placed(self, link: ServerLink, message: pb.OpenResponse) -> PlacedSession:
        """Read a new session, and give it a tools id that every gateway can verify."""
        opened_session = read_opened(message)
        if opened_session.tools_session_id:
            tools_id = self._key.tools_id(opened_session.session_id)
            opened_session = dataclasses.replace(opened_session, tools_session_id=tools_id)
        return PlacedSession(link, opened_session)

    async def _complete(
        self, shares: list[Share], work: Coroutine[Any, Any, list[PlacedSession]]
    ) -> list[PlacedSession]:
        """Return the result of the work, which completes even if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def settle_shares(done: asyncio.Task[list[PlacedSession]]) -> None:
            self._tasks.discard(done)
            has_failed = done.cancelled() or done.exception() is not None
            for share in shares:
                if has_failed:
                    share.cancel()
                else:
                    share.confirm()
            self._admission.advance()

        task.add_done_callback(settle_shares)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_close_abandoned)
            raise


def _close_abandoned(done: asyncio.Task[list[PlacedSession]]) -> None:
    if done.cancelled() or done.exception() is not None:
        return
    for session in done.result():
        session.link.send_close(session.opened.session_id)
        session.link.count_ended(1)


async def _call_server(link: ServerLink, write: Callable[[pb.Call], None]) -> pb.Reply:
    """Send an open and return the reply; a server that refuses gets no more opens for now."""
    try:
        return await link.call(link.server_id, write)
    except (CapacityError, UnavailableError):
        link.mark_full()
        raise
    except (AuthenticationError, SessionLostError) as error:
        link.mark_refused(error.message)
        raise
