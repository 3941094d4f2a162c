"""One environment's sessions on the servers of a fleet; implements `Sessions`.

    wire --Sessions--> GatewaySessions --SessionOpener--> a server with room (open)
                                       --signed id--> the session's server (every other call)

Nothing that routes a call is kept here alone: whoever has the key reads the server from the
id, so that any gateway serves any session, also after a restart. What is kept (`tracked.py`)
serves to let sessions go with their connection, and to count them.

Who waits for whom: an open waits in the queue; any other call waits only for its server, for
a broken connection at most the link's `retry_within_s`, and for one that this gateway has not
found yet `_FIND_WITHIN_S`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass

from ludus.env.encoding import EncodedResult, ResetArgs, plain_json
from ludus.env.messages.protobuf import fill_reset_args, read_encoded
from ludus.env.security.session_ids import SessionKey, hide_driving_id, tools_only_error
from ludus.env.sessions.interface import Connection, Load, OpenArgs, Opened, SessionEvents
from ludus.env.sessions.tombstones import SessionEnd, SessionTombstone
from ludus.env.types import EnvironmentDescription, JsonObject
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import (
    CallTimeoutError,
    EnvError,
    InfrastructureError,
    InvalidCallError,
    SessionLostError,
    UnavailableError,
)
from ludus.services.gateway.config import SessionsSection
from ludus.services.gateway.fleet.admission import Admission
from ludus.services.gateway.fleet.server_link import LinkOptions, ServerLink
from ludus.services.gateway.sessions.opener import PlacedSession, SessionOpener
from ludus.services.gateway.sessions.routes import Route, RouteCache
from ludus.services.gateway.sessions.tracked import TrackedSession, TrackedSessions
from ludus.services.gateway.tenancy.access import Access
from ludus.services.gateway.tenancy.callers import (
    ITSELF,
    EnvironmentLoad,
    current_tenant,
    enter_tenant,
)
from ludus.services.gateway.tenancy.metrics import OK, GatewayMetrics
from ludus.services.gateway.tenancy.quotas import Quotas
from ludus.services.gateway.tenancy.tenants import Scope, Tenant

_MAX_LINGER_S = 600.0
"""The most that a client may ask for."""
_FIND_WITHIN_S = 5.0
"""How long a call waits for its server, which another gateway may have reached before."""
_CLOSED = SessionTombstone(SessionEnd.CLOSED, "it was closed")
_CONNECTION_ENDED = SessionTombstone(
    SessionEnd.CONNECTION_ENDED, "the connection that opened it ended"
)
_EPISODE_ENDED = SessionTombstone(SessionEnd.EPISODE_ENDED, "its episode ended")


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """What the environments of a gateway share."""

    key: SessionKey
    routes: RouteCache
    access: Access
    quotas: Quotas
    metrics: GatewayMetrics
    limits: SessionsSection
    links: LinkOptions


class GatewaySessions:
    """The sessions of one environment, wherever they are."""

    counts = None
    workers = None
    trouble = ""
    immediate = None

    def __init__(self, environment: str, context: GatewayContext) -> None:
        limits = context.limits
        self.environment = environment
        self.events = SessionEvents()
        self.admission = Admission(
            environment,
            limits,
            context.links,
            lambda seconds: context.metrics.waited(environment, seconds),
        )
        self.fleet = self.admission.fleet
        self._linger_s = limits.linger_s
        self._max_group_size = limits.max_group_size
        self._opener = SessionOpener(
            environment, context.key, self.admission, self._make_room, limits.id_lifetime_s
        )
        self._routes = context.routes
        self._access = context.access
        self._quotas = context.quotas
        self._metrics = context.metrics
        self._tracked = TrackedSessions(
            context.quotas,
            self.events,
            limits.linger_s,
            limits.idle_timeout_s,
            lambda num: context.metrics.lost(environment, num),
        )
        self.call_begins, self.call_ends = self._tracked.begin, self._tracked.end
        """Told of each call that a wire passes on by itself: who waits for an answer is there."""
        self._is_leaving = False
        self._loop = asyncio.get_running_loop()

    # -- what it is --------------------------------------------------------------------

    @property
    def description(self) -> EnvironmentDescription:
        """What the environment is, with the capacity of the whole fleet.

        Raises:
            UnavailableError: no server was reached yet.
        """
        description = self.fleet.description
        if description is None:
            raise UnavailableError(
                f"expected a server of environment '{self.environment}' to answer, none has yet;"
                " see that its servers run"
            )
        return dataclasses.replace(
            description,
            max_sessions=self.load.max_sessions,
            server_id="gateway",
            linger_s=self._linger_s,
        )

    @property
    def load(self) -> Load:
        """How full the servers are that take sessions."""
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
        """The same with draining servers apart."""
        links = self.fleet.links
        active = [link for link in links if link.takes_sessions]
        draining = [link for link in links if link.is_connected and not link.takes_sessions]
        num_unreachable = len(links) - len(active) - len(draining)
        return EnvironmentLoad(
            environment=self.environment,
            num_pending=self.admission.num_waiting,
            num_active=sum(link.num_sessions for link in active),
            num_draining=sum(link.num_sessions for link in draining),
            # Of servers that come with their sessions none is full.
            capacity=0 if self.admission.supply else sum(link.max_sessions for link in active),
            num_servers=len(active),
            num_draining_servers=len(draining),
            num_unreachable_servers=num_unreachable,
        )

    @property
    def num_tracked(self) -> int:
        """Sessions that were opened through this gateway and are not known to have ended."""
        return len(self._tracked)

    # -- opening -----------------------------------------------------------------------

    async def open(self, args: OpenArgs, connection: Connection | None = None) -> Opened:
        """A new session; see `Sessions`."""
        return (await self._open(args, 1, connection, is_group=False))[0]

    async def open_group(
        self,
        args: OpenArgs,
        size: int,
        connection: Connection | None = None,
        session_ids: Sequence[str] = (),
    ) -> list[Opened]:
        """Sessions on one seed, all or none, together on one server if it has the room."""
        if session_ids:
            raise InvalidCallError(
                f"expected no session ids in an open, got {len(session_ids)}: the gateway"
                " chooses them"
            )
        return await self._open(args, size, connection, is_group=True)

    async def _open(
        self, args: OpenArgs, size: int, connection: Connection | None, *, is_group: bool
    ) -> list[Opened]:
        tenant = self._enter()
        linger_s = min(args.linger_s or self._linger_s, _MAX_LINGER_S)
        args = dataclasses.replace(args, linger_s=linger_s)
        self._admit(args, size, tenant)
        started_s = self._loop.time()
        try:
            await self._make_room(size)
            placed = await self._opener.open(args, size, tenant, is_group=is_group)
        except BaseException as error:
            self._quotas.closed(tenant, size)
            if isinstance(error, EnvError):
                took_s = self._loop.time() - started_s
                self._metrics.refused(self.environment, error.code, size, took_s)
            raise
        self._metrics.opened(self.environment, size, self._loop.time() - started_s)
        for one in placed:
            self._track(one, args, connection, tenant)
        if connection is not None and connection.ended.is_set():
            self.release(connection)
        return [one.opened for one in placed]

    def _admit(self, args: OpenArgs, size: int, tenant: Tenant) -> None:
        """Take sessions from the tenant's quota; what is refused here ends nobody's session."""
        try:
            self._opener.check(args, size)
            self._quotas.opening(tenant, size)
        except EnvError as error:
            self._metrics.refused(self.environment, error.code, size)
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
            used_s=self._loop.time(),
        )
        self._tracked.add(placed.opened.session_id, tracked, connection)

    # -- calls -------------------------------------------------------------------------

    async def reset(self, session_id: str, args: ResetArgs) -> EncodedResult:
        """The first answer of a new episode."""
        self._count("reset")

        def write(call: pb.Call) -> None:
            call.reset.session_id = session_id
            fill_reset_args(call.reset.args, args)

        # Nobody has seen the first answer of a reset whose connection broke.
        reply = await self.call("reset", session_id, write, is_repeatable=True)
        return read_encoded(reply.result)

    async def step(
        self, session_id: str, action: bytes | str, step_index: int = 0, timeout_s: float = 0.0
    ) -> EncodedResult:
        """The answer to an action; see `Sessions`."""
        self._count("step")

        def write(call: pb.Call) -> None:
            step = call.step
            step.session_id = session_id
            step.step_index = step_index
            step.timeout_s = timeout_s
            if isinstance(action, bytes):
                step.action_json = action
            else:
                step.action_text = action

        reply = await self.call("step", session_id, write, is_repeatable=step_index > 0)
        self.note_result(session_id, reply.result)
        return read_encoded(reply.result)

    async def state(self, session_id: str) -> bytes:
        """The environment's state as JSON."""
        self._count("state")

        def write(call: pb.Call) -> None:
            call.state.session_id = session_id

        reply = await self.call("state", session_id, write, is_repeatable=True)
        return reply.state.state_json

    async def call_tool(self, session_id: str, name: str, arguments: JsonObject) -> bytes:
        """What a tool of the environment returned, as JSON."""
        self._count("call_tool")

        def write(call: pb.Call) -> None:
            call.call_tool.session_id = session_id
            call.call_tool.name = name
            call.call_tool.arguments_json = plain_json(arguments, "arguments")

        reply = await self.call("call_tool", session_id, write)
        return reply.call_tool.result_json

    async def close(self, session_id: str) -> None:
        """End a session; one that is gone already is no error."""

        def write(call: pb.Call) -> None:
            call.close.session_id = session_id

        tracked = self._tracked.get(session_id)
        try:
            self.route(session_id)
            self._tracked.forget(session_id, _CLOSED)
            await self.call("close", session_id, write, is_repeatable=True)
        except InfrastructureError:  # it is gone, or ends after its linger
            self._metrics.lost(self.environment, tracked is not None)
        finally:
            if tracked is not None:
                tracked.link.closed(1)
            self.admission.advance()

    async def detach(self, session_id: str, connection: Connection | None = None) -> None:
        """End a session after its linger unless it is called again before; see `Sessions`."""
        self._enter()
        if not self._tracked.let_go(session_id, connection):
            return

        def write(call: pb.Call) -> None:
            call.detach.session_id = session_id

        try:
            await self.call("detach", session_id, write, is_repeatable=True)
        except InfrastructureError:
            return  # it is gone, or its linger has begun with the broken connection
        self._tracked.disown(session_id)

    def attach(self, session_ids: Iterable[str], connection: Connection) -> None:
        """Note that a connection calls these; what was opened elsewhere goes with it, too."""
        for session_id in session_ids:
            self._tracked.attach(session_id, connection)

    def release(self, connection: Connection) -> None:
        """Detach what the connection alone opened or called; what does not linger is closed."""
        connection.ended.set()
        for session_id in list(connection.session_ids):
            if not self._tracked.let_go(session_id, connection):
                continue
            tracked = self._tracked.get(session_id)
            link = tracked.link if tracked is not None else self._known_link(session_id)
            if link is None or self._is_leaving:
                continue  # the server detaches it when this gateway's own stream ends
            if tracked is not None and tracked.linger_s <= 0:
                self._tracked.forget(session_id, _CONNECTION_ENDED)
                link.send_close(session_id)
                link.closed(1)
                continue
            link.send_detach(session_id)
            self._tracked.disown(session_id)
        self.admission.advance()

    # -- for the gateway's own wires ---------------------------------------------------

    def route(self, session_id: str, *, for_tools: bool = False) -> Route:
        """The session's genuine route, for the tenant of the present request.

        Args:
            for_tools: lets the id of its tools pass, too.

        Raises:
            EnvError: the id is forged, expired, or of another tenant or environment.
        """
        tenant = self._enter()
        route = self._routes.find(session_id, None if tenant is ITSELF else tenant.name)
        if route.environment != self.environment:
            raise InvalidCallError(
                f"expected a session of environment '{self.environment}', got one of"
                f" '{route.environment}'; call it there"
            )
        if route.is_tools_only and not for_tools:
            raise tools_only_error()
        return route

    async def link_to(self, route: Route) -> ServerLink:
        """The link to the session's server.

        Raises:
            SessionLostError: there is no such server, also after those not reached were tried.
            UnavailableError: it may be one that was not reached yet.
        """
        link = self.fleet.link_of(route.server_id) or await self.fleet.find(
            route.server_id, _FIND_WITHIN_S
        )
        if link is None and self.fleet.may_have(route.server_id):
            raise UnavailableError(
                f"expected to reach server {route.server_id}, which this gateway has not found yet"
                " among those of its environment; try again later"
            )
        if link is None:
            reason = self.fleet.reason_gone(route.server_id)
            raise SessionLostError(f"session lost: {reason}; open a new one")
        return link

    async def call(
        self,
        kind: str,
        session_id: str,
        write: Callable[[pb.Call], None],
        *,
        is_repeatable: bool = False,
    ) -> pb.Reply:
        """The reply of the session's server to any call of the session."""
        route = self.route(session_id, for_tools=kind == "call_tool")
        own_id = route.session_id

        def write_as_own(call: pb.Call) -> None:
            write(call)
            getattr(call, kind).session_id = own_id

        self._tracked.begin(own_id)
        code: str = OK
        started_s = self._loop.time()
        try:
            with hide_driving_id(own_id, session_id):
                link = await self.link_to(route)
                reply = await link.call(route.server_id, write_as_own, is_repeatable=is_repeatable)
            if route.is_tools_only:
                reply.call_tool.session_id = session_id
            return reply
        except EnvError as error:
            code = error.code
            self.note_failure(own_id, error)
            raise
        finally:
            self._tracked.end(own_id)
            took_s = self._loop.time() - started_s
            self._metrics.called(self.environment, kind, code, took_s)

    def note_result(self, session_id: str, result: pb.StepResult) -> None:
        """Forget a session that ended with its episode."""
        if result.terminated or result.truncated:
            tracked = self._tracked.get(session_id)
            if tracked is not None and tracked.close_when_done:
                self._tracked.forget(session_id, _EPISODE_ENDED)
                tracked.link.closed(1)
                self.admission.advance()

    def note_failure(self, session_id: str, error: EnvError) -> None:
        """Forget a session that is gone; one whose call timed out is ended for good."""
        if not isinstance(error, (SessionLostError, CallTimeoutError)):
            return
        timed_out = isinstance(error, CallTimeoutError)
        kind = SessionEnd.TIMEOUT if timed_out else SessionEnd.LOST
        tracked = self._tracked.forget(session_id, SessionTombstone(kind, error.message))
        if tracked is None:  # it was opened elsewhere, and counts there
            return
        if timed_out:
            tracked.link.send_close(session_id)
        tracked.link.closed(1)
        self._metrics.lost(self.environment, 1)
        self.admission.advance()

    def drain(self) -> None:
        """Take no new sessions from now on; those there are continue."""
        self.admission.drain()

    def leave(self) -> None:
        """Leave the sessions of connections that end from now on to other gateways."""
        self._is_leaving = True

    async def shut_down(self) -> None:
        """End the links; the sessions stay on their servers for their linger."""
        self.drain()
        self.leave()
        self._tracked.close()
        await self.fleet.close("this gateway is stopping")

    # -- parts -------------------------------------------------------------------------

    def _count(self, kind: str) -> None:
        """Take a call from the tenant's rate of steps."""
        try:
            self._quotas.stepping(current_tenant(), 1)
        except EnvError as error:
            self._metrics.called(self.environment, kind, error.code, None)
            raise

    def _enter(self) -> Tenant:
        """Who calls, as it is now: connections may be older than what their caller may do."""
        tenant = current_tenant()
        return tenant if tenant is ITSELF else self._access.admit(tenant, Scope.STEP)

    async def _make_room(self, size: int) -> None:
        """End sessions that can be spared, whoever's they are, where so many find no room."""
        num_missing = self.admission.num_missing(size)
        if not num_missing:
            return
        context = copy_context()
        context.run(enter_tenant, ITSELF)
        await self._loop.create_task(self.events.make_room(num_missing), context=context)

    def _known_link(self, session_id: str) -> ServerLink | None:
        try:
            return self.fleet.link_of(self._routes.read(session_id).server_id)
        except EnvError:
            return None
