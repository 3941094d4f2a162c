"""The opener of sessions on the servers of a fleet, with ids that the gateway signs.

    FleetAdmission --shares--> open on servers --full, gone, draining?--> other servers, or queue
                                   |
                                   +--> sessions with their links

All sessions of a group are on one server if one has enough capacity. Otherwise several servers open
shares of the group with the same seed, and their first observations must be equal. If the caller
disconnects while sessions are opened, they are closed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ludus.env.encoding import DefaultSeeds, ResetArgs
from ludus.env.messages.protobuf import fill_open_args, read_open_result
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
"""Minimum number of attempts, which are made even after the deadline."""


@dataclass(frozen=True, slots=True)
class PlacedSession:
    """A new session and the link to its server."""

    link: ServerLink
    open_result: OpenResult


class SessionOpener:
    """Opener of the sessions of one environment.

    Args:
        make_room: ends idle sessions; called with the size of an open that a server refused.
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
            GroupMismatchError: the first observations differ. All sessions of the group are closed.
        """
        if is_group:
            args = dataclasses.replace(args, reset=self._seeds.fill(args.reset or ResetArgs()))
        open_shares = self._open_group if is_group else self._open_one
        deadline_s = self._admission.compute_deadline_s()
        refused_links: set[ServerLink] = set()
        for attempt in itertools.count(1):
            shares = await self._admission.reserve(size, deadline_s, refused_links)
            try:
                return await self._finish_open(shares, open_shares(shares, args, tenant))
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
        return [self._read_placed_session(link, reply.open)]

    async def _open_group(
        self, shares: list[Share], args: OpenArgs, tenant: Tenant
    ) -> list[PlacedSession]:
        outcomes = await asyncio.gather(
            *(self._open_share(share, args, tenant) for share in shares), return_exceptions=True
        )
        failure: BaseException | None = None
        sessions: list[PlacedSession] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                failure = failure or outcome
            else:
                sessions += outcome
        if failure is None and len({session.open_result.view for session in sessions}) == 1:
            return sessions
        for session in sessions:
            session.link.send_close(session.open_result.session_id)
        if failure is not None:
            raise failure
        seed = args.reset.seed if args.reset else None
        raise GroupMismatchError(
            f"{len(sessions)} sessions with seed {seed} returned different first"
            f" observations on {len(shares)} servers; see: ludus env check {self._environment}"
        )

    async def _open_share(
        self, share: Share, args: OpenArgs, tenant: Tenant
    ) -> list[PlacedSession]:
        link = share.link
        session_ids = [self._sign_id(link, tenant) for _ in range(share.num_sessions)]

        def fill_call(call: pb.Call) -> None:
            fill_open_args(call.open_group.open, args)
            call.open_group.size = len(session_ids)
            call.open_group.session_ids.extend(session_ids)

        reply = await _call_server(link, fill_call)
        return [self._read_placed_session(link, message) for message in reply.open_group.sessions]

    def _read_placed_session(self, link: ServerLink, message: pb.OpenResponse) -> PlacedSession:
        """Read a new session, and replace its tools id with one that every gateway can verify."""
        open_result = read_open_result(message)
        if open_result.tools_session_id:
            tools_id = self._key.make_tools_id(open_result.session_id)
            open_result = dataclasses.replace(open_result, tools_session_id=tools_id)
        return PlacedSession(link, open_result)

    async def _finish_open(
        self, shares: list[Share], work: Coroutine[Any, Any, list[PlacedSession]]
    ) -> list[PlacedSession]:
        """Return the result of the work, which continues even if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def settle_shares(finished_task: asyncio.Task[list[PlacedSession]]) -> None:
            self._tasks.discard(finished_task)
            has_failed = finished_task.cancelled() or finished_task.exception() is not None
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
            task.add_done_callback(_close_abandoned_sessions)
            raise


def _close_abandoned_sessions(finished_task: asyncio.Task[list[PlacedSession]]) -> None:
    if finished_task.cancelled() or finished_task.exception() is not None:
        return
    for session in finished_task.result():
        session.link.send_close(session.open_result.session_id)
        session.link.count_ended(1)


async def _call_server(link: ServerLink, fill_call: Callable[[pb.Call], None]) -> pb.Reply:
    """Send an open and return the reply. If the server refuses, it gets no opens for a while."""
    try:
        return await link.call(link.server_id, fill_call)
    except (CapacityError, UnavailableError):
        link.mark_full()
        raise
    except (AuthenticationError, SessionLostError) as error:
        link.mark_refused(error.message)
        raise
