"""Resuming lost sessions by replaying their calls in new sessions."""

import asyncio
import itertools
import time
from contextlib import asynccontextmanager

import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions, EnvClient
from ludus.env.client.resume import ResumeLimits
from ludus.proto.errors import (
    CallTimeoutError,
    ConfigError,
    ErrorCode,
    ExecutionError,
    IllegalActionError,
    InfrastructureError,
    SessionLostError,
    ToolError,
)
from tests.env.counting_env import CountingEnv
from tests.env.flaky_proxy import FlakyProxy
from tests.env.grpc_served import GrpcServer, serve_grpc
from tests.env.polling import advance_loop_clock, wait_for_sessions, wait_until
from tests.env.served import (
    WIRES,
    make_fixed_port_arguments,
    serve,
    server_address,
    start_server_process,
)
from tests.env.tool_env import ToolEnv

pytestmark = pytest.mark.asyncio

ACTIONS = [{"add": 1}, "ADD 2", {"add": 8}, {"add": 3}, {"add": 4}]


class NondeterministicEnv(CountingEnv):
    """An environment whose reset ignores the seed."""

    seeds = itertools.count()

    def reset(self, *, seed=None, start=0, note=""):
        return super().reset(seed=next(self.seeds), start=start, note=note)


@asynccontextmanager
async def serve_behind_proxy(factory=CountingEnv, **options):
    async with (
        serve_grpc(factory, deterministic=True) as server,
        FlakyProxy(server.address) as proxy,
        await AsyncEnvClient.connect(proxy.address, ConnectOptions(**options)) as client,
    ):
        yield server, proxy, client


async def close_all_sessions(server: GrpcServer) -> None:
    """Close all sessions, to simulate a server that lost them."""
    for session_id in list(server.core.open_sessions):
        await server.core.close(session_id)


async def take_action(session, action):
    return await (session.step(text=action) if isinstance(action, str) else session.step(action))


async def play_episode(client: AsyncEnvClient, seed, *, before_step=None, **options):
    session, first_result = await client.open(seed=seed, options={"start": 5}, **options)
    results = [first_result]
    for step_index, action in enumerate(ACTIONS):
        if before_step is not None:
            await before_step(step_index)
        results.append(await take_action(session, action))
    return session, results


async def test_session_lost_before_every_step_resumes_the_same_episode() -> None:
    async with serve_behind_proxy() as (server, _, client):
        _, expected_results = await play_episode(client, 3)

        async def close_sessions(step_index) -> None:
            await close_all_sessions(server)

        session, results = await play_episode(client, 3, before_step=close_sessions, resume=True)
        assert [get_fields(r) for r in results] == [get_fields(r) for r in expected_results]
        assert session.num_resumes == len(ACTIONS)
        assert results[3].tensors["trace"].tolist() == [0.0, 1.0, 2.0]


async def test_episode_resumes_after_a_server_restart() -> None:
    async with serve_behind_proxy() as (first_server, proxy, client):
        _, expected_results = await play_episode(client, 4)
        async with serve_grpc(deterministic=True) as second_server:

            async def restart(step_index) -> None:
                if step_index == 2:
                    proxy.set_upstream(second_server.address)
                    await first_server.kill()

            session, results = await play_episode(client, 4, before_step=restart, resume=True)
            assert [get_fields(r) for r in results] == [get_fields(r) for r in expected_results]
            assert session.num_resumes == 1


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
async def test_episode_resumes_after_the_server_process_is_killed(wire: str, tmp_path) -> None:
    ports = make_fixed_port_arguments()
    with start_server_process(tmp_path, *ports) as server:
        connection = AsyncEnvClient.connect(
            server_address(server, wire), ConnectOptions(reconnect_timeout_s=300)
        )
        async with await connection as client:
            _, expected_results = await play_episode(client, 4)
            limits = ResumeLimits(timeout_s=300)
            session, first_result = await client.open(seed=4, options={"start": 5}, resume=limits)
            results = [first_result]
            for action in ACTIONS[:2]:
                results.append(await take_action(session, action))
            server.process.kill()
            server.process.wait()
            step_task = asyncio.create_task(take_action(session, ACTIONS[2]))
            await asyncio.sleep(0.1)
            with start_server_process(tmp_path, *ports):
                results.append(await step_task)
                for action in ACTIONS[3:]:
                    results.append(await take_action(session, action))
            assert [get_fields(r) for r in results] == [get_fields(r) for r in expected_results]
            assert session.num_resumes == 1


async def test_unseeded_session_draws_a_seed_and_resumes_with_the_same_seed() -> None:
    async with serve_behind_proxy() as (server, _, client):
        session, first_result = await client.open(resume=True)
        await session.step({"add": 1})
        await close_all_sessions(server)
        assert (await session.step({"add": 2})).observation["total"] == 3
        await close_all_sessions(server)
        reset_result = await session.reset()
        assert reset_result.observation["luck"] != first_result.observation["luck"]
        await close_all_sessions(server)
        await session.step({"add": 1})
        await close_all_sessions(server)
        assert (await session.state())["total"] == 1
        assert session.num_resumes == 4


async def test_failed_actions_are_replayed_only_if_state_may_have_changed() -> None:
    async with serve_behind_proxy() as (server, _, client):
        session, _ = await client.open(seed=1, resume=True)
        await session.step({"add": 1})
        with pytest.raises(IllegalActionError):
            await session.step({"add": 0})
        with pytest.raises(ExecutionError):
            await session.step({"add": 13})
        await close_all_sessions(server)
        result = await session.step({"add": 2})
        assert (result.observation["total"], result.step_index) == (3, 2)
        assert session.num_resumes == 1


async def test_nondeterministic_environment_fails_with_replay_mismatch() -> None:
    async with serve_behind_proxy(NondeterministicEnv) as (server, _, client):
        session, _ = await client.open(seed=1, resume=True)
        await session.step({"add": 1})
        await close_all_sessions(server)
        with pytest.raises(SessionLostError, match="with seed 1 returned a different") as error:
            await session.step({"add": 1})
        assert error.value.code == ErrorCode.REPLAY_MISMATCH
        with pytest.raises(SessionLostError):
            await session.step({"add": 1})
        await wait_for_sessions(server.core, 0)


async def test_resume_fails_without_a_determinism_check() -> None:
    async with serve() as server, await AsyncEnvClient.connect(server.grpc_address) as client:
        with pytest.raises(ConfigError, match="ludus env check"):
            await client.open(resume=True)
        assert server.core.load.num_sessions == 0


async def test_lost_session_resumes_over_websocket() -> None:
    async with (
        serve(check_determinism=True) as server,
        await AsyncEnvClient.connect(server.http_address) as client,
    ):
        _, expected_results = await play_episode(client, 3)

        async def close_sessions(step_index) -> None:
            for session_id in list(server.core.open_sessions):
                await server.core.close(session_id)

        session, results = await play_episode(client, 3, before_step=close_sessions, resume=True)
        assert [get_fields(r) for r in results] == [get_fields(r) for r in expected_results]
        assert session.num_resumes == len(ACTIONS)


class NondeterministicToolEnv(ToolEnv):
    """An environment whose tools return a different result each time."""

    calls = itertools.count()

    def call_tool(self, name, arguments):
        return super().call_tool(name, arguments) | {"number": next(self.calls)}


@pytest.mark.parametrize("wire", WIRES)
async def test_tool_calls_are_replayed_in_the_replacement_session(
    wire: str,
) -> None:
    async with (
        serve(ToolEnv, check_determinism=True) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):

        async def close_sessions() -> None:
            for session_id in list(server.core.open_sessions):
                await server.core.close(session_id)

        session, _ = await client.open(seed=1, resume=True)
        arguments = {"text": "a"}
        assert (await session.call_tool("note", arguments)).content == {"notes": ["a"]}
        arguments["text"] = "changed by the caller"
        await session.step({"add": 1})
        with pytest.raises(ToolError):
            await session.call_tool("fail")
        await close_sessions()
        assert (await session.call_tool("note", {"text": "b"})).content == {"notes": ["a", "b"]}
        await close_sessions()
        assert (await session.step({"add": 2})).observation["total"] == 3
        assert (await session.call_tool("note", {"text": "c"})).content == {
            "notes": ["a", "b", "c"]
        }
        assert session.num_resumes == 2


async def test_nondeterministic_tool_fails_with_replay_mismatch() -> None:
    async with serve_behind_proxy(NondeterministicToolEnv) as (server, _, client):
        session, _ = await client.open(seed=1, resume=True)
        await session.call_tool("note", {"text": "a"})
        await close_all_sessions(server)
        with pytest.raises(SessionLostError, match="the call of tool 'note' with seed 1") as error:
            await session.step({"add": 1})
        assert error.value.code == ErrorCode.REPLAY_MISMATCH


async def test_sessions_of_a_group_resume_individually() -> None:
    async with serve_behind_proxy() as (server, _, client):
        group = await client.open_group(3, seed=2, resume=True)
        await asyncio.gather(*(session.step({"add": 1}) for session, _ in group))
        await close_all_sessions(server)
        results = await asyncio.gather(*(session.step({"add": 1}) for session, _ in group))
        assert [result.observation["total"] for result in results] == [2, 2, 2]
        assert len({result.observation["luck"] for result in results}) == 1


@pytest.mark.slow
async def test_resume_attempts_are_limited_in_number_and_time(gate) -> None:
    async with serve_behind_proxy(gate.factory) as (server, _, client):
        session, _ = await client.open(seed=1, resume=ResumeLimits(num_attempts=2, timeout_s=1000))
        step_task = asyncio.create_task(session.step({"add": 98}))
        for num_steps in (1, 2, 3):
            await wait_until(lambda num_steps=num_steps: gate.num_entered == num_steps)
            advance_loop_clock(61)
        with pytest.raises(CallTimeoutError):
            await step_task
        assert session.num_resumes == 2
        await wait_for_sessions(server.core, 0)
        gate.open()
    async with serve_behind_proxy(reconnect_timeout_s=60) as (_, proxy, client):
        session, _ = await client.open(seed=1, resume=ResumeLimits(timeout_s=0.5))
        proxy.refuses_connections = True
        proxy.cut()
        start_s = time.monotonic()
        with pytest.raises(InfrastructureError):
            await session.step({"add": 1})
        assert time.monotonic() - start_s < 30


async def test_interrupted_call_is_resent_without_resuming_a_live_session() -> None:
    async with serve_behind_proxy() as (server, proxy, client):
        session, _ = await client.open(seed=1, resume=True, linger_s=30)
        await session.step({"add": 1})
        proxy.cut()
        await session.step({"add": 1})
        assert session.num_resumes == 0
        await close_all_sessions(server)
        assert (await session.step({"add": 1})).observation["total"] == 3
        assert session.num_resumes == 1


async def test_synchronous_client_resumes_lost_sessions() -> None:
    def play_synchronously(server, loop) -> None:
        with EnvClient.connect(server.address) as client:
            session, _ = client.open(seed=1, resume=True)
            session.step({"add": 1})
            asyncio.run_coroutine_threadsafe(close_all_sessions(server), loop).result()
            assert session.step({"add": 1}).observation["total"] == 2
            assert session.num_resumes == 1

    async with serve_grpc(deterministic=True) as server:
        await asyncio.to_thread(play_synchronously, server, asyncio.get_running_loop())


def get_fields(result):
    return (result.observation, result.reward, result.terminated, result.step_index, result.text)
