"""The sessions of one environment on the servers of a fleet; implements `Sessions`.

    wire --Sessions--> GatewaySessions --SessionOpener--> a server with room (open)
                                       --signed id--> the session's server (every other call)

A gateway needs no stored state to route a call: the signed id contains the server. Any gateway
with the session key can therefore serve any session, even after a restart. The stored data
(`tracked.py`) serves to end sessions with their connection, and to count them.

An open waits in the queue. Every other call waits only for its server: at most the link's
`retry_within_s` for a broken connection, and at most `FIND_TIMEOUT_S` for a server that this
gateway has not reached yet.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import lru_cache

from ludus.env.encoding import EncodedResult, ResetArgs, plain_json
from ludus.env.messages.protobuf import fill_reset_args, read_encoded
from ludus.env.security.session_ids import (
    SessionKey,
    SignedId,
    hide_driving_id,
    tools_only_error,
)
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
from ludus.services.gateway.sessions.opener import PlacedSession, SessionOpener
from ludus.services.gateway.sessions.tracked import TrackedSession, TrackedSessions
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
"""Maximum time that a call waits for a server that only other gateways have reached."""
_MAX_CACHED_IDS = 8_192
"""Maximum number of session ids of an environment that are verified only once."""
_CLOSED = SessionTombstone(SessionEnd.CLOSED, "it was closed")
_CONNECTION_ENDED = SessionTombstone(
    SessionEnd.CONNECTION_ENDED, "the connection that opened it ended"
)
_EPISODE_ENDED = SessionTombstone(SessionEnd.EPISODE_ENDED, "its episode ended")


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
    immediate = None

    def __init__(self, environment: str, context: GatewayContext) -> None:
        limits = context.limits
        self.environment = environment
        self.events = SessionEvents()
        self.admission = FleetAdmission(
            environment,
            limits,
            context.servers,
            lambda seconds: context.metrics.record_wait(environment, seconds),
        )
        self.fleet = self.admission.fleet
        self._linger_s = limits.linger_s
        self._max_group_size = limits.max_group_size
        self.opener = SessionOpener(
            environment, context.key, self.admission, self._make_room, limits.id_lifetime_s
        )
        self._read_id = lru_cache(_MAX_CACHED_IDS)(context.key.read)
        self._access = context.access
        self._quotas = context.quotas
        self._metrics = context.metrics
        self.tracked = TrackedSessions(
            context.quotas,
            self.events,
            limits.linger_s,
            limits.idle_timeout_s,
            lambda num: context.metrics.count_lost(environment, num),
        )
        self._is_leaving = False
        self._loop = asyncio.get_running_loop()

    # -- description and load ----------------------------------------------------------

    @property
    def description(self) -> EnvironmentDescription:
        """The environment's description, with the capacity of the whole fleet."""
        description = self.fleet.description
        assert description is not None, "the wire has called `admission.wait_described`"
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
        """The load, with draining servers counted separately."""
        links = self.fleet.links
        active = [link for link in links if link.accepts_sessions]
        draining = [link for link in links if link.is_connected and not link.accepts_sessions]
        num_unreachable = len(links) - len(active) - len(draining)
        return EnvironmentLoad(
            environment=self.environment,
            num_pending=self.admission.num_waiting,
            num_active=sum(link.num_sessions for link in active),
            num_draining=sum(link.num_sessions for link in draining),
            # Servers created for single sessions have no meaningful capacity.
            capacity=0 if self.admission.supply else sum(link.max_sessions for link in active),
            num_servers=len(active),
            num_draining_servers=len(draining),
            num_unreachable_servers=num_unreachable,
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
        """Open sessions with one seed, all or none, on one server if possible."""
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
        self._admit((args.session_id, *session_ids), size, tenant)
        started_s = self._loop.time()
        try:
            await self._make_room(size)
            placed = await self.opener.open(args, size, tenant, is_group=is_group)
        except BaseException as error:
            self._quotas.release(tenant, size)
            if isinstance(error, EnvError):
                duration_s = self._loop.time() - started_s
                self._metrics.count_open(self.environment, error.code, size, duration_s)
            raise
        self._metrics.count_open(self.environment, OK, size, self._loop.time() - started_s)
        for session in placed:
            self._track(session, args, connection, tenant)
        if connection is not None and connection.ended.is_set():
            self.release(connection)
        return [session.opened for session in placed]

    def _admit(self, session_ids: Sequence[str], size: int, tenant: Tenant) -> None:
        """Check the open and reserve the tenant's quota, before room is made for it."""
        try:
            if any(session_ids):
                raise InvalidCallError(
                    "an open must not contain a session id, because the gateway chooses it"
                )
            self.admission.check(size)
            self._quotas.reserve(tenant, size)
        except EnvError as error:
            self._metrics.count_open(self.environment, error.code, size)
            raise

    def _track(
        self, placed: PlacedSession, args: OpenArgs, connection: Connection | None, tenant: Tenant
    ) -> None:
        tracked = TrackedSession(
            link=placed.link,
            server_id=placed.link.server_id,
            tenant=tenant,
            close_when_done=args.close_when_done,
            linger_s=args.linger_s,
            last_used_s=self._loop.time(),
        )
        self.tracked.add(placed.opened.session_id, tracked, connection)

    # -- calls -------------------------------------------------------------------------

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """Start a new episode."""
        self.count_call("reset")
        request = pb.Call()
        fill_reset_args(request.reset.args, args)
        # If the connection breaks, no client has seen the first result, so a reset may be repeated.
        reply = await self.call("reset", session_id, request, is_repeatable=True)
        return read_encoded(reply.result)

    async def step(
        self, session_id: str, action: bytes | str, step_index: int = 0, timeout_s: float = 0.0
    ) -> EncodedResult:
        """Take a step; see `Sessions`."""
        self.count_call("step")
        step = pb.StepRequest(step_index=step_index, timeout_s=timeout_s)
        if isinstance(action, bytes):
            step.action_json = action
        else:
            step.action_text = action
        reply = await self.call(
            "step", session_id, pb.Call(step=step), is_repeatable=step_index > 0
        )
        return read_encoded(reply.result)

    async def state(self, session_id: str) -> bytes:
        """Return the environment's state as JSON."""
        self.count_call("state")
        reply = await self.call("state", session_id, is_repeatable=True)
        return reply.state.state_json

    async def call_tool(self, session_id: str, name: str, arguments: JsonObject) -> bytes:
        """Call a tool of the environment and return its result as JSON."""
        self.count_call("call_tool")
        tool_call = pb.CallToolRequest(name=name, arguments_json=plain_json(arguments, "arguments"))
        reply = await self.call("call_tool", session_id, pb.Call(call_tool=tool_call))
        return reply.call_tool.result_json

    async def close(self, session_id: str) -> None:
        """Close a session; return normally if it is already gone."""
        tracked = self.tracked.get(session_id)
        try:
            self.route(session_id)
            self.tracked.remove(session_id, _CLOSED)
            await self.call("close", session_id, is_repeatable=True)
        except InfrastructureError:  # the session is gone, or ends after its linger time
            self._metrics.count_lost(self.environment, tracked is not None)
        finally:
            if tracked is not None:
                tracked.link.count_ended(1)
            self.admission.advance()

    async def detach(self, session_id: str, connection: Connection | None = None) -> None:
        """End a session after its linger time unless it is called before; see `Sessions`."""
        self._authorize()
        if not self.tracked.remove_connection(session_id, connection):
            return
        try:
            await self.call("detach", session_id, is_repeatable=True)
        except InfrastructureError:
            return  # the session is gone, or lingers because of the broken connection
        self.tracked.mark_detached(session_id)

    def attach(self, session_ids: Iterable[str], connection: Connection) -> None:
        """Record that a connection calls these sessions, including those of other gateways."""
        for session_id in session_ids:
            self.tracked.attach(session_id, connection)

    def release(self, connection: Connection) -> None:
        """Detach the sessions that only this connection uses; close those that cannot linger."""
        connection.ended.set()
        for session_id in list(connection.session_ids):
            if not self.tracked.remove_connection(session_id, connection):
                continue
            tracked = self.tracked.get(session_id)
            link = tracked.link if tracked is not None else self._find_server_link(session_id)
            if link is None or self._is_leaving:
                continue  # the server detaches it when this gateway's stream ends
            if tracked is not None and tracked.linger_s <= 0:
                self.tracked.remove(session_id, _CONNECTION_ENDED)
                link.send_close(session_id)
                link.count_ended(1)
                continue
            link.send_detach(session_id)
            self.tracked.mark_detached(session_id)
        self.admission.advance()

    # -- for the gateway's own wires ---------------------------------------------------

    def route(self, session_id: str, *, for_tools: bool = False) -> SignedId:
        """Verify a session id and return its content, for the tenant of the current request.

        Args:
            for_tools: also accept the id of the session's tools.

        Raises:
            EnvError: the id is forged, expired, or belongs to another tenant or environment.
        """
        tenant = self._authorize()
        route = self._read_id(session_id)
        if route.expires_s < time.time():  # it expired after it was verified
            raise SessionLostError("the session id has expired; open a new session")
        if tenant is not GATEWAY_TENANT and route.tenant != tenant.name:
            raise PermissionDeniedError(
                "the session belongs to another tenant; use the token that opened it"
            )
        if route.environment != self.environment:
            raise InvalidCallError(
                f"the session belongs to environment '{route.environment}', not to"
                f" '{self.environment}'; call it there"
            )
        if route.is_tools_only and not for_tools:
            raise tools_only_error()
        return route

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

    async def find_link(self, route: SignedId) -> ServerLink:
        """Return the link to the session's server.

        Raises:
            SessionLostError: the server does not exist, even after a wait for unreached servers.
            UnavailableError: a server that was not reached yet may be it.
        """
        link = self.fleet.find_link(route.server_id) or await self.fleet.wait_for_link(
            route.server_id, FIND_TIMEOUT_S
        )
        if link is None and self.fleet.may_include(route.server_id):
            raise UnavailableError(
                f"this gateway has not reached server {route.server_id} of its environment yet;"
                " try again later"
            )
        if link is None:
            reason = self.fleet.explain_removal(route.server_id)
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
            kind: field of `pb.Call` that the call sets.
            request: other fields of the call.
        """
        route = self.route(session_id, for_tools=kind == "call_tool")
        server_session_id = route.session_id

        def write(call: pb.Call) -> None:
            if request is not None:
                call.CopyFrom(request)
            getattr(call, kind).session_id = server_session_id

        self.tracked.begin_call(server_session_id)
        started_s = self._loop.time()
        try:
            with hide_driving_id(server_session_id, session_id):
                link = await self.find_link(route)
                reply = await link.call(route.server_id, write, is_repeatable=is_repeatable)
        except EnvError as error:
            self.record_failure(kind, server_session_id, error, self._loop.time() - started_s)
            raise
        finally:
            self.tracked.end_call(server_session_id)
        self.record_reply(kind, server_session_id, reply, self._loop.time() - started_s)
        if route.is_tools_only:
            reply.call_tool.session_id = session_id
        return reply

    def record_reply(self, kind: str, session_id: str, reply: pb.Reply, duration_s: float) -> None:
        """Count a call that succeeded, and remove a session that ended with its episode."""
        self._metrics.count_call(self.environment, kind, OK, duration_s)
        if kind == "step" and (reply.result.terminated or reply.result.truncated):
            tracked = self.tracked.get(session_id)
            if tracked is not None and tracked.close_when_done:
                self.tracked.remove(session_id, _EPISODE_ENDED)
                tracked.link.count_ended(1)
                self.admission.advance()

    def record_failure(
        self, kind: str, session_id: str, error: EnvError, duration_s: float
    ) -> None:
        """Count a call that failed, and remove a session that is gone or whose call timed out."""
        self._metrics.count_call(self.environment, kind, error.code, duration_s)
        if not isinstance(error, (SessionLostError, CallTimeoutError)):
            return
        timed_out = isinstance(error, CallTimeoutError)
        end = SessionEnd.TIMEOUT if timed_out else SessionEnd.LOST
        tracked = self.tracked.remove(session_id, SessionTombstone(end, error.message))
        if tracked is None:  # another gateway opened and counts it
            return
        if timed_out:
            tracked.link.send_close(session_id)
        tracked.link.count_ended(1)
        self._metrics.count_lost(self.environment, 1)
        self.admission.advance()

    def drain(self) -> None:
        """Refuse new sessions from now on; existing sessions continue."""
        self.admission.drain()

    def leave(self) -> None:
        """Drain, and close no sessions of connections that end; other gateways continue them."""
        self.drain()
        self._is_leaving = True

    async def shut_down(self) -> None:
        """Close the links; the sessions stay on their servers for their linger time."""
        self.leave()
        self.tracked.close()
        await self.fleet.close("this gateway is stopping")

    # -- parts -------------------------------------------------------------------------

    def _authorize(self) -> Tenant:
        """Return the caller with its current rights, which may be newer than its connection."""
        tenant = get_current_tenant()
        return tenant if tenant is GATEWAY_TENANT else self._access.admit(tenant)

    async def _make_room(self, size: int) -> None:
        """End idle sessions of any tenant if the capacity is too small for `size` sessions."""
        num_missing = self.admission.num_missing(size)
        if not num_missing:
            return
        context = copy_context()
        context.run(set_current_tenant, GATEWAY_TENANT)
        await self._loop.create_task(self.events.make_room(num_missing), context=context)

    def _find_server_link(self, session_id: str) -> ServerLink | None:
        try:
            return self.fleet.find_link(self._read_id(session_id).server_id)
        except EnvError:
            return None
