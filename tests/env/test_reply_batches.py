"""Batching of calls and replies on a gRPC stream."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.env.v1 import env_pb2_grpc
from tests.env.counting_env import NUM_STEPS, CountAction
from tests.env.grpc_served import serve_grpc

pytestmark = pytest.mark.timeout(300)
NUM_SESSIONS = 32


async def open_sessions(stream, num_sessions: int) -> list[str]:
    open_calls = [pb.Call(call_id=n + 1, open=pb.OpenRequest()) for n in range(num_sessions)]
    for open_call in open_calls:
        open_call.open.reset.seed = 1
    await stream.write(pb.CallBatch(calls=open_calls))
    replies: list[pb.Reply] = []
    while len(replies) < num_sessions:
        replies.extend((await stream.read()).replies)
    return [reply.open.session_id for reply in replies]


def make_step_batch(call_id: int, session_id: str) -> pb.CallBatch:
    request = pb.StepRequest(session_id=session_id, action_json=b'{"add":1}')
    return pb.CallBatch(calls=[pb.Call(call_id=call_id, step=request)])


async def test_replies_to_single_calls_are_batched_in_order() -> None:
    async with serve_grpc() as server, grpc.aio.insecure_channel(get_target(server)) as channel:
        stream = env_pb2_grpc.EnvServiceStub(channel).Connect()
        session_ids = await open_sessions(stream, NUM_SESSIONS)
        batch_counts = []
        # The steps are repeated because a busy server may read calls one by one.
        for step_index in range(1, NUM_STEPS + 1):
            call_ids = list(range(step_index * 100, step_index * 100 + NUM_SESSIONS))
            for call_id, session_id in zip(call_ids, session_ids, strict=True):
                await stream.write(make_step_batch(call_id, session_id))
            batches = []
            while sum(len(batch.replies) for batch in batches) < NUM_SESSIONS:
                batches.append(await stream.read())
            replies = [reply for batch in batches for reply in batch.replies]
            assert [reply.call_id for reply in replies] == call_ids
            assert all(reply.result.step_index == step_index for reply in replies)
            batch_counts.append(len(batches))
        assert min(batch_counts) < NUM_SESSIONS
        stream.cancel()


async def test_sent_calls_get_replies_after_the_client_stops_sending() -> None:
    async with serve_grpc() as server, grpc.aio.insecure_channel(get_target(server)) as channel:
        stream = env_pb2_grpc.EnvServiceStub(channel).Connect()
        session_ids = await open_sessions(stream, 3)
        await stream.write(pb.CallBatch())  # an empty batch does not end the stream
        for call_id, session_id in enumerate(session_ids, start=10):
            await stream.write(make_step_batch(call_id, session_id))
        await stream.done_writing()
        replies: list[pb.Reply] = []
        while (batch := await stream.read()) is not grpc.aio.EOF:
            replies.extend(batch.replies)
        assert [reply.call_id for reply in replies] == [10, 11, 12]
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_client_can_send_one_call_per_message() -> None:
    async with (
        serve_grpc() as server,
        await AsyncEnvClient.connect(
            server.address, ConnectOptions(max_calls_per_message=1)
        ) as client,
    ):
        sessions = [await client.open(seed=seed) for seed in range(8)]
        stream = client.transport.stream
        initial_num_batches = stream.num_batches_sent
        results = await asyncio.gather(*(s.step(CountAction(add=2)) for s, _ in sessions))
        assert stream.num_batches_sent - initial_num_batches == len(sessions)
        assert [result.step_index for result in results] == [1] * len(sessions)


def get_target(server) -> str:
    return server.address.removeprefix("grpc://")
