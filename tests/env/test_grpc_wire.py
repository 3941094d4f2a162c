"""What is particular to gRPC: batches, the stream's life, statuses, ownership."""

import asyncio

import grpc
import numpy as np
import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.types import Transition
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import SessionLostError
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.served import running

pytestmark = pytest.mark.asyncio


@pytest.fixture(params=[CountingEnv, ThreadedCountingEnv])
def factory(request):
    return request.param


def stub_of(server) -> tuple[grpc.aio.Channel, env_pb2_grpc.EnvServiceStub]:
    channel = grpc.aio.insecure_channel(server.grpc_address.removeprefix("grpc://"))
    return channel, env_pb2_grpc.EnvServiceStub(channel)


def num_batches(client: AsyncEnvClient) -> int:
    return client._transport._stream.num_batches_sent


async def test_calls_of_one_tick_travel_in_one_message(factory):
    async with running(factory) as server:
        client = await AsyncEnvClient.connect(server.grpc_address)
        opened = await asyncio.gather(*(client.open(seed=seed) for seed in range(100)))
        assert num_batches(client) == 1
        await asyncio.gather(*(session.step({"add": 1}) for session, _ in opened))
        assert num_batches(client) == 2
        await client.close()


async def test_an_unary_call_ends_with_a_status_and_the_code(factory):
    async with running(factory) as server:
        channel, stub = stub_of(server)
        opened = await stub.Open(pb.OpenRequest(reset=pb.ResetArgs(seed=1)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Step(pb.StepRequest(session_id=opened.session_id, action_json=b'{"add":0}'))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata())["ludus-code"] == "ILLEGAL_ACTION"
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await stub.State(pb.StateRequest(session_id="nobody"))
        assert lost.value.code() is grpc.StatusCode.NOT_FOUND
        await channel.close()


async def test_every_unary_call_works_and_a_step_can_be_repeated(factory):
    async with running(factory) as server:
        channel, stub = stub_of(server)
        assert (await stub.Describe(pb.DescribeRequest())).name == "counting"
        session_id = (await stub.Open(pb.OpenRequest())).session_id
        await stub.Reset(pb.ResetRequest(session_id=session_id, args=pb.ResetArgs(seed=0)))
        step = pb.StepRequest(session_id=session_id, step_index=1, action_text="ADD 2")
        first = await stub.Step(step)
        assert await stub.Step(step) == first
        assert (await stub.State(pb.StateRequest(session_id=session_id))).state_json == (
            b'{"episode_id":null,"step_count":1,"total":2}'
        )
        await stub.Close(pb.CloseRequest(session_id=session_id))
        assert server.core.load.num_sessions == 0
        await channel.close()


async def test_an_unary_session_outlives_streams_and_a_stream_session_does_not(factory):
    async with running(factory) as server:
        channel, stub = stub_of(server)
        unary_id = (await stub.Open(pb.OpenRequest())).session_id
        stream = stub.Connect()
        await stream.write(pb.CallBatch(calls=[pb.Call(call_id=9, open=pb.OpenRequest())]))
        reply = (await stream.read()).replies[0]
        assert (reply.call_id, server.core.load.num_sessions) == (9, 2)
        stream.cancel()
        for _ in range(100):
            await asyncio.sleep(0.01)
            if server.core.load.num_sessions == 1:
                break
        await stub.State(pb.StateRequest(session_id=unary_id))
        with pytest.raises(grpc.aio.AioRpcError, match="connection that opened it ended"):
            await stub.State(pb.StateRequest(session_id=reply.open.session_id))
        await channel.close()


async def test_malformed_calls_spoil_nobody_elses(factory):
    async with running(factory) as server:
        channel, stub = stub_of(server)
        session_id = (await stub.Open(pb.OpenRequest(reset=pb.ResetArgs()))).session_id
        stream = stub.Connect()
        good = pb.StepRequest(session_id=session_id, action_json=b'{"add":1}')
        bad_reset = pb.ResetRequest(session_id=session_id, args=pb.ResetArgs(options_json=b"["))
        no_action = pb.StepRequest(session_id=session_id)
        await stream.write(
            pb.CallBatch(
                calls=[
                    pb.Call(call_id=1),
                    pb.Call(call_id=2, reset=bad_reset),
                    pb.Call(call_id=3, step=no_action),
                    pb.Call(call_id=4, step=good),
                ]
            )
        )
        replies = {}
        while len(replies) < 4:
            replies |= {reply.call_id: reply for reply in (await stream.read()).replies}
        codes = [replies[call_id].error.code for call_id in (1, 2, 3)]
        assert codes == ["UNKNOWN_TYPE", "INVALID_JSON", "VALIDATION_ERROR"]
        assert replies[4].result.reward == 1.0
        await channel.close()


async def test_batches_of_large_answers_do_not_burst_the_message_limit(factory):
    class Painting(factory):
        def reset(self, *, seed=None):
            pixels = np.zeros((512, 512, 3), np.uint8)
            return Transition(super().reset(seed=seed).observation, tensors={"pixels": pixels})

    async with (
        running(Painting) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        opened = await asyncio.gather(*(client.open(seed=seed) for seed in range(30)))
        assert all(first.tensors["pixels"].shape == (512, 512, 3) for _, first in opened)


async def test_a_stopped_server_ends_calls_in_flight_and_sessions():
    server = await running(ThreadedCountingEnv).__aenter__()
    client = await AsyncEnvClient.connect(server.grpc_address, reconnect_timeout_s=0.2)
    busy, _ = await client.open()
    resting, _ = await client.open()
    in_flight = asyncio.create_task(busy.step({"add": 99}))
    await asyncio.sleep(0.05)
    await server.stop()
    for call in (in_flight, resting.step({"add": 1})):
        with pytest.raises(SessionLostError):
            await call
    await resting.close()
    await client.close()
