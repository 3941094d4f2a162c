"""The gRPC wire: EnvService of every environment, on one port.

    metadata `ludus-env`, or the session's id --> environment --> EnvServicer, CallRelay
    StepMany ------------------------------------------------> StepManyRelay, as bytes

Who calls is decided before (`authentication.AuthenticateCalls`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from ludus.env.grpc.servicer import Context, EnvServicer, abort, or_abort
from ludus.env.grpc.step_stream import answer_in_order
from ludus.env.messages.protobuf import CONNECTED_KEY
from ludus.env.security.tracing import REQUEST_ID, TRACEPARENT
from ludus.env.sessions.interface import Connection
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import EnvError
from ludus.services.gateway.sessions.environments import ENVIRONMENT_KEY, find_environment
from ludus.services.gateway.sessions.routes import RouteCache
from ludus.services.gateway.sessions.sessions import GatewaySessions
from ludus.services.gateway.tenancy.callers import current_tenant
from ludus.services.gateway.tenancy.metrics import GatewayMetrics
from ludus.services.gateway.tenancy.quotas import Quotas
from ludus.services.gateway.wires.relay import CallRelay
from ludus.services.gateway.wires.step_many import StepManyContext, StepManyRelay

_TRACE_KEYS = frozenset({TRACEPARENT, REQUEST_ID})


class GatewayServicer:
    """Answers the rpcs of all environments."""

    def __init__(
        self,
        environments: Mapping[str, GatewaySessions],
        routes: RouteCache,
        quotas: Quotas,
        metrics: GatewayMetrics,
    ) -> None:
        self._environments = environments
        self._routes = routes
        self._step_many = StepManyRelay(environments, routes, quotas, metrics)
        self._servicers = {name: EnvServicer(one) for name, one in environments.items()}
        self._relays = {name: CallRelay(one, quotas, metrics) for name, one in environments.items()}

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """What a grpc.aio server is given."""
        methods = pb.DESCRIPTOR.services_by_name["EnvService"].methods
        env_service = {
            method.name: grpc.unary_unary_rpc_method_handler(
                self._unary(method.name),
                getattr(pb, method.input_type.name).FromString,
                getattr(pb, method.output_type.name).SerializeToString,
            )
            for method in methods
        }
        env_service["StepMany"] = grpc.unary_unary_rpc_method_handler(self._answer_step_many)
        env_service["StepStream"] = grpc.stream_stream_rpc_method_handler(self._stream_steps)
        env_service["Connect"] = grpc.stream_stream_rpc_method_handler(
            self._connect, pb.CallBatch.FromString, pb.ReplyBatch.SerializeToString
        )
        return [grpc.method_handlers_generic_handler("ludus.env.v1.EnvService", env_service)]

    def _unary(self, name: str) -> Callable[[Any, Context], Awaitable[Any]]:
        """Answers one rpc in the environment it is for."""

        async def answer(request: Any, context: Context) -> Any:
            try:
                sessions = self._find(context, getattr(request, "session_id", ""))
                if name == "Status":
                    return _status_of(sessions)
                if name == "Describe":
                    await sessions.admission.describe()
            except EnvError as error:
                await abort(context, error)
            servicer = self._servicers[sessions.environment]
            return await getattr(servicer, name)(request, context)

        return answer

    async def _answer_step_many(self, raw: bytes, context: Context) -> bytes:
        given = context.invocation_metadata() or ()
        trace = tuple((key, value) for key, value in given if key in _TRACE_KEYS)
        beside = StepManyContext(context.time_remaining(), trace)
        return await or_abort(context, self._step_many.step_many(raw, beside))

    async def _stream_steps(self, requests: Any, context: Context) -> None:
        await context.send_initial_metadata(((CONNECTED_KEY, "1"),))
        beside = StepManyContext(None)

        async def answer(raw: bytes) -> bytes:
            return await self._step_many.step_many_or_errors(raw, beside)

        await or_abort(context, answer_in_order(requests, answer, context.write))

    async def _connect(self, batches: Any, context: Context) -> None:
        try:
            sessions = self._find(context)
        except EnvError as error:
            await abort(context, error)
        await context.send_initial_metadata(((CONNECTED_KEY, "1"),))
        connection = Connection(tenant=current_tenant().name)
        await self._relays[sessions.environment].serve(batches, context.write, connection)

    def _find(self, context: Context, session_id: str = "") -> GatewaySessions:
        name = _metadata_of(context)
        if not name and session_id:
            name = self._routes.find(session_id, current_tenant().name).environment
        return find_environment(self._environments, name)


def _metadata_of(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == ENVIRONMENT_KEY:
            return str(value)
    return ""


def _status_of(sessions: GatewaySessions) -> pb.StatusResponse:
    load = sessions.load
    return pb.StatusResponse(
        server_id="gateway",
        num_sessions=load.num_sessions,
        max_sessions=load.max_sessions,
        num_waiting=load.num_waiting,
        is_draining=load.is_draining,
    )
