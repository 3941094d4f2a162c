"""The client's direct mode: a gateway admits sessions, their calls go straight to the servers.

    open --Place--> gateway: the server's address and signed session ids
      |
      +--Open(session_id)--> that server; one stream to each server, for all its sessions

A server that cannot be reached, or that does not know the ids any more, is reported by
nobody: the gateway is simply asked for another place.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar, cast

from ludus.env.sessions.interface import OpenArgs
from ludus.env.transports.address import parse_address
from ludus.env.transports.grpc import GrpcSession, GrpcTransport, UnimplementedError
from ludus.env.transports.interface import ConnectOptions, Opened, StepCall
from ludus.env.types import EnvironmentDescription, StepResult
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import ConfigError, EnvError, InfrastructureError, UnavailableError

ResultT = TypeVar("ResultT")

_NUM_PLACES = 3
_SERVER_PATIENCE_S = 3.0


class DirectTransport:
    """A connection to a gateway, and one to every server that it named."""

    def __init__(self, options: ConnectOptions) -> None:
        self._options = options
        self._gateway = GrpcTransport(options)
        self._places = env_pb2_grpc.GatewayServiceStub(self._gateway.channel)
        self._servers: dict[str, GrpcTransport] = {}

    async def connect(self, patience_s: float) -> None:
        """Returns when the gateway answers."""
        await self._gateway.connect(patience_s)

    async def describe(self) -> EnvironmentDescription:
        """What the gateway says of the environment."""
        return await self._gateway.describe()

    async def open(self, args: OpenArgs) -> Opened:
        """A new session on the server that the gateway chose."""

        async def open_there(server: GrpcTransport, session_ids: Sequence[str]) -> Opened:
            return await server.open(dataclasses.replace(args, session_id=session_ids[0]))

        return await self._placed(1, open_there)

    async def open_group(self, args: OpenArgs, size: int) -> list[Opened]:
        """Sessions on one seed and on one server, all or none."""

        async def open_there(server: GrpcTransport, session_ids: Sequence[str]) -> list[Opened]:
            return await server.open_group_as(session_ids, args, size)

        return await self._placed(size, open_there)

    async def step_many(self, calls: Sequence[StepCall]) -> list[StepResult | EnvError]:
        """One result or error per call, in order; one StepMany to each server."""
        by_server: dict[GrpcTransport, list[int]] = {}
        for index, call in enumerate(calls):
            by_server.setdefault(cast(GrpcSession, call.session).transport, []).append(index)
        outcomes: dict[int, StepResult | EnvError] = {}
        answers = await asyncio.gather(
            *(
                server.step_many([calls[i] for i in indices])
                for server, indices in by_server.items()
            )
        )
        for indices, answer in zip(by_server.values(), answers, strict=True):
            outcomes.update(zip(indices, answer, strict=True))
        return [outcomes[index] for index in range(len(calls))]

    async def close(self) -> None:
        """Ends all connections and with them all sessions."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))
        await self._gateway.close()

    async def _placed(
        self,
        num_sessions: int,
        open_there: Callable[[GrpcTransport, Sequence[str]], Awaitable[ResultT]],
    ) -> ResultT:
        request = pb.PlaceRequest(
            environment=self._options.address.environment, num_sessions=num_sessions
        )
        error: InfrastructureError | None = None
        for _ in range(_NUM_PLACES):
            place = await self._place(request)
            try:
                server = await self._reachable(place.grpc_address)
                return await open_there(server, place.session_ids)
            except InfrastructureError as found:
                error = found
        raise UnavailableError(
            f"expected to reach one of the servers that {self._options.address} named, failed"
            f" {_NUM_PLACES} times, at last at {place.grpc_address}: {error}; see that its servers"
            " can be reached from here, or connect without direct=True"
        ) from error

    async def _place(self, request: pb.PlaceRequest) -> pb.PlaceResponse:
        try:
            place: pb.PlaceResponse = await self._gateway.unary(self._places.Place, request)
        except UnimplementedError:
            raise ConfigError(
                f"expected a gateway at {self._options.address} for direct=True, got no gateway;"
                " connect without direct=True"
            ) from None
        return place

    async def _reachable(self, address: str) -> GrpcTransport:
        """The connection to a server that answers; one that does not is given up."""
        server = self._servers.get(address)
        if server is None:
            server = self._servers[address] = GrpcTransport(self._options_for(address))
        try:
            await server.connect(_SERVER_PATIENCE_S)
        except InfrastructureError:
            if not server.has_survivors and self._servers.get(address) is server:
                del self._servers[address]
                await server.close()
            raise
        return server

    def _options_for(self, address: str) -> ConnectOptions:
        """How to reach a server; the token never leaves TLS on the way."""
        parsed = parse_address(address if "://" in address else f"grpc://{address}")
        is_private = parsed.is_secure or not self._options.address.is_secure
        return dataclasses.replace(
            self._options, address=parsed, token=self._options.token if is_private else None
        )
