"""Batches that a call stream sends, and calls that it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from ludus.env.grpc.call_stream import CallStream
from ludus.env.limits import MAX_BATCH_BYTES, MAX_CALLS_PER_MESSAGE
from ludus.proto.env.v1 import env_pb2 as pb
from ludus.proto.errors import InvalidCallError
from tests.env.polling import run_pending_tasks


class RecordingStream:
    """A stream that records batches and never replies."""

    def __init__(self) -> None:
        self.batches: list[pb.CallBatch] = []
        self._ended = asyncio.Event()

    async def write(self, batch: pb.CallBatch) -> None:
        self.batches.append(batch)

    async def __aiter__(self) -> AsyncIterator[pb.ReplyBatch]:
        await self._ended.wait()
        for batch in ():
            yield batch

    def cancel(self) -> None:
        self._ended.set()


def make_call_filler(num_chars: int):
    """Return a function that fills a call with a text of `num_chars` characters."""

    def fill_call(call: pb.Call) -> None:
        call.step.action_text = "x" * num_chars

    return fill_call


async def write_calls(call_fillers, **options) -> tuple[list[pb.CallBatch], list[Exception]]:
    recorder, errors = RecordingStream(), []
    stream = CallStream(recorder, "a server", timeout_s=600.0, **options)
    for fill_call in call_fillers:
        try:
            stream.ignore_failure(stream.start_call(fill_call))
        except (InvalidCallError, ValueError) as error:
            errors.append(error)
    await run_pending_tasks()
    await stream.close()
    return recorder.batches, errors


async def test_calls_are_split_into_batches_below_the_size_limit() -> None:
    batches, _ = await write_calls([make_call_filler(MAX_BATCH_BYTES // 3)] * 7)
    assert [len(batch.calls) for batch in batches] == [2, 2, 2, 1]
    assert all(batch.ByteSize() <= MAX_BATCH_BYTES for batch in batches)
    assert [call.call_id for batch in batches for call in batch.calls] == list(range(1, 8))


async def test_large_call_gets_a_separate_batch() -> None:
    fill_small_call, fill_large_call = make_call_filler(1), make_call_filler(2 * MAX_BATCH_BYTES)
    batches, _ = await write_calls([fill_small_call, fill_large_call, fill_small_call])
    assert [len(batch.calls) for batch in batches] == [1, 1, 1]


@pytest.mark.parametrize("num_extra", [0, 1])
async def test_number_of_calls_per_message_is_limited(num_extra: int) -> None:
    batches, _ = await write_calls([make_call_filler(1)] * (MAX_CALLS_PER_MESSAGE + num_extra))
    assert [len(batch.calls) for batch in batches] == [MAX_CALLS_PER_MESSAGE, *[1] * num_extra]


async def test_refused_calls_leave_no_data_in_the_batch() -> None:
    def fill_and_raise(call: pb.Call) -> None:
        call.step.action_text = "incomplete"
        raise ValueError("no action")

    call_fillers = [make_call_filler(1), make_call_filler(200), fill_and_raise, make_call_filler(2)]
    batches, errors = await write_calls(call_fillers, max_call_bytes=100)
    assert [call.step.action_text for batch in batches for call in batch.calls] == ["x", "xx"]
    assert [type(error) for error in errors] == [InvalidCallError, ValueError]
    assert "a call to a server must have at most 100 bytes, got" in str(errors[0])
