"""The sessions of one environment on the servers of a fleet; implements `Sessions`.

    wire --Sessions--> GatewaySessions --SessionOpener--> a server with room (open)
                                       --signed id--> the session's server (every other call)

A gateway needs no stored state to route a call, because the signed session id contains the server
id. Any gateway with the session key can therefore serve any session, even after a restart. The
sessions are only tracked so that they can end with their connection and be counted.

An open is a request to open one session or a group; it waits in the queue. Every other call waits
only for its server: at most `retry_within_s` if the connection is broken, and at most
`FIND_TIMEOUT_S` if this gateway has never been connected to the server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import lru_cache

from ludus.env.encoding import EncodedResult, EncodedToolResult, ResetArgs, encode_json
from ludus.env.messages.protobuf import (
    fill_reset_args,
    fill_step,
    make_attempt_id,
    read_encoded_result,
    read_encoded_tool_result,
)
from ludus.env.security.session_ids import SessionKey, SignedId, hide_full_id, make_tools_only_error
from ludus.env.sessions.interface import Connection, Load, OpenArgs, OpenResult, SessionEvents
from ludus.env.sessions.tombstones import SessionEnd, SessionTombstone
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import (
    CallTimeoutError,
    EnvError,
    InfrastructureError,
    InvalidCallError,
    PermissionDeniedError,
    SessionLostError,
    UnavailableError,
)
from ludus.services.gateway.config import ServersSection, SessionsSection
from ludus.services.gateway.fleet.admission import FleetAdmission
from ludus.services.gateway.fleet.server_link import ServerLink
from ludus.services.gateway.sessions.opener import SessionOpener
from ludus.services.gateway.sessions.tracked_sessions import TrackedSession, TrackedSessions
from ludus.services.gateway.tenancy.access import TenantAccess
from ludus.services.gateway.tenancy.metrics import OK, EnvironmentLoad, GatewayMetrics
from ludus.services.gateway.tenancy.quotas import Quotas
from ludus.services.gateway.tenancy.tenants import (
    GATEWAY_TENANT,
    Tenant,
    get_current_tenant,
    set_current_tenant,
)

_MAX_LINGER_S = 600.0
"""Maximum linger time that a client may request, in seconds."""
FIND_TIMEOUT_S = 5.0
"""Maximum time that a call waits for a server this gateway is not connected to yet, in seconds."""
_MAX_CACHED_IDS = 8_192
"""Maximum number of verified session ids in the cache of an environment."""
_CLOSED_TOMBSTONE = SessionTombstone(SessionEnd.CLOSED, "it was closed")
_CONNECTION_ENDED_TOMBSTONE = SessionTombstone(
    SessionEnd.CONNECTION_ENDED, "the connection that opened it ended"
)
_EPISODE_ENDED_TOMBSTONE = SessionTombstone(SessionEnd.EPISODE_ENDED, "its episode ended")


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """Objects shared by all environments of a gateway."""

    key: SessionKey
    access: TenantAccess
    quotas: Quotas
    metrics: GatewayMetrics
    limits: SessionsSection
    servers: ServersSection


class GatewaySessions:
    """The sessions of one environment on all servers of its fleet."""

    counts = None
    worker_counts = None
    unavailable_reason = ""
    immediate_calls = None

    def __init__(self, environment: str, context: GatewayContext) -> None:
        limits = context.limits
        self.environment = environment
        self.events = SessionEvents()
        self.admission = FleetAdmission(
            environment,
            limits,
            context.servers,
            lambda wait_s: context.metrics.record_wait(environment, wait_s),
        )
        self.fleet = self.admission.fleet
        self._linger_s = limits.linger_s
        self._max_group_size = limits.max_group_size
        self.opener = SessionOpener(
            environment, context.key, self.admission, self._make_room, limits.id_lifetime_s
        )
        self._key = context.key
        self._read_id_with = lru_cache(_MAX_CACHED_IDS)(
            lambda _, session_id: self._key.read(session_id)
        )
        self._access = context.access
        self._quotas = context.quotas
        self._metrics = context.metrics
        self.tracked_sessions = TrackedSessions(
            context.quotas,
            self.events,
            limits.linger_s,
            limits.idle_timeout_s,
            lambda num_sessions: context.metrics.count_lost(environment, num_sessions),
        )
        self._is_leaving = False
        self._loop = asyncio.get_running_loop()

    # -- description and load ----------------------------------------------------------

    @property
    def description(self) -> EnvironmentDescription:
        """The environment's description, with the capacity of the whole fleet."""
        description = self.fleet.description
        assert description is not None, "the wire has called `admission.wait_until_described`"
        return dataclasses.replace(
            description,
            max_sessions=self.load.max_sessions,
            server_id="gateway",
            linger_s=self._linger_s,
        )

    @property
    def load(self) -> Load:
        """The load of the servers that accept sessions."""
        load = self.environment_load
        is_supplied = self.admission.supply is not None
        return Load(
            num_sessions=load.num_active,
            max_sessions=self._max_group_size if is_supplied else load.capacity,
            num_waiting=load.num_pending,
            is_draining=self.admission.is_draining,
        )

    @property
    def environment_load(self) -> EnvironmentLoad:
        """The load, with separate numbers for draining servers."""
        links = self.fleet.links
        active_links = [link for link in links if link.accepts_sessions]
        draining_links = [link for link in links if link.is_connected and not link.accepts_sessions]
        return EnvironmentLoad(
            environment=self.environment,
            num_pending=self.admission.num_waiting,
            num_active=sum(link.num_sessions for link in active_links),
            num_draining=sum(link.num_sessions for link in draining_links),
            # Servers created for single sessions have no meaningful capacity.
            capacity=0
            if self.admission.supply
            else sum(link.max_sessions for link in active_links),
            num_servers=len(active_links),
            num_draining_servers=len(draining_links),
            num_unreachable_servers=len(links) - len(active_links) - len(draining_links),
        )

    # -- opening -----------------------------------------------------------------------

    async def open(self, args: OpenArgs, connection: Connection | None = None) -> OpenResult:
        """Open a session; see `Sessions`."""
        return (await self._open(args, 1, connection))[0]

    async def open_group(
        self,
        args: OpenArgs,
        size: int,
        connection: Connection | None = None,
        session_ids: Sequence[str] = (),
    ) -> list[OpenResult]:
        """Open sessions with the same seed, all or none, on one server if possible."""
        return await self._open(args, size, connection, session_ids, is_group=True)

    async def _open(
        self,
        args: OpenArgs,
        size: int,
        connection: Connection | None,
        session_ids: Sequence[str] = (),
        *,
        is_group: bool = False,
    ) -> list[OpenResult]:
        tenant = self._authorize()
        linger_s = min(args.linger_s or self._linger_s, _MAX_LINGER_S)
        args = dataclasses.replace(args, linger_s=linger_s)
        self._reserve_quota((args.session_id, *session_ids), size, tenant)
        started_s = self._loop.time()
        try:
            await self._make_room(size)
            placed_sessions = await self.opener.open(args, size, tenant, is_group=is_group)
        except BaseException as error:
            self._quotas.release(tenant, size)
            if isinstance(error, EnvError):
                seconds = self._loop.time() - started_s
                self._metrics.count_open(self.environment, error.code, size, seconds)
            raise
        self._metrics.count_open(self.environment, OK, size, self._loop.time() - started_s)
        for placed_session in placed_sessions:
            link, open_result = placed_session.link, placed_session.open_result
            session = TrackedSession(link, link.server_id, tenant, args.close_when_done, linger_s)
            self.tracked_sessions.add(open_result.session_id, session, connection)
        if connection is not None and connection.end_event.is_set():
            self.release(connection)
        return [placed_session.open_result for placed_session in placed_sessions]

    def _reserve_quota(self, session_ids: Sequence[str], size: int, tenant: Tenant) -> None:
        """Check an open, and reserve the tenant's quota for it."""
        try:
            if any(session_ids):
                raise InvalidCallError(
                    "an open must not contain a session id, because the gateway chooses it"
                )
            self.admission.check_open(size)
            self._quotas.reserve(tenant, size)
        except EnvError as error:
            self._metrics.count_open(self.environment, error.code, size)
            raise

    # -- calls -------------------------------------------------------------------------

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """Start a new episode."""
        self.count_call("reset")
        request = pb.Call()
        fill_reset_args(request.reset.args, args)
        # A reset may be repeated after the connection broke, because no client has seen its result.
        reply = await self.call("reset", session_id, request, is_repeatable=True)
        return read_encoded_result(reply.result)

    async def step(
        self,
        session_id: str,
        action: bytes | str,
        step_index: int = 0,
        timeout_s: float = 0.0,
        attempt_id: int = 0,
    ) -> EncodedResult:
        """Take a step; see `Sessions`."""
        self.count_call("step")
        request = pb.Call(step=pb.StepRequest(timeout_s=timeout_s))
        # The gateway repeats the call if the connection to the server breaks.
        attempt_id = attempt_id or make_attempt_id()
        fill_step(request.step, session_id, action, step_index, attempt_id)
        reply = await self.call("step", session_id, request, is_repeatable=step_index > 0)
        return read_encoded_result(reply.result)

    async def state(self, session_id: str) -> bytes:
        """Return the environment's state as JSON."""
        self.count_call("state")
        reply = await self.call("state", session_id, is_repeatable=True)
        return reply.state.state_json

    async def call_tool(
        self, session_id: str, name: str, arguments: JsonObject
    ) -> EncodedToolResult:
        """Call a tool of the environment and return its result."""
        self.count_call("call_tool")
        arguments_json = encode_json(arguments, "arguments")
        tool_call = pb.CallToolRequest(name=name, arguments_json=arguments_json)
        reply = await self.call("call_tool", session_id, pb.Call(call_tool=tool_call))
        return read_encoded_tool_result(reply.call_tool)

    async def close(self, session_id: str) -> bool:
        """Close a session, and return True, because the gateway has signed the id."""
        self.verify_id(session_id)
        session = self.tracked_sessions.get(session_id)
        try:
            self.tracked_sessions.remove(session_id, _CLOSED_TOMBSTONE)
            await self.call("close", session_id, is_repeatable=True)
        except InfrastructureError:  # it has ended, or ends after its linger time
            self._metrics.count_lost(self.environment, session is not None)
        finally:
            if session is not None:
                session.link.count_ended(1)
            self.admission.advance()
        return True

    async def detach(self, session_id: str, connection: Connection | None = None) -> None:
        """End a session after its linger time, unless it is called before that; see `Sessions`."""
        self._authorize()
        if not self.tracked_sessions.remove_connection(session_id, connection):
            return
        try:
            await self.call("detach", session_id, is_repeatable=True)
        except InfrastructureError:
            return  # it has ended, or lingers because the link broke
        self.tracked_sessions.mark_detached(session_id)

    def attach(self, session_ids: Iterable[str], connection: Connection) -> None:
        """Record that a connection uses these sessions, even if another gateway opened them."""
        for session_id in session_ids:
            self.tracked_sessions.attach(session_id, connection)

    def release(self, connection: Connection) -> None:
        """Detach the sessions that only this connection uses; close those that cannot linger."""
        connection.end_event.set()
        for session_id in list(connection.session_ids):
            if not self.tracked_sessions.remove_connection(session_id, connection):
                continue
            session = self.tracked_sessions.get(session_id)
            link = session.link if session is not None else self._find_server_link(session_id)
            if link is None or self._is_leaving:
                continue  # its server detaches it when the stream to this gateway ends
            if session is not None and session.linger_s <= 0:
                self.tracked_sessions.remove(session_id, _CONNECTION_ENDED_TOMBSTONE)
                link.send_close(session_id)
                link.count_ended(1)
                continue
            link.send_detach(session_id)
            self.tracked_sessions.mark_detached(session_id)
        self.admission.advance()

    # -- for the wires of the gateway ---------------------------------------------------

    def verify_id(self, session_id: str, *, accepts_tools_ids: bool = False) -> SignedId:
        """Verify a session id for the tenant of the current request, and return its content.

        Args:
            accepts_tools_ids: True if the id may be one that permits only tool calls.

        Raises:
            EnvError: the id is forged, expired, or belongs to another tenant or environment.
        """
        tenant = self._authorize()
        signed_id = self._read_id(session_id)
        if signed_id.expires_s < time.time():  # it expired while it was in the cache
            raise SessionLostError("the session id has expired; open a new session")
        if tenant is not GATEWAY_TENANT and signed_id.tenant != tenant.name:
            raise PermissionDeniedError(
                "the session belongs to another tenant; use the token that opened it"
            )
        if signed_id.environment != self.environment:
            raise InvalidCallError(
                f"the session belongs to environment '{signed_id.environment}', not to"
                f" '{self.environment}'; call it there"
            )
        if signed_id.is_tools_only and not accepts_tools_ids:
            raise make_tools_only_error()
        return signed_id

    def count_call(self, kind: str) -> None:
        """Count a call against the tenant's rate of steps.

        Raises:
            RateLimitError: the rate is too high.
        """
        try:
            self._quotas.count_step(self._authorize())
        except EnvError as error:
            self._metrics.count_call(self.environment, kind, error.code, None)
            raise

    async def find_link(self, signed_id: SignedId) -> ServerLink:
        """Return the link to the session's server.

        Raises:
            SessionLostError: the server no longer exists.
            UnavailableError: the server may be one that is not connected yet.
        """
        link = self.fleet.find_link(signed_id.server_id) or await self.fleet.wait_for_link(
            signed_id.server_id, FIND_TIMEOUT_S
        )
        if link is None and self.fleet.may_include(signed_id.server_id):
            raise UnavailableError(
                f"this gateway has not reached server {signed_id.server_id} of its environment yet;"
                " try again later"
            )
        if link is None:
            reason = self.fleet.explain_removal(signed_id.server_id)
            raise SessionLostError(f"session lost: {reason}; open a new one")
        return link

    async def call(
        self,
        kind: str,
        session_id: str,
        request: pb.Call | None = None,
        *,
        is_repeatable: bool = False,
    ) -> pb.Reply:
        """Send a call of a session to its server and return the reply.

        Args:
            kind: field of `pb.Call` for this kind of call.
            request: arguments of the call; None if it has only a session id.
        """
        signed_id = self.verify_id(session_id, accepts_tools_ids=kind == "call_tool")
        server_session_id = signed_id.session_id

        def fill_call(call: pb.Call) -> None:
            if request is not None:
                call.CopyFrom(request)
            getattr(call, kind).session_id = server_session_id

        self.tracked_sessions.begin_call(server_session_id)
        started_s = self._loop.time()
        try:
            with hide_full_id(server_session_id, session_id):
                link = await self.find_link(signed_id)
                reply = await link.call(signed_id.server_id, fill_call, is_repeatable=is_repeatable)
        except EnvError as error:
            self.record_failure(kind, server_session_id, error, self._loop.time() - started_s)
            raise
        finally:
            self.tracked_sessions.end_call(server_session_id)
        self.record_reply(kind, server_session_id, reply, self._loop.time() - started_s)
        if signed_id.is_tools_only:
            reply.call_tool.session_id = session_id
        return reply

    def record_reply(self, kind: str, session_id: str, reply: pb.Reply, seconds: float) -> None:
        """Count a call that succeeded, and remove its session if it ended with the episode."""
        self._metrics.count_call(self.environment, kind, OK, seconds)
        result = reply.call_tool if kind == "call_tool" else reply.result
        if result.terminated or result.truncated:
            session = self.tracked_sessions.get(session_id)
            if session is not None and session.closes_when_done:
                self.tracked_sessions.remove(session_id, _EPISODE_ENDED_TOMBSTONE)
                session.link.count_ended(1)
                self.admission.advance()

    def record_failure(self, kind: str, session_id: str, error: EnvError, seconds: float) -> None:
        """Count a call that failed, and remove its session if it is lost or the call timed out."""
        self._metrics.count_call(self.environment, kind, error.code, seconds)
        if not isinstance(error, (SessionLostError, CallTimeoutError)):
            return
        has_timed_out = isinstance(error, CallTimeoutError)
        session_end = SessionEnd.TIMEOUT if has_timed_out else SessionEnd.LOST
        tombstone = SessionTombstone(session_end, error.message)
        session = self.tracked_sessions.remove(session_id, tombstone)
        if session is None:  # another gateway tracks and counts it
            return
        if has_timed_out:
            session.link.send_close(session_id)
        session.link.count_ended(1)
        self._metrics.count_lost(self.environment, 1)
        self.admission.advance()

    def drain(self) -> None:
        """Refuse new sessions from now on; existing sessions continue."""
        self.admission.drain()

    def leave(self) -> None:
        """Drain, and leave open sessions to other gateways when their connections end."""
        self.drain()
        self._is_leaving = True

    async def shut_down(self) -> None:
        """Close the links; the sessions stay on their servers for their linger time."""
        self.leave()
        self.tracked_sessions.close()
        await self.fleet.close("this gateway is stopping")

    def _authorize(self) -> Tenant:
        """Return the caller with its current scopes and limits, after checking that it may call."""
        tenant = get_current_tenant()
        return tenant if tenant is GATEWAY_TENANT else self._access.admit(tenant)

    async def _make_room(self, size: int) -> None:
        """End idle sessions of any tenants if there is no room for `size` new sessions."""
        num_missing = self.admission.count_missing(size)
        if not num_missing:
            return
        context = copy_context()
        context.run(set_current_tenant, GATEWAY_TENANT)
        await self._loop.create_task(self.events.make_room(num_missing), context=context)

    def _read_id(self, session_id: str) -> SignedId:
        # An id that was verified with a removed key is verified again, and refused.
        return self._read_id_with(self._key.current_secrets, session_id)

    def _find_server_link(self, session_id: str) -> ServerLink | None:
        try:
            return self.fleet.find_link(self._read_id(session_id).server_id)
        except EnvError:
            return None
