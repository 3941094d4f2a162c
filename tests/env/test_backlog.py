"""Limits on the pending calls and replies of one stream, which do not affect other streams."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from ludus.env.grpc import backlog as backlog_module
from ludus.env.grpc import call_server as call_server_module
from ludus.env.grpc.backlog import Backlog, CallReader, ReplyWriter
from ludus.env.limits import MAX_BATCH_BYTES, MAX_CALLS_PER_MESSAGE
from ludus.env.messages.wire_format import check_num_fields
from ludus.proto.env.v1 import env_pb2 as pb
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.polling import run_pending_tasks
from tests.env.raw_stream import RawStream
from tests.env.served import serve
from tests.gateway.gateways import run_gateway

FACTORIES = [CountingEnv, ThreadedCountingEnv]


def states(session_id: str, num_calls: int) -> pb.CallBatch:
    state = pb.StateRequest(session_id=session_id)
    return pb.CallBatch(calls=[pb.Call(call_id=n + 1, state=state) for n in range(num_calls)])


async def count_results(stream: RawStream, num_calls: int) -> int:
    """Read the replies and return the number of results among them."""
    replies: list[pb.Reply] = []
    while len(replies) < num_calls:
        replies.extend((await stream.call.read()).replies)
    return sum(reply.HasField("state") for reply in replies)


async def check_message_limit(address: str) -> None:
    async with RawStream(address) as stream, RawStream(address) as other:
        own_id, other_id = await stream.open(), await other.open()
        await stream.call.write(states(own_id, MAX_CALLS_PER_MESSAGE))
        assert await count_results(stream, MAX_CALLS_PER_MESSAGE) == MAX_CALLS_PER_MESSAGE
        await stream.call.write(states(own_id, MAX_CALLS_PER_MESSAGE + 1))
        with pytest.raises(
            grpc.aio.AioRpcError, match="at most 1024 calls in one message"
        ) as ended:
            await stream.call.read()
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await other.call.write(states(other_id, 1))
        assert await count_results(other, 1) == 1


@pytest.mark.parametrize("factory", FACTORIES)
async def test_a_message_with_too_many_calls_ends_its_own_stream_at_a_server(factory) -> None:
    async with serve(factory) as server:
        await check_message_limit(server.grpc_address)


async def test_a_message_with_too_many_calls_ends_its_own_stream_at_a_gateway() -> None:
    async with run_gateway() as (gateway, _):
        await check_message_limit(gateway.grpc_address)


async def test_others_have_their_turn_while_a_message_of_cheap_calls_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_server_module, "MAX_TURN_S", 0.0)
    num_turns, call_turns = 0, []

    class RecordingEnv(CountingEnv):
        @property
        def state(self):
            call_turns.append(num_turns)
            return super().state

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async with serve(RecordingEnv) as server, RawStream(server.grpc_address) as stream:
        session_id = await stream.open(reset=pb.ResetArgs(seed=1))
        other = asyncio.create_task(take_turns())
        await stream.call.write(states(session_id, 100))
        assert await count_results(stream, 100) == 100
        other.cancel()
    assert call_turns == sorted(set(call_turns)), "another task ran between any two calls"


async def test_a_stream_is_read_no_further_than_so_many_bytes_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog_module, "MAX_BYTES_AHEAD", 100)
    num_read = 0

    async def batches():
        nonlocal num_read
        for _ in range(10):
            num_read += 1
            call = pb.Call(step=pb.StepRequest(action_text="x" * 60))
            yield pb.CallBatch(calls=[call])

    ahead = CallReader(batches())
    reading = asyncio.create_task(ahead.read())
    await run_pending_tasks()
    assert num_read == 2
    assert len(await ahead.take_calls(waits_for_more=False)) == 2
    await run_pending_tasks()
    assert num_read == 4
    reading.cancel()


async def test_who_does_not_read_its_answers_is_not_read_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog_module, "MAX_BYTES_AHEAD", 100)
    reads = asyncio.Event()
    written: list[pb.ReplyBatch] = []

    async def write(batch: pb.ReplyBatch) -> None:
        await reads.wait()
        written.append(batch)

    replies = ReplyWriter(write)
    for _ in range(3):
        replies.put(pb.Reply(state=pb.StateResponse(state_json=b"x" * 60)))
    writing = asyncio.create_task(replies.write_forever())
    waiting = asyncio.create_task(replies.wait_for_room())
    await run_pending_tasks()
    assert not waiting.done()
    reads.set()
    await waiting
    await replies.flush()
    assert sum(len(batch.replies) for batch in written) == 3
    writing.cancel()


async def test_answers_are_cut_before_the_one_that_would_make_a_message_too_large() -> None:
    written: list[int] = []

    async def write(batch: pb.ReplyBatch) -> None:
        written.append(len(batch.replies))

    replies = ReplyWriter(write)
    for _ in range(5):
        replies.put(pb.Reply(state=pb.StateResponse(state_json=b"x" * (MAX_BATCH_BYTES // 2 - 99))))
    await replies.flush()
    assert written == [2, 2, 1]


async def test_a_backlog_has_room_again_when_enough_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog_module, "MAX_CALLS_AHEAD", 2)
    backlog = Backlog()
    backlog.add(1)
    await backlog.wait_for_room()
    backlog.add(1)
    waiting = asyncio.create_task(backlog.wait_for_room())
    await run_pending_tasks()
    assert not waiting.done()
    backlog.remove(1)
    await waiting


def embedded(field: int, content: bytes) -> bytes:
    """Return a field of protobuf's wire format that contains a message."""
    size, head = len(content), bytes([field << 3 | 2])
    while size >= 0x80:
        head, size = head + bytes([size & 0x7F | 0x80]), size >> 7
    return head + bytes([size]) + content


MANY = 300_000
STEP = pb.Call.DESCRIPTOR.fields_by_name["step"].number
TENSORS = pb.StepRequest.DESCRIPTOR.fields_by_name["tensors"].number
SWELLING = {
    "calls": embedded(1, b"") * MANY,
    "tensors": embedded(1, embedded(STEP, embedded(TENSORS, b"") * MANY)),
    "oneofs": embedded(1, (embedded(2, b"") + embedded(3, b"")) * MANY),
    "numbers": embedded(1, b"\x08\x01" * MANY),
}


async def send_refused_message(message: bytes, address: str) -> grpc.aio.AioRpcError:
    """Send a message and return the error that ends its stream."""
    async with grpc.aio.insecure_channel(address.removeprefix("grpc://")) as channel:
        stream = channel.stream_stream("/ludus.env.v1.EnvService/Connect")()
        await stream.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await stream.read() is not grpc.aio.EOF:
                pass
    return caught.value


@pytest.mark.parametrize("server_kind", ["server", "gateway"])
async def test_a_message_that_would_swell_in_memory_is_refused_before_it_is_parsed(
    server_kind: str,
) -> None:
    async with run_gateway() as (gateway, (server,)):
        address = (gateway if server_kind == "gateway" else server).grpc_address
        async with RawStream(address) as other:
            own_id = await other.open()
            for message in SWELLING.values():
                refused = await send_refused_message(message, address)
                assert "at most 65536 fields in one message" in (refused.details() or "")
                assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
            await other.call.write(states(own_id, 1))
            assert await count_results(other, 1) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", SWELLING)
def test_fields_are_counted_as_they_are_nested(name: str) -> None:
    message = SWELLING[name]
    check_num_fields(pb.CallBatch, message, 2 * MANY + 2)
    with pytest.raises(ValueError, match="fields in one message, got more"):
        check_num_fields(pb.CallBatch, message, MANY - 1)


def test_what_is_no_message_is_refused_as_such() -> None:
    padding = b"\0" * 300_000
    for message in (embedded(1, padding)[:-1], embedded(1, b"\x80" * 300_000), b"\x0b" + padding):
        with pytest.raises(ValueError, match=r"incomplete|64 bits|groups"):
            check_num_fields(pb.CallBatch, message, MANY * 10)
            pb.CallBatch.FromString(message)


def test_a_large_message_of_few_fields_is_let_through() -> None:
    steps = pb.CallBatch(calls=[pb.Call(step=pb.StepRequest(action_text="x" * 400_000))])
    check_num_fields(pb.CallBatch, steps.SerializeToString(), 4)
