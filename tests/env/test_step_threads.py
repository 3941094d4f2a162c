"""Threads for calls that may never return, and the release of late results."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from ludus.env.sessions.threads import StepThreads
from ludus.proto.errors import UnavailableError
from tests.env.polling import wait_until


class BlockingCall:
    """A call that blocks until `return_event` is set."""

    def __init__(self) -> None:
        self.start_event, self.return_event = threading.Event(), threading.Event()
        self.released_results: list[object] = []

    def __call__(self) -> str:
        self.start_event.set()
        self.return_event.wait()
        return "late"


async def abandon_call(threads: StepThreads) -> BlockingCall:
    call = BlockingCall()
    job = threads.submit(call, call.released_results.append)
    await wait_until(call.start_event.is_set)
    assert threads.give_up(job)
    return call


async def run_call(threads: StepThreads, result: str = "well") -> str:
    return await asyncio.wait_for(threads.run(lambda: result, lambda _: None, 0.0), 60)


async def test_hanging_thread_is_replaced_and_late_result_is_released() -> None:
    threads = StepThreads(1)
    call = await abandon_call(threads)
    assert await run_call(threads) == "well"
    call.return_event.set()
    await wait_until(lambda: call.released_results == ["late"])
    assert await run_call(threads) == "well"
    threads.shut_down()


async def test_time_limit_excludes_waiting_for_a_thread() -> None:
    threads = StepThreads(1)
    call = BlockingCall()
    first_job = threads.submit(call, call.released_results.append)
    await wait_until(call.start_event.is_set)
    waiting_task = asyncio.create_task(threads.run(lambda: "well", lambda _: None, 0.01))
    await asyncio.sleep(0.1)
    assert not waiting_task.done()
    call.return_event.set()
    assert (await first_job.future, await waiting_task) == ("late", "well")
    threads.shut_down()


async def test_call_over_the_time_limit_is_abandoned() -> None:
    threads = StepThreads(1)
    call = BlockingCall()
    with pytest.raises(TimeoutError):
        await threads.run(call, call.released_results.append, 0.01)
    assert await run_call(threads) == "well"
    call.return_event.set()
    await wait_until(lambda: call.released_results)
    threads.shut_down()


async def test_calls_fail_while_all_threads_hang_and_succeed_afterwards() -> None:
    threads = StepThreads(1)
    first_call = await abandon_call(threads)
    call = BlockingCall()
    last_job = threads.submit(call, call.released_results.append)
    await wait_until(call.start_event.is_set)
    waiting_job = threads.submit(lambda: "never", lambda _: None)
    assert threads.unavailable_reason == ""
    assert threads.give_up(last_job)
    assert "1 threads and their replacements hang" in threads.unavailable_reason
    with pytest.raises(UnavailableError, match="isolation='pool'"):
        await waiting_job.future
    with pytest.raises(UnavailableError, match="restart the server"):
        threads.submit(lambda: "never", lambda _: None)
    first_call.return_event.set()
    await wait_until(lambda: not threads.unavailable_reason)
    assert await run_call(threads) == "well"
    call.return_event.set()
    threads.shut_down()


class FailingCall(BlockingCall):
    """A call that blocks until `return_event` is set, and then raises an error."""

    def __call__(self) -> str:
        super().__call__()
        raise ValueError("unlucky")


async def cancel_call(threads: StepThreads, call: BlockingCall) -> None:
    """Start the call, cancel it, and wait until its thread is free."""
    task = asyncio.create_task(threads.run(call, call.released_results.append, 0.0))
    await wait_until(call.start_event.is_set)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    call.return_event.set()
    assert await run_call(threads) == "well"  # runs in the same thread after the call


async def test_result_of_a_cancelled_call_is_released() -> None:
    threads, call = StepThreads(1), BlockingCall()
    await cancel_call(threads, call)
    await wait_until(lambda: call.released_results == ["late"])
    threads.shut_down()


async def test_error_of_a_cancelled_call_is_not_logged() -> None:
    log_messages: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: log_messages.append(context["message"])
    )
    threads = StepThreads(1)
    await cancel_call(threads, FailingCall())
    gc.collect()
    assert log_messages == []
    threads.shut_down()
