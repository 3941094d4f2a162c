"""Threads for code that may never return: abandoned, replaced, and released if they return."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from ludus.env.sessions.threads import StepThreads
from ludus.proto.errors import UnavailableError
from tests.env.polling import wait_until


class Held:
    """A call that returns on request."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.let_go: list[object] = []

    def __call__(self) -> str:
        self.entered.set()
        self.go.wait()
        return "late"


async def lose(threads: StepThreads) -> Held:
    held_call = Held()
    job = threads.start(held_call, held_call.let_go.append)
    await wait_until(held_call.entered.is_set)
    assert threads.give_up(job)
    return held_call


async def run_call(threads: StepThreads, value: str = "well") -> str:
    return await asyncio.wait_for(threads.run(lambda: value, lambda _: None, 0.0), 60)


async def test_hanging_thread_is_replaced_and_its_late_result_released() -> None:
    threads = StepThreads(1)
    held_call = await lose(threads)
    assert await run_call(threads) == "well"
    held_call.go.set()
    await wait_until(lambda: held_call.let_go == ["late"])
    assert await run_call(threads) == "well"
    threads.shut_down()


async def test_time_limit_starts_with_the_thread() -> None:
    threads = StepThreads(1)
    held_call = Held()
    first = threads.start(held_call, held_call.let_go.append)
    await wait_until(held_call.entered.is_set)
    behind = asyncio.create_task(threads.run(lambda: "well", lambda _: None, 0.01))
    await asyncio.sleep(0.1)
    assert not behind.done()
    held_call.go.set()
    assert (await first.future, await behind) == ("late", "well")
    threads.shut_down()


async def test_a_call_beyond_its_limit_is_given_up() -> None:
    threads = StepThreads(1)
    held_call = Held()
    with pytest.raises(TimeoutError):
        await threads.run(held_call, held_call.let_go.append, 0.01)
    assert await run_call(threads) == "well"
    held_call.go.set()
    await wait_until(lambda: held_call.let_go)
    threads.shut_down()


async def test_calls_fail_while_all_threads_hang_and_work_again_later() -> None:
    threads = StepThreads(1)
    first = await lose(threads)
    held_call = Held()
    last = threads.start(held_call, held_call.let_go.append)
    await wait_until(held_call.entered.is_set)
    waiting = threads.start(lambda: "never", lambda _: None)
    assert threads.unavailable_reason == ""
    assert threads.give_up(last)
    assert "1 threads and their replacements hang" in threads.unavailable_reason
    with pytest.raises(UnavailableError, match="isolation='pool'"):
        await waiting.future
    with pytest.raises(UnavailableError, match="restart the server"):
        threads.start(lambda: "never", lambda _: None)
    first.go.set()
    await wait_until(lambda: not threads.unavailable_reason)
    assert await run_call(threads) == "well"
    held_call.go.set()
    threads.shut_down()


class HeldAndFailing(Held):
    """A call that raises an error on request."""

    def __call__(self) -> str:
        super().__call__()
        raise ValueError("unlucky")


async def abandoned_call(threads: StepThreads, held_call: Held) -> None:
    """Return when the abandoned call has ended."""
    waiting = asyncio.create_task(threads.run(held_call, held_call.let_go.append, 0.0))
    await wait_until(held_call.entered.is_set)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    held_call.go.set()
    assert await run_call(threads) == "well"  # runs in the same thread, after the released result


async def test_result_of_a_cancelled_call_is_released() -> None:
    threads, held_call = StepThreads(1), Held()
    await abandoned_call(threads, held_call)
    await wait_until(lambda: held_call.let_go == ["late"])
    threads.shut_down()


async def test_error_of_a_cancelled_call_is_not_logged() -> None:
    unheard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: unheard.append(context["message"])
    )
    threads = StepThreads(1)
    await abandoned_call(threads, HeldAndFailing())
    gc.collect()
    assert unheard == []
    threads.shut_down()
