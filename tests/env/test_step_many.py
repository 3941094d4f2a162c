"""Steps of many sessions in one call: their order, their outcomes, callers that give up."""

import asyncio

import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions, Reset
from ludus.env.types import StepResult
from ludus.proto.errors import EnvError, InfrastructureError
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.served import WIRES, running, server_address

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("factory", [CountingEnv, ThreadedCountingEnv])
async def test_steps_and_resets_mix_and_each_gets_its_own_outcome(factory, wire):
    async with (
        running(factory) as server,
        await AsyncEnvClient.connect(server_address(server, wire)) as client,
    ):
        sessions = [(await client.open(seed=seed))[0] for seed in range(4)]
        steps = [
            (sessions[0], {"add": 1}),
            (sessions[1], Reset(seed=9)),
            (sessions[2], {"add": 0}),  # illegal
            (sessions[3], "ADD 2"),
        ]
        stepped, reset, refused, as_text = await client.step_many(steps)
        assert isinstance(stepped, StepResult) and stepped.step_index == 1
        assert isinstance(reset, StepResult) and (reset.step_index, reset.reward) == (0, None)
        assert isinstance(refused, EnvError) and not isinstance(refused, InfrastructureError)
        assert isinstance(as_text, StepResult) and as_text.reward == 2.0
        counts = server.core.counts
        assert (counts.num_steps, counts.num_resets, sum(counts.num_errors.values())) == (2, 5, 1)


async def test_a_caller_that_gives_up_does_not_shift_the_answers_of_others():
    async with (
        running(ThreadedCountingEnv) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        slow, *others = [(await client.open(seed=1))[0] for _ in range(4)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.step_many([(slow, {"add": 99})]), 0.05)  # takes 0.4 s
        answers = await asyncio.gather(
            *(client.step_many([(one, {"add": n})]) for n, one in enumerate(others, 1))
        )
        assert [result.observation["total"] for [result] in answers] == [1, 2, 3]


async def test_a_client_that_closes_fails_those_who_wait_and_those_who_come():
    async with running(ThreadedCountingEnv) as server:
        client = await AsyncEnvClient.connect(server.grpc_address)
        (slow, _), (other, _) = await client.open(seed=1), await client.open(seed=1)
        waiting = asyncio.create_task(client.step_many([(slow, {"add": 99})]))
        await asyncio.sleep(0)
        await client.close()
        for outcomes in (await waiting, await client.step_many([(other, {"add": 1})])):
            assert [error.code for error in outcomes] == ["SESSION_LOST"]


async def test_steps_are_taken_where_the_connection_broke_before():
    async with (
        running() as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        session, _ = await client.open(seed=1, linger_s=10)
        plain, _ = await client.open(seed=1)
        await client.step_many([(session, {"add": 1}), (plain, {"add": 1})])
        await client._transport._stream.close()
        kept, lost = await client.step_many([(session, {"add": 1}), (plain, {"add": 1})])
        assert isinstance(kept, StepResult) and kept.step_index == 2
        assert lost.code == "SESSION_LOST"


async def test_over_websocket_only_the_calls_that_come_too_late_fail(gate):
    async with (
        running(gate.factory) as server,
        await AsyncEnvClient.connect(server.http_address, ConnectOptions(timeout_s=1.5)) as client,
    ):
        (slow, _), (quick, _) = await client.open(seed=1), await client.open(seed=1)
        late, there = await client.step_many([(slow, {"add": 98}), (quick, {"add": 2})])
        gate.open()
        assert isinstance(late, EnvError) and late.code == "TIMEOUT"
        assert isinstance(there, StepResult) and there.observation["total"] == 2
        gone, there = await client.step_many([(slow, {"add": 1}), (quick, {"add": 2})])
        assert isinstance(gone, EnvError) and gone.code == "SESSION_LOST"
        assert isinstance(there, StepResult) and there.observation["total"] == 4


@pytest.mark.parametrize("ends", ["before", "while"])
async def test_over_websocket_only_the_calls_of_a_lost_session_fail(ends):
    async with (
        running(ThreadedCountingEnv) as server,
        await AsyncEnvClient.connect(server.http_address) as client,
    ):
        (lost, _), (kept, _) = await client.open(seed=1), await client.open(seed=1)
        socket = lost._wire._socket
        if ends == "before":
            await socket.close()
        calls = [(lost, {"add": 99}), (kept, {"add": 2})]
        stepping = asyncio.create_task(client.step_many(calls))
        if ends == "while":
            await asyncio.sleep(0.05)
            socket.transport.abort()
        error, result = await stepping
        assert isinstance(error, EnvError) and error.code == "SESSION_LOST"
        assert isinstance(result, StepResult) and result.observation["total"] == 2


async def test_over_websocket_a_caller_that_gives_up_leaves_the_other_sessions_in_step():
    async with (
        running(ThreadedCountingEnv) as server,
        await AsyncEnvClient.connect(server.http_address) as client,
    ):
        (slow, _), (other, _) = await client.open(seed=1), await client.open(seed=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.step_many([(slow, {"add": 99})]), 0.05)
        [gone] = await client.step_many([(slow, {"add": 1})])
        [there] = await client.step_many([(other, {"add": 3})])
        assert isinstance(gone, EnvError) and gone.code == "SESSION_LOST"
        assert isinstance(there, StepResult) and there.observation["total"] == 3
