"""The gRPC wire: batches, errors, and the sessions of a stream."""

import asyncio
import math

import numpy as np
import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.types import Transition
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from ludus.proto.errors import SessionLostError
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.polling import wait_for_sessions, wait_until
from tests.env.raw_stream import RawStream
from tests.env.served import serve

pytestmark = pytest.mark.asyncio


@pytest.fixture(params=[CountingEnv, ThreadedCountingEnv])
def factory(request: pytest.FixtureRequest):
    return request.param


def count_batches(client: AsyncEnvClient) -> int:
    return client.transport.stream.num_batches_sent


@pytest.mark.slow
async def test_simultaneous_calls_are_sent_in_one_message(factory) -> None:
    async with serve(factory) as server:
        client = await AsyncEnvClient.connect(server.grpc_address)
        results = await asyncio.gather(*(client.open(seed=seed) for seed in range(100)))
        assert count_batches(client) == 1
        await asyncio.gather(*(session.step({"add": 1}) for session, _ in results))
        assert count_batches(client) == 2
        await client.close()


async def test_failed_calls_have_an_error_code_and_describe_needs_no_stream(factory) -> None:
    async with serve(factory) as server, RawStream(server.grpc_address) as stream:
        stub = env_pb2_grpc.EnvServiceStub(stream.channel)
        assert (await stub.Describe(pb.DescribeRequest())).name == "counting"
        session_id = await stream.open(reset=pb.ResetArgs(seed=1))
        illegal_step = pb.StepRequest(session_id=session_id, action_json=b'{"add":0}')
        assert (await stream.ask(pb.Call(step=illegal_step))).error.code == "ILLEGAL_ACTION"
        unknown_request = pb.StateRequest(session_id="nobody")
        assert (await stream.ask(pb.Call(state=unknown_request))).error.code == "SESSION_LOST"


async def test_all_calls_work_and_a_repeated_step_gets_the_same_reply(factory) -> None:
    async with serve(factory) as server, RawStream(server.grpc_address) as stream:
        session_id = await stream.open()
        reset = pb.ResetRequest(session_id=session_id, args=pb.ResetArgs(seed=0))
        assert (await stream.ask(pb.Call(call_id=7, reset=reset))).result.step_index == 0
        step = pb.StepRequest(session_id=session_id, step_index=1, action_text="ADD 2")
        reply = await stream.ask(pb.Call(step=step))
        assert await stream.ask(pb.Call(step=step)) == reply
        state = await stream.ask(pb.Call(state=pb.StateRequest(session_id=session_id)))
        assert state.state.state_json == b'{"episode_id":null,"step_count":1,"total":2}'
        await stream.ask(pb.Call(close=pb.CloseRequest(session_id=session_id)))
        assert server.core.load.num_sessions == 0


@pytest.mark.parametrize("linger_s", [math.nan, -1.0, -math.inf, math.inf])
async def test_linger_time_must_be_finite_and_not_negative(factory, linger_s: float) -> None:
    async with serve(factory) as server, RawStream(server.grpc_address) as stream:
        call = pb.Call(open=pb.OpenRequest(linger_s=linger_s))
        error = (await stream.ask(call)).error
        assert (error.code, "linger_s" in error.message) == ("VALIDATION_ERROR", True)
        assert server.core.load.num_sessions == 0


async def test_closing_a_stream_ends_only_sessions_of_that_stream(factory) -> None:
    async with serve(factory) as server, RawStream(server.grpc_address) as stream:
        kept_id = await stream.open()
        async with RawStream(server.grpc_address) as other_stream:
            lost_id = await other_stream.open()
            assert server.core.load.num_sessions == 2
        await wait_for_sessions(server.core, 1)
        reply = await stream.ask(pb.Call(state=pb.StateRequest(session_id=kept_id)))
        assert reply.HasField("state")
        reply = await stream.ask(pb.Call(state=pb.StateRequest(session_id=lost_id)))
        assert "connection that opened it ended" in reply.error.message


async def test_malformed_calls_do_not_affect_other_sessions(factory) -> None:
    async with serve(factory) as server, RawStream(server.grpc_address) as stream:
        session_id = await stream.open(reset=pb.ResetArgs())
        valid_step = pb.StepRequest(session_id=session_id, action_json=b'{"add":1}')
        bad_reset = pb.ResetRequest(session_id=session_id, args=pb.ResetArgs(options_json=b"["))
        empty_step = pb.StepRequest(session_id=session_id)
        calls = [
            pb.Call(call_id=1),
            pb.Call(call_id=2, reset=bad_reset),
            pb.Call(call_id=3, step=empty_step),
            pb.Call(call_id=4, step=valid_step),
        ]
        await stream.call.write(pb.CallBatch(calls=calls))
        replies = {}
        while len(replies) < 4:
            replies |= {reply.call_id: reply for reply in (await stream.call.read()).replies}
        codes = [replies[call_id].error.code for call_id in (1, 2, 3)]
        assert codes == ["UNKNOWN_TYPE", "INVALID_JSON", "VALIDATION_ERROR"]
        assert replies[4].result.reward == 1.0


@pytest.mark.slow
async def test_batches_of_large_results_stay_below_the_message_limit(factory) -> None:
    class PictureEnv(factory):
        def reset(self, *, seed=None):
            pixels = np.zeros((512, 512, 3), np.uint8)
            return Transition(super().reset(seed=seed).observation, tensors={"pixels": pixels})

    async with (
        serve(PictureEnv) as server,
        await AsyncEnvClient.connect(server.grpc_address) as client,
    ):
        results = await asyncio.gather(*(client.open(seed=seed) for seed in range(30)))
        assert all(result.tensors["pixels"].shape == (512, 512, 3) for _, result in results)


@pytest.mark.slow
async def test_stopping_the_server_ends_pending_calls_and_sessions(gate) -> None:
    server = await serve(gate.factory).__aenter__()
    client = await AsyncEnvClient.connect(
        server.grpc_address, ConnectOptions(reconnect_timeout_s=0.2)
    )
    busy_session, _ = await client.open()
    idle_session, _ = await client.open()
    busy_step = asyncio.create_task(busy_session.step({"add": 98}))
    await wait_until(lambda: gate.num_entered)
    await server.stop()
    for call in (busy_step, idle_session.step({"add": 1})):
        with pytest.raises(SessionLostError):
            await call
    await idle_session.close()
    await client.close()
