"""Every reply is matched to the correct call, even on a faulty connection."""

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import Callable

import pytest

from ludus.env.client import AsyncEnvClient, AsyncSession, ConnectOptions
from ludus.env.transports import grpc as grpc_transport
from ludus.proto.errors import CallTimeoutError, InfrastructureError, SessionLostError
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.flaky_proxy import FlakyProxy
from tests.env.grpc_served import serve_grpc
from tests.env.polling import (
    advance_loop_clock,
    find_detached_sessions,
    run_pending_tasks,
    wait_for_sessions,
    wait_until,
)
from tests.env.quiet_edge import QuietEdge
from tests.env.served import serve, server_address
from tests.env.tool_env import ToolEnv

pytestmark = pytest.mark.asyncio

CALL_TIMEOUT_S = 0.1


class Player:
    """A player that checks that each reply belongs to the correct call."""

    def __init__(
        self, client: AsyncEnvClient, seed: int, on_reply: Callable[[], None] = lambda: None
    ) -> None:
        self.client = client
        self.on_reply = on_reply
        self.generator = random.Random(seed)
        self.num_replies = 0
        self.num_lost = 0

    async def play(self, num_calls: int) -> None:
        while self.num_replies + self.num_lost < num_calls:
            try:
                start = self.generator.randrange(1_000_000)
                session, first_result = await self.client.open(options={"start": start})
                assert (first_result.observation["total"], first_result.step_index) == (start, 0)
                await self.play_episode(session, start)
                await session.close()
            except InfrastructureError:
                self.num_lost += 1

    async def play_episode(self, session: AsyncSession, total: int) -> None:
        for step_index in range(1, 6):
            number = self.generator.choice([1, 2, 3, 4, 5, 6])
            total += number
            result = await session.step({"add": number})
            assert result.observation["total"] == total
            assert (result.reward, result.info) == (float(number), {"added": number})
            assert (result.step_index, result.done) == (step_index, step_index == 5)
            self.num_replies += 1
            self.on_reply()


@pytest.mark.slow
@pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])
async def test_no_reply_is_matched_to_the_wrong_call_after_timeouts(wire: str, factory) -> None:
    generator = random.Random(0)
    async with serve(factory) as server, FlakyProxy(server_address(server, wire)) as proxy:
        async with await connect_client_with_short_timeout(proxy.address) as client:
            proxy.delay_s = lambda: generator.choice(
                [0, 0, 0, 0, CALL_TIMEOUT_S * generator.uniform(0.6, 1.4)]
            )
            players = [Player(client, seed) for seed in range(8)]
            num_calls, num_replies, num_lost = 60, 0, 0
            while num_replies <= 50 or num_lost <= 10:
                await asyncio.gather(*(player.play(num_calls) for player in players))
                num_calls += 60
                num_replies = sum(player.num_replies for player in players)
                num_lost = sum(player.num_lost for player in players)
            proxy.delay_s = lambda: 0.0
        await wait_for_sessions(server.core, 0)


async def connect_client_with_short_timeout(address: str) -> AsyncEnvClient:
    """Connect with the default time limit; return a client with a short limit for calls."""
    client = await AsyncEnvClient.connect(address)
    transport = client.transport
    options = dataclasses.replace(transport.server.options, timeout_s=CALL_TIMEOUT_S)
    transport.server = dataclasses.replace(transport.server, options=options)
    if isinstance(transport, grpc_transport.GrpcTransport):
        await transport.stream.close()  # the next stream has the new limit
    return client


@pytest.mark.slow
async def test_lingering_sessions_survive_lost_connections_without_duplicate_steps() -> None:
    reply_numbers = itertools.count(1)
    async with serve() as server, FlakyProxy(server.grpc_address) as proxy:

        def cut_after_every_ninth_reply() -> None:
            if next(reply_numbers) % 9 == 0:
                proxy.cut()

        async with await AsyncEnvClient.connect(proxy.address) as client:
            results = [await client.open(options={"start": 7}, linger_s=20) for _ in range(16)]
            players = [Player(client, seed, cut_after_every_ninth_reply) for seed in range(16)]
            await asyncio.gather(
                *(
                    player.play_episode(session, 7)
                    for player, (session, _) in zip(players, results, strict=True)
                )
            )
            assert proxy.num_connections > 1
            assert server.core.load.num_sessions == 16
        await wait_for_sessions(server.core, 0)


async def test_lingering_session_calls_a_tool_after_an_idle_connection_was_lost() -> None:
    async with (
        serve(ToolEnv) as server,
        FlakyProxy(server.grpc_address) as proxy,
        await AsyncEnvClient.connect(proxy.address) as client,
    ):
        session, _ = await client.open(linger_s=20)
        stream = client.transport.stream
        proxy.refuses_connections = True
        proxy.cut()
        await wait_until(lambda: stream.break_reason is not None)
        proxy.refuses_connections = False
        assert (await session.call_tool("note", {"text": "hello"})).content == {"notes": ["hello"]}


@pytest.mark.long
@pytest.mark.slow
async def test_high_latency_server_is_reached_over_the_first_connection() -> None:
    async with serve() as server, FlakyProxy(server.grpc_address) as proxy:
        proxy.delay_s = lambda: 0.7
        async with await AsyncEnvClient.connect(
            proxy.address, ConnectOptions(connect_timeout_s=60)
        ) as client:
            session, _ = await client.open()
            assert (await session.step({"add": 2})).observation["total"] == 2
        assert proxy.num_connections == 1


@pytest.mark.slow
async def test_idle_sessions_survive_repeated_connection_losses(
    monkeypatch: pytest.MonkeyPatch, core_clock
) -> None:
    monkeypatch.setattr(grpc_transport, "KEEP_ALIVE_FRACTION", 0.01)
    async with (
        serve() as server,
        FlakyProxy(server.grpc_address) as proxy,
        await AsyncEnvClient.connect(proxy.address) as client,
    ):
        idle_session, _ = await client.open(options={"start": 7}, linger_s=30)
        busy_session, _ = await client.open(options={"start": 1}, linger_s=30)
        for num_cuts in range(1, 4):
            num_connections = proxy.num_connections
            proxy.cut()
            result = await busy_session.step({"add": 1})
            assert result.observation["total"] == 1 + num_cuts
            await wait_until(lambda: not find_detached_sessions(server.core))
            await asyncio.sleep(1)
            assert proxy.num_connections == num_connections + 1
        core_clock.advance(60)
        await asyncio.sleep(0.5)
        assert (await idle_session.step({"add": 2})).observation["total"] == 9


@pytest.mark.slow
async def test_a_session_without_calls_outlives_an_unnoticed_disconnect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_transport, "KEEP_ALIVE_FRACTION", 0.05)
    async with (
        serve() as server,
        QuietEdge(server.grpc_address) as edge,
        await AsyncEnvClient.connect(edge.address) as client,
    ):
        idle_session, _ = await client.open(options={"start": 7}, linger_s=20)
        [server_session] = server.core.open_sessions.values()
        [first_connection] = server_session.connections
        edge.upstreams[0].cancel()
        await wait_until(lambda: server_session.connections - {first_connection})
        assert (await idle_session.step({"add": 2})).observation["total"] == 9
        assert len(edge.upstreams) == 2


async def test_non_lingering_session_is_lost_when_the_connection_is_cut(wire: str) -> None:
    async with (
        serve() as server,
        FlakyProxy(server_address(server, wire)) as proxy,
        await AsyncEnvClient.connect(proxy.address) as client,
    ):
        session, _ = await client.open()
        proxy.cut()
        with pytest.raises(SessionLostError):
            await session.step({"add": 1})
        with pytest.raises(SessionLostError, match="open a new one"):
            await session.step({"add": 1})
        new_session, _ = await client.open()
        assert (await new_session.step({"add": 2})).observation["total"] == 2


@pytest.mark.slow
async def test_half_open_connection_is_detected_and_lingering_session_continues() -> None:
    async with (
        serve_grpc() as server,
        FlakyProxy(server.address) as proxy,
        await AsyncEnvClient.connect(proxy.address, ConnectOptions(keepalive_s=0.4)) as client,
    ):
        session, _ = await client.open(linger_s=20)
        other_session, _ = await client.open()
        await session.step({"add": 1})
        proxy.blackhole()
        start_s = time.monotonic()
        result, error = await asyncio.gather(
            session.step({"add": 2}), other_session.step({"add": 2}), return_exceptions=True
        )
        assert time.monotonic() - start_s < 60
        assert (result.observation["total"], result.step_index) == (3, 2)
        assert isinstance(error, SessionLostError)


async def test_client_reconnects_after_the_peer_half_closes() -> None:
    async with (
        serve_grpc() as server,
        FlakyProxy(server.address) as proxy,
        await AsyncEnvClient.connect(proxy.address) as client,
    ):
        session, _ = await client.open(linger_s=20)
        await session.step({"add": 1})
        proxy.half_close()
        assert (await session.step({"add": 2})).observation["total"] == 3


@pytest.mark.slow
async def test_a_half_open_socket_times_out_and_the_next_open_works() -> None:
    async with (
        serve() as server,
        FlakyProxy(server.http_address) as proxy,
        await AsyncEnvClient.connect(proxy.address) as client,
    ):
        session, _ = await client.open()
        proxy.blackhole()
        step_task = asyncio.create_task(session.step({"add": 1}))
        await run_pending_tasks()
        advance_loop_clock(61)
        with pytest.raises(CallTimeoutError, match="within 60 s"):
            await step_task
        new_session, _ = await client.open()
        assert (await new_session.step({"add": 2})).observation["total"] == 2


@pytest.mark.slow
async def test_lingering_session_fails_if_the_server_stays_unreachable() -> None:
    async with serve_grpc() as server, FlakyProxy(server.address) as proxy:
        connection = AsyncEnvClient.connect(proxy.address, ConnectOptions(reconnect_timeout_s=0.3))
        async with await connection as client:
            session, _ = await client.open(linger_s=20)
            proxy.refuses_connections = True
            proxy.cut()
            start_s = time.monotonic()
            with pytest.raises(InfrastructureError):
                await session.step({"add": 1})
            assert time.monotonic() - start_s < 30


@pytest.mark.slow
async def test_lingering_session_is_lost_when_the_server_restarts() -> None:
    async with (
        serve_grpc() as first_server,
        FlakyProxy(first_server.address) as proxy,
        await AsyncEnvClient.connect(proxy.address) as client,
    ):
        session, _ = await client.open(linger_s=20)
        async with serve_grpc() as second_server:
            proxy.set_upstream(second_server.address)
            await first_server.kill()
            with pytest.raises(SessionLostError, match="may have restarted"):
                await session.step({"add": 1})
