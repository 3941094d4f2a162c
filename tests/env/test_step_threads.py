"""Threads for code that may never return: given up, replaced, and let go when they come back."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from ludus.env.threads import StepThreads
from ludus.proto.errors import UnavailableError
from tests.env.polling import eventually


class Held:
    """A call that returns when it is told to."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.let_go: list[object] = []

    def __call__(self) -> str:
        self.entered.set()
        self.go.wait()
        return "late"


async def lose(threads: StepThreads) -> Held:
    held = Held()
    job = threads.start(held, held.let_go.append)
    await eventually(held.entered.is_set)
    assert threads.give_up(job)
    return held


async def answer_of(threads: StepThreads, value: str = "well") -> str:
    return await asyncio.wait_for(threads.run(lambda: value, lambda _: None, 0.0), 60)


async def test_a_thread_that_hangs_is_replaced_and_what_it_returns_late_is_let_go():
    threads = StepThreads(1)
    held = await lose(threads)
    assert await answer_of(threads) == "well"
    held.go.set()
    await eventually(lambda: held.let_go == ["late"])
    assert await answer_of(threads) == "well"
    threads.shut_down()


async def test_a_limit_counts_from_the_moment_at_which_a_thread_begins():
    threads = StepThreads(1)
    held = Held()
    first = threads.start(held, held.let_go.append)
    await eventually(held.entered.is_set)
    behind = asyncio.create_task(threads.run(lambda: "well", lambda _: None, 0.01))
    await asyncio.sleep(0.1)
    assert not behind.done()
    held.go.set()
    assert (await first.future, await behind) == ("late", "well")
    threads.shut_down()


async def test_a_call_beyond_its_limit_is_given_up():
    threads = StepThreads(1)
    held = Held()
    with pytest.raises(TimeoutError):
        await threads.run(held, held.let_go.append, 0.01)
    assert await answer_of(threads) == "well"
    held.go.set()
    await eventually(lambda: held.let_go)
    threads.shut_down()


async def test_when_every_thread_hangs_nothing_waits_and_it_heals_when_one_comes_back():
    threads = StepThreads(1)
    first = await lose(threads)
    held = Held()
    last = threads.start(held, held.let_go.append)
    await eventually(held.entered.is_set)
    waiting = threads.start(lambda: "never", lambda _: None)
    assert threads.unavailable_reason == ""
    assert threads.give_up(last)
    assert "1 threads and their replacements hang" in threads.unavailable_reason
    with pytest.raises(UnavailableError, match="isolation='pool'"):
        await waiting.future
    with pytest.raises(UnavailableError, match="restart the server"):
        threads.start(lambda: "never", lambda _: None)
    first.go.set()
    await eventually(lambda: not threads.unavailable_reason)
    assert await answer_of(threads) == "well"
    held.go.set()
    threads.shut_down()


class HeldAndFailing(Held):
    """Raises when it is told to."""

    def __call__(self) -> str:
        super().__call__()
        raise ValueError("unlucky")


async def abandoned(threads: StepThreads, held: Held) -> None:
    """Returns once the call has ended that nobody waits for any more."""
    waiting = asyncio.create_task(threads.run(held, held.let_go.append, 0.0))
    await eventually(held.entered.is_set)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    held.go.set()
    assert await answer_of(threads) == "well"  # in the same thread, so after it


async def test_what_nobody_waits_for_any_more_is_let_go():
    threads, held = StepThreads(1), Held()
    await abandoned(threads, held)
    await eventually(lambda: held.let_go == ["late"])
    threads.shut_down()


async def test_the_failure_that_nobody_waits_for_is_no_complaint():
    unheard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: unheard.append(context["message"])
    )
    threads = StepThreads(1)
    await abandoned(threads, HeldAndFailing())
    gc.collect()
    assert unheard == []
    threads.shut_down()
