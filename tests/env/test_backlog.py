"""Limits on the pending calls and replies of a stream, which do not affect other streams."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from ludus.env.grpc import backlog as backlog_module
from ludus.env.grpc import call_server as call_server_module
from ludus.env.grpc.backlog import Backlog, CallReader, ReplyWriter
from ludus.env.limits import MAX_BATCH_BYTES, MAX_CALL_FIELDS, MAX_CALLS_PER_MESSAGE
from ludus.env.messages.wire_format import check_num_fields
from ludus.proto.env.v1 import env_pb2 as pb
from tests.env.counting_env import CountingEnv, ThreadedCountingEnv
from tests.env.polling import run_pending_tasks
from tests.env.raw_stream import RawStream
from tests.env.served import serve
from tests.gateway.gateways import run_gateway

FACTORIES = [CountingEnv, ThreadedCountingEnv]


def make_state_calls(session_id: str, num_calls: int) -> pb.CallBatch:
    request = pb.StateRequest(session_id=session_id)
    return pb.CallBatch(calls=[pb.Call(call_id=i + 1, state=request) for i in range(num_calls)])


async def count_results(stream: RawStream, num_calls: int) -> int:
    """Read the replies and return the number of results among them."""
    replies: list[pb.Reply] = []
    while len(replies) < num_calls:
        replies.extend((await stream.call.read()).replies)
    return sum(reply.HasField("state") for reply in replies)


async def assert_message_limit(address: str) -> None:
    async with RawStream(address) as stream, RawStream(address) as other_stream:
        session_id, other_id = await stream.open(), await other_stream.open()
        await stream.call.write(make_state_calls(session_id, MAX_CALLS_PER_MESSAGE))
        assert await count_results(stream, MAX_CALLS_PER_MESSAGE) == MAX_CALLS_PER_MESSAGE
        await stream.call.write(make_state_calls(session_id, MAX_CALLS_PER_MESSAGE + 1))
        with pytest.raises(
            grpc.aio.AioRpcError, match="at most 1024 calls in one message"
        ) as error_info:
            await stream.call.read()
        assert error_info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await other_stream.call.write(make_state_calls(other_id, 1))
        assert await count_results(other_stream, 1) == 1


@pytest.mark.slow
@pytest.mark.parametrize("factory", FACTORIES)
async def test_server_ends_only_the_stream_with_too_many_calls_in_a_message(factory) -> None:
    async with serve(factory) as server:
        await assert_message_limit(server.grpc_address)


@pytest.mark.slow
async def test_gateway_ends_only_the_stream_with_too_many_calls_in_a_message() -> None:
    async with run_gateway() as (gateway, _):
        await assert_message_limit(gateway.grpc_address)


async def test_many_calls_in_one_message_do_not_block_other_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_server_module, "MAX_TURN_S", 0.0)
    num_turns, turns_of_calls = 0, []

    class RecordingEnv(CountingEnv):
        @property
        def state(self):
            turns_of_calls.append(num_turns)
            return super().state

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async with serve(RecordingEnv) as server, RawStream(server.grpc_address) as stream:
        session_id = await stream.open(reset=pb.ResetArgs(seed=1))
        counter_task = asyncio.create_task(take_turns())
        await stream.call.write(make_state_calls(session_id, 100))
        assert await count_results(stream, 100) == 100
        counter_task.cancel()
    assert turns_of_calls == sorted(set(turns_of_calls)), "no other task ran between two calls"


async def test_number_of_bytes_read_ahead_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog_module, "MAX_BYTES_AHEAD", 100)
    num_batches_read = 0

    async def generate_batches():
        nonlocal num_batches_read
        for _ in range(10):
            num_batches_read += 1
            call = pb.Call(step=pb.StepRequest(action_text="x" * 60))
            yield pb.CallBatch(calls=[call])

    call_reader = CallReader(generate_batches())
    read_task = asyncio.create_task(call_reader.read())
    await run_pending_tasks()
    assert num_batches_read == 2
    assert len(await call_reader.take_calls(waits_for_more=False)) == 2
    await run_pending_tasks()
    assert num_batches_read == 4
    read_task.cancel()


async def test_writer_has_no_room_until_the_client_reads_replies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog_module, "MAX_BYTES_AHEAD", 100)
    may_write = asyncio.Event()
    batches: list[pb.ReplyBatch] = []

    async def write(batch: pb.ReplyBatch) -> None:
        await may_write.wait()
        batches.append(batch)

    writer = ReplyWriter(write)
    for _ in range(3):
        writer.put(pb.Reply(state=pb.StateResponse(state_json=b"x" * 60)))
    write_task = asyncio.create_task(writer.write_forever())
    wait_task = asyncio.create_task(writer.wait_for_room())
    await run_pending_tasks()
    assert not wait_task.done()
    may_write.set()
    await wait_task
    await writer.flush()
    assert sum(len(batch.replies) for batch in batches) == 3
    write_task.cancel()


async def test_replies_are_split_into_batches_below_the_size_limit() -> None:
    batch_sizes: list[int] = []

    async def write(batch: pb.ReplyBatch) -> None:
        batch_sizes.append(len(batch.replies))

    writer = ReplyWriter(write)
    for _ in range(5):
        writer.put(pb.Reply(state=pb.StateResponse(state_json=b"x" * (MAX_BATCH_BYTES // 2 - 99))))
    await writer.flush()
    assert batch_sizes == [2, 2, 1]


async def test_backlog_has_room_again_after_calls_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog_module, "MAX_CALLS_AHEAD", 2)
    backlog = Backlog()
    backlog.add(1)
    await backlog.wait_for_room()
    backlog.add(1)
    wait_task = asyncio.create_task(backlog.wait_for_room())
    await run_pending_tasks()
    assert not wait_task.done()
    backlog.remove(1)
    await wait_task


def encode_field(field: int, content: bytes) -> bytes:
    """Return a length-delimited field in protobuf's wire format."""
    size, header = len(content), bytes([field << 3 | 2])
    while size >= 0x80:
        header, size = header + bytes([size & 0x7F | 0x80]), size >> 7
    return header + bytes([size]) + content


NUM_FIELDS = 300_000
STEP_FIELD = pb.Call.DESCRIPTOR.fields_by_name["step"].number
TENSORS_FIELD = pb.StepRequest.DESCRIPTOR.fields_by_name["tensors"].number
LARGE_MESSAGES = {
    "calls": encode_field(1, b"") * NUM_FIELDS,
    "tensors": encode_field(
        1, encode_field(STEP_FIELD, encode_field(TENSORS_FIELD, b"") * NUM_FIELDS)
    ),
    "oneofs": encode_field(1, (encode_field(2, b"") + encode_field(3, b"")) * NUM_FIELDS),
    "numbers": encode_field(1, b"\x08\x01" * NUM_FIELDS),
}


async def send_refused_message(message: bytes, address: str) -> grpc.aio.AioRpcError:
    """Send a message on a new stream, and return the error that ends the stream."""
    async with grpc.aio.insecure_channel(address.removeprefix("grpc://")) as channel:
        stream = channel.stream_stream("/ludus.env.v1.EnvService/Connect")()
        await stream.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as error_info:
            while await stream.read() is not grpc.aio.EOF:
                pass
    return error_info.value


@pytest.mark.slow
@pytest.mark.parametrize("server_kind", ["server", "gateway"])
async def test_message_with_too_many_fields_is_refused_before_parsing(
    server_kind: str,
) -> None:
    async with run_gateway() as (gateway, (server,)):
        address = (gateway if server_kind == "gateway" else server).grpc_address
        async with RawStream(address) as other_stream:
            session_id = await other_stream.open()
            for message in LARGE_MESSAGES.values():
                error = await send_refused_message(message, address)
                assert "at most 65536 fields in one message" in (error.details() or "")
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            await other_stream.call.write(make_state_calls(session_id, 1))
            assert await count_results(other_stream, 1) == 1


def test_smallest_message_with_too_many_fields_is_refused() -> None:
    check_num_fields(pb.CallBatch, encode_field(1, b"") * MAX_CALL_FIELDS, MAX_CALL_FIELDS)
    with pytest.raises(ValueError, match="at most 65536 fields in one message, got more"):
        check_num_fields(
            pb.CallBatch, encode_field(1, b"") * (MAX_CALL_FIELDS + 1), MAX_CALL_FIELDS
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE_MESSAGES)
def test_field_count_includes_nested_fields(name: str) -> None:
    message = LARGE_MESSAGES[name]
    check_num_fields(pb.CallBatch, message, 2 * NUM_FIELDS + 2)
    with pytest.raises(ValueError, match="fields in one message, got more"):
        check_num_fields(pb.CallBatch, message, NUM_FIELDS - 1)


def test_malformed_messages_raise_value_error() -> None:
    padding = b"\0" * 300_000
    for message in (
        encode_field(1, padding)[:-1],
        encode_field(1, b"\x80" * 300_000),
        b"\x0b" + padding,
    ):
        with pytest.raises(ValueError, match=r"incomplete|64 bits|groups"):
            check_num_fields(pb.CallBatch, message, NUM_FIELDS * 10)
            pb.CallBatch.FromString(message)


def test_large_message_with_few_fields_is_accepted() -> None:
    batch = pb.CallBatch(calls=[pb.Call(step=pb.StepRequest(action_text="x" * 400_000))])
    check_num_fields(pb.CallBatch, batch.SerializeToString(), 4)
