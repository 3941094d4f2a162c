"""Direct mode: a gateway places sessions, their calls go straight to the servers."""

import asyncio
import time
from contextlib import AsyncExitStack

import grpc
import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.grpc.servicer import abort
from ludus.env.security.session_ids import SessionKey
from ludus.env.transports.direct import DirectTransport
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import (
    AuthenticationError,
    CapacityError,
    ConfigError,
    RateLimitError,
    SessionLostError,
    UnavailableError,
)
from tests.env.grpc_served import GrpcServed, grpc_served

pytestmark = pytest.mark.asyncio

KEY = SessionKey(b"0123456789abcdef")


class PlacingGateway(env_pb2_grpc.GatewayServiceServicer):
    """Places sessions in turn on the servers it is told of."""

    def __init__(self, key: SessionKey = KEY) -> None:
        self.key = key
        self.servers: list[tuple[str, str]] = []
        """Address and server id."""
        self.requests: list[pb.PlaceRequest] = []
        self.metadata: list[dict[str, str]] = []

    async def Place(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        address, server_id = self.servers[(len(self.requests) - 1) % len(self.servers)]
        ids = [self.key.sign("counting", server_id) for _ in range(request.num_sessions)]
        return pb.PlaceResponse(grpc_address=address, session_ids=ids, open_within_s=60)


class Fleet:
    """A gateway before two servers; the gateway's own sessions stay unused."""

    def __init__(self, stack, **core_options) -> None:
        self._stack = stack
        self._core_options = core_options
        self.placer = PlacingGateway()
        self.servers: list[GrpcServed] = []

    async def start(self, num_servers: int) -> str:
        for number in range(num_servers):
            serving = grpc_served(server_id=f"pod-{number}", key=KEY, **self._core_options)
            server = await self._stack.enter_async_context(serving)
            self.servers.append(server)
            self.placer.servers.append((server.address, f"pod-{number}"))
        gateway = grpc_served(gateway=self.placer, **self._core_options)
        return (await self._stack.enter_async_context(gateway)).address + "/counting"

    @property
    def num_sessions(self) -> list[int]:
        return [server.core.load.num_sessions for server in self.servers]


@pytest.fixture(autouse=True)
def _quick_to_give_up(monkeypatch):
    monkeypatch.setattr("ludus.env.transports.direct._SERVER_PATIENCE_S", 0.5)


@pytest.fixture
async def stack():
    async with AsyncExitStack() as opened:
        yield opened


async def test_sessions_are_opened_where_the_gateway_places_them(stack):
    fleet = Fleet(stack)
    async with await AsyncEnvClient.connect(await fleet.start(2), direct=True) as client:
        assert (await client.describe()).name == "counting"
        opened = [await client.open(seed=3) for _ in range(4)]
        assert fleet.num_sessions == [2, 2]
        assert {KEY.read(session.id).server_id for session, _ in opened} == {"pod-0", "pod-1"}
        assert fleet.placer.requests[0].environment == "counting"
        assert fleet.placer.metadata[0]["ludus-env"] == "counting"
        outcomes = await client.step_many(
            [(session, {"add": 1 + n}) for n, (session, _) in enumerate(opened)]
        )
        assert [result.observation["total"] for result in outcomes] == [1, 2, 3, 4]
        await opened[0][0].close()
        assert fleet.num_sessions == [1, 2]
    assert await settled(fleet, [0, 0])


async def test_a_group_is_opened_on_one_server(stack):
    fleet = Fleet(stack)
    async with await AsyncEnvClient.connect(await fleet.start(2), direct=True) as client:
        group = await client.open_group(5, seed=1)
        assert fleet.num_sessions == [5, 0]
        assert len({first.observation["luck"] for _, first in group}) == 1


async def test_another_place_is_asked_for_when_a_server_cannot_be_reached(stack):
    fleet = Fleet(stack)
    address = await fleet.start(2)
    async with await AsyncEnvClient.connect(address, direct=True) as client:
        await fleet.servers[0].kill()
        session, _ = await client.open()
        assert (await session.step({"add": 1})).step_index == 1
        assert len(fleet.placer.requests) == 2
        assert isinstance(client._transport, DirectTransport)
        assert list(client._transport._servers) == [fleet.servers[1].address]


async def test_a_fleet_that_cannot_be_reached_says_so_and_names_the_way_out(stack):
    fleet = Fleet(stack)
    address = await fleet.start(1)
    async with await AsyncEnvClient.connect(address, direct=True, timeout_s=2) as client:
        fleet.placer.servers = [("grpc://127.0.0.1:1", "pod-0")]
        with pytest.raises(UnavailableError, match="connect without direct=True"):
            await asyncio.wait_for(client.open(), 30)
        assert len(fleet.placer.requests) == 3


async def test_refusals_of_the_servers_and_bad_ids_arrive_as_they_are(stack):
    fleet = Fleet(stack, max_sessions=1)
    async with await AsyncEnvClient.connect(await fleet.start(1), direct=True) as client:
        await client.open()
        with pytest.raises(CapacityError):
            await client.open()
        fleet.placer.key = SessionKey(b"another key, as long")
        with pytest.raises(AuthenticationError, match="signed"):
            await client.open()


async def test_a_session_of_a_killed_server_is_rebuilt_on_another(stack):
    fleet = Fleet(stack, is_deterministic=True)
    async with await AsyncEnvClient.connect(await fleet.start(2), direct=True) as client:
        session, _ = await client.open(seed=2, resume=True)
        plain, _ = await client.open(seed=2)
        await session.step({"add": 1})
        await fleet.servers[0].kill()
        assert (await session.step({"add": 2})).observation["total"] == 3
        assert session.num_resumes == 1
        assert KEY.read(session.id).server_id == "pod-1"
        await fleet.servers[1].kill()
        with pytest.raises(SessionLostError):
            await plain.step({"add": 1})


async def test_direct_is_for_grpc_and_for_gateways_only():
    with pytest.raises(ConfigError, match="expected a gateway's grpc:// address"):
        await AsyncEnvClient.connect("http://127.0.0.1:1", direct=True)
    async with (
        grpc_served() as server,
        await AsyncEnvClient.connect(server.address, direct=True) as client,
    ):
        with pytest.raises(ConfigError, match="no gateway"):
            await client.open()


class RefusingGateway(env_pb2_grpc.GatewayServiceServicer):
    """Has no room for the first callers."""

    def __init__(self, placer: PlacingGateway, num_refusals: int) -> None:
        self.placer = placer
        self.num_refusals = num_refusals

    async def Place(self, request, context):
        if self.num_refusals:
            self.num_refusals -= 1
            await abort(context, RateLimitError("one at a time", retry_after_s=0.25))
        return await self.placer.Place(request, context)


async def test_a_refusal_says_when_to_come_back_and_an_open_does(stack):
    fleet = Fleet(stack)
    await fleet.start(1)
    refusing = RefusingGateway(fleet.placer, num_refusals=2)
    gateway = await stack.enter_async_context(grpc_served(gateway=refusing))
    async with await AsyncEnvClient.connect(gateway.address, direct=True) as client:
        with pytest.raises(RateLimitError) as caught:
            await client.open()
        assert caught.value.retry_after_s == 0.25
        began_s = time.monotonic()
        await client.open(wait_s=10)
        assert 0.25 <= time.monotonic() - began_s < 5


class TokenCollector(grpc.aio.ServerInterceptor):
    """Notes which calls carried a token."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def intercept_service(self, continuation, handler_call_details):
        metadata = dict(handler_call_details.invocation_metadata)
        self.seen.append(metadata.get("authorization", ""))
        return await continuation(handler_call_details)


async def test_servers_get_the_token_too():
    collector = TokenCollector()
    placer = PlacingGateway()
    async with (
        grpc_served(server_id="pod-0", key=KEY, interceptors=(collector,)) as server,
        grpc_served(gateway=placer) as gateway,
    ):
        placer.servers.append((server.address.removeprefix("grpc://"), "pod-0"))
        async with await AsyncEnvClient.connect(
            gateway.address, direct=True, token="secret"
        ) as client:
            await client.open()
    assert set(collector.seen) == {"Bearer secret"}


async def settled(fleet: Fleet, wanted: list[int]) -> bool:
    for _ in range(500):
        if fleet.num_sessions == wanted:
            return True
        await asyncio.sleep(0.01)
    return False
