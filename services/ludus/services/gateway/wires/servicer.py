"""The gRPC wire: the EnvService of all environments on one port.

    metadata `ludus-env` --> environment --> CallRelay

`authentication.AuthenticateCalls` checks the caller first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludus.env.grpc.servicer import Context, abort, parse_batches, status_message
from ludus.env.messages.protobuf import CONNECTED_KEY, ENVIRONMENT_KEY, describe_message
from ludus.env.sessions.interface import Connection
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import EnvError
from ludus.services.gateway.sessions.environments import find_environment
from ludus.services.gateway.sessions.sessions import GatewaySessions
from ludus.services.gateway.tenancy.metrics import GatewayMetrics
from ludus.services.gateway.tenancy.quotas import Quotas
from ludus.services.gateway.wires.relay import CallRelay


class GatewayServicer(env_pb2_grpc.EnvServiceServicer):
    """The EnvService of all environments."""

    def __init__(
        self,
        environments: Mapping[str, GatewaySessions],
        quotas: Quotas,
        metrics: GatewayMetrics,
    ) -> None:
        self._environments = environments
        self._relays = {
            name: CallRelay(sessions, quotas, metrics) for name, sessions in environments.items()
        }

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        sessions = await self._find_environment(context)
        try:
            await sessions.admission.wait_described()
            return describe_message(sessions.description)
        except EnvError as error:
            await abort(context, error)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return status_message("gateway", (await self._find_environment(context)).load)

    async def Connect(self, request_iterator: Any, context: Context) -> None:
        relay = self._relays[(await self._find_environment(context)).environment]
        await context.send_initial_metadata(((CONNECTED_KEY, "1"),))
        connection = Connection()
        try:
            await relay.serve(parse_batches(request_iterator), context.write, connection)
        except EnvError as error:
            await abort(context, error)

    async def _find_environment(self, context: Context) -> GatewaySessions:
        """Return the environment named in the metadata; no name selects the only environment."""
        metadata = dict(context.invocation_metadata() or ())
        try:
            return find_environment(self._environments, str(metadata.get(ENVIRONMENT_KEY, "")))
        except EnvError as error:
            await abort(context, error)
