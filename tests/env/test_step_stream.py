"""The streamed StepMany: order, callers that give up, streams that end."""

import asyncio
import time

import grpc
import pytest

from ludus.env.client import AsyncEnvClient, Reset
from ludus.env.grpc.step_stream import StepStream, answer_in_order, read_ahead
from ludus.env.types import StepResult
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import EnvError, InfrastructureError
from tests.env.counting_env import ThreadedCountingEnv
from tests.env.served import running


async def requests_of(*values):
    for value in values:
        yield value


async def test_answers_come_in_the_order_of_the_requests_however_long_each_takes():
    written = []

    async def answer(delay_s: float) -> float:
        await asyncio.sleep(delay_s)
        return delay_s

    async def write(delay_s: float) -> None:
        written.append(delay_s)

    begun_s = time.perf_counter()
    await answer_in_order(requests_of(0.2, 0.0, 0.1), answer, write)
    assert written == [0.2, 0.0, 0.1]
    assert time.perf_counter() - begun_s < 0.29  # side by side, not one after another


async def test_a_failed_answer_ends_the_stream_with_its_error():
    async def answer(value: int) -> int:
        if value == 2:
            raise ValueError("two")
        return value

    async def write(value: int) -> None:
        assert value == 1

    with pytest.raises(ValueError, match="two"):
        await answer_in_order(requests_of(1, 2, 3), answer, write)


async def test_a_writer_that_fails_does_not_leave_the_reader_waiting():
    async def answer(value: int) -> int:
        return value

    async def write(value: int) -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(answer_in_order(requests_of(*range(100)), answer, write), 5)


async def opened_ids(stub: env_pb2_grpc.EnvServiceStub, number: int) -> list[str]:
    request = pb.OpenRequest(reset=pb.ResetArgs(seed=1))
    return [(await stub.Open(request)).session_id for _ in range(number)]


def add(session_id: str, number: int) -> pb.StepManyRequest:
    action = b'{"add": %d}' % number
    return pb.StepManyRequest(steps=[pb.StepRequest(session_id=session_id, action_json=action)])


def total(response: pb.StepManyResponse) -> str:
    return response.replies[0].result.observation_json.decode()


async def test_a_caller_that_gives_up_does_not_shift_the_answers_of_others():
    async with running(ThreadedCountingEnv) as server:
        channel = grpc.aio.insecure_channel(server.grpc_address.removeprefix("grpc://"))
        stub = env_pb2_grpc.EnvServiceStub(channel)
        slow, *others = await opened_ids(stub, 4)
        stream = StepStream(stub.StepStream())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.ask(add(slow, 99)), 0.05)  # sleeps for 0.4 s
        answers = await asyncio.gather(
            *(stream.ask(add(one, number)) for number, one in enumerate(others, 1))
        )
        assert [f'"total":{number},' in total(a) for number, a in enumerate(answers, 1)] == [
            True,
            True,
            True,
        ]
        await stream.close()
        await channel.close()


async def test_a_stream_that_ends_fails_those_who_wait_and_those_who_come():
    async with running(ThreadedCountingEnv) as server:
        channel = grpc.aio.insecure_channel(server.grpc_address.removeprefix("grpc://"))
        stub = env_pb2_grpc.EnvServiceStub(channel)
        (slow,) = await opened_ids(stub, 1)
        stream = StepStream(stub.StepStream())
        waiting = asyncio.create_task(stream.ask(add(slow, 99)))
        await asyncio.sleep(0.1)
        await stream.close()
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(waiting, 5)
        assert stream.is_broken
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(stream.ask(add(slow, 1)), 5)
        await channel.close()


async def test_steps_and_resets_mix_and_each_gets_its_own_outcome():
    async with running() as server, await AsyncEnvClient.connect(server.grpc_address) as client:
        sessions = [(await client.open(seed=seed))[0] for seed in range(4)]
        steps = [
            (sessions[0], {"add": 1}),
            (sessions[1], Reset(seed=9)),
            (sessions[2], {"add": 0}),  # illegal
            (sessions[3], "ADD 2"),
        ]
        stepped, reset, refused, spoken = await client.step_many(steps)
        assert isinstance(stepped, StepResult) and stepped.step_index == 1
        assert isinstance(reset, StepResult) and (reset.step_index, reset.reward) == (0, None)
        assert isinstance(refused, EnvError) and not isinstance(refused, InfrastructureError)
        assert isinstance(spoken, StepResult) and spoken.reward == 2.0
        counts = server.core.counts
        assert (counts.num_steps, counts.num_resets, sum(counts.num_errors.values())) == (2, 5, 1)


async def test_a_stream_that_broke_is_made_again():
    async with running() as server, await AsyncEnvClient.connect(server.grpc_address) as client:
        session, _ = await client.open(seed=1)
        await client.step_many([(session, {"add": 1})])
        await client._transport._steps.close()
        (result,) = await client.step_many([(session, {"add": 1})])
        assert isinstance(result, StepResult) and result.step_index == 2


async def test_reading_ahead_keeps_the_order_and_passes_on_what_went_wrong():
    async def broken():
        for number in range(40):
            yield number
        raise ConnectionError("gone")

    seen = []
    with pytest.raises(ConnectionError, match="gone"):
        async for number in read_ahead(broken()):
            seen.append(number)
            await asyncio.sleep(0)
    assert seen == list(range(len(seen))) and len(seen) >= 20
    assert [number async for number in read_ahead(requests_of(*range(40)))] == list(range(40))
