"""Groups of sessions with the same seed, and opens that wait for a full server."""

import asyncio
import itertools
import time

import pytest

from ludus.env.backoff import retry_refused
from ludus.env.client import AsyncEnvClient, ConnectOptions, EnvClient
from ludus.proto.errors import (
    CapacityError,
    GroupMismatchError,
    InvalidCallError,
    RateLimitError,
    SessionLostError,
)
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.grpc_served import serve_grpc
from tests.env.polling import wait_for_sessions
from tests.env.served import serve, server_address

pytestmark = pytest.mark.asyncio


class SeedIgnoringEnv(CountingEnv):
    """A counting environment that ignores the seed of a reset."""

    seeds = itertools.count()

    def reset(self, *, seed=None, start=0, note=""):
        return super().reset(seed=next(self.seeds), start=start, note=note)


async def connect_client(server, wire: str, **options) -> AsyncEnvClient:
    return await AsyncEnvClient.connect(server_address(server, wire), ConnectOptions(**options))


@pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])
async def test_sessions_of_a_group_start_identically_and_are_independent(
    wire: str, factory
) -> None:
    async with serve(factory) as server, await connect_client(server, wire) as client:
        group = await client.open_group(8, seed=5, options={"start": 3})
        single_session, first_result = await client.open(seed=5, options={"start": 3})
        assert all(result == first_result for _, result in group)
        assert len({session.id for session, _ in [*group, (single_session, first_result)]}) == 9
        results = await asyncio.gather(
            *(session.step({"add": number}) for number, (session, _) in enumerate(group, start=1))
        )
        assert [result.observation["total"] for result in results] == [
            3 + number for number in range(1, 9)
        ]


async def test_sessions_of_a_group_without_a_seed_start_identically(wire: str) -> None:
    async with serve() as server, await connect_client(server, wire) as client:
        luck_values = [
            {start.observation["luck"] for _, start in await client.open_group(4)} for _ in range(2)
        ]
        assert len(luck_values[0]) == len(luck_values[1]) == 1
        assert luck_values[0] != luck_values[1]


async def test_group_with_different_starts_is_refused_and_leaves_no_sessions(wire: str) -> None:
    async with serve(SeedIgnoringEnv) as server, await connect_client(server, wire) as client:
        with pytest.raises(GroupMismatchError, match="seed 7"):
            await client.open_group(3, seed=7)
        await wait_for_sessions(server.core, 0)


async def test_group_beyond_capacity_is_refused_and_leaves_no_sessions(wire: str) -> None:
    async with serve(max_sessions=4) as server, await connect_client(server, wire) as client:
        await client.open()
        await client.open()
        with pytest.raises(CapacityError, match="4") as error_info:
            await client.open_group(3)
        assert error_info.value.retry_after_s > 0
        await wait_for_sessions(server.core, 2)
        assert len(await client.open_group(2)) == 2
        with pytest.raises(InvalidCallError, match="at least 1 session, got 0"):
            await client.open_group(0)


async def test_close_when_done_closes_group_sessions_after_the_episodes(wire: str) -> None:
    async with serve() as server, await connect_client(server, wire) as client:
        group = await client.open_group(3, close_when_done=True)
        for session, _ in group:
            await session.step({"add": 7})
        await wait_for_sessions(server.core, 0)
        with pytest.raises(SessionLostError, match="close_when_done"):
            await group[0][0].step({"add": 1})


async def test_text_can_be_omitted_from_results(wire: str) -> None:
    async with serve() as server, await connect_client(server, wire) as client:
        session, first_result = await client.open(with_text=False)
        assert (first_result.text, (await session.step({"add": 1})).text) == (None, None)
        assert (await session.step(text="ADD 2")).observation["total"] == 3
        [(_, result)] = await client.open_group(1, with_text=False)
        assert result.text is None


@pytest.mark.slow
async def test_an_open_waits_for_a_full_server_until_its_timeout(wire: str) -> None:
    async with serve(max_sessions=1) as server, await connect_client(server, wire) as client:
        session, _ = await client.open()
        start_s = time.monotonic()
        with pytest.raises(CapacityError):
            await client.open(wait_s=0.2)
        assert time.monotonic() - start_s > 0.15
        open_task = asyncio.create_task(client.open(wait_s=60))
        await asyncio.sleep(0.05)
        await session.close()
        other_session, _ = await open_task
        assert (await other_session.step({"add": 1})).step_index == 1


async def test_open_waits_for_a_draining_server_until_the_timeout() -> None:
    async with serve_grpc() as server, await AsyncEnvClient.connect(server.address) as client:
        server.core.drain()
        start_s = time.monotonic()
        with pytest.raises(Exception, match="draining"):
            await client.open(wait_s=0.2)
        assert time.monotonic() - start_s > 0.15


async def test_a_refused_open_is_retried_after_the_requested_pause() -> None:
    loop, attempt_times_s = asyncio.get_running_loop(), []

    async def attempt() -> str:
        attempt_times_s.append(loop.time())
        if len(attempt_times_s) < 3:
            raise RateLimitError("one at a time", retry_after_s=0.1)
        return "opened"

    assert await retry_refused(attempt, 60) == "opened"
    assert all(
        later_s - earlier_s >= 0.1 for earlier_s, later_s in itertools.pairwise(attempt_times_s)
    )


async def test_sync_client_opens_groups(wire: str) -> None:
    def play_synchronously(address: str) -> None:
        with EnvClient.connect(address) as client:
            group = client.open_group(4, seed=1, with_text=False)
            results = [session.step({"add": 1}) for session, _ in group]
            assert [result.observation["total"] for result in results] == [1] * 4
            assert group[0][0].reset(seed=1) == group[1][1]

    async with serve() as server:
        await asyncio.to_thread(play_synchronously, server_address(server, wire))
        await wait_for_sessions(server.core, 0)
