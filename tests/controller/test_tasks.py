"""A run ends with the error of whatever fails beside its training loop."""

from __future__ import annotations

import asyncio

import pytest

from ludus.proto.errors import GroupMismatchError
from ludus.trainer.core.tasks import Tasks, gather_or_cancel

pytestmark = pytest.mark.timeout(60)


async def nothing() -> None:
    """Ends at once, as the watch over remote environments does."""


async def fail_soon() -> None:
    await asyncio.sleep(0.01)
    raise GroupMismatchError("expected sessions to begin alike")


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("forever")


async def test_a_failure_in_the_background_ends_the_run_though_another_task_ended_well() -> None:
    ended: list[str] = []
    with pytest.raises(GroupMismatchError):
        async with Tasks() as tasks:
            tasks.start(nothing())
            tasks.start(fail_soon())
            tasks.start(forever(ended))
            await forever(ended)
    assert ended == ["forever", "forever"], "nothing outlives it"


async def test_background_tasks_that_end_well_let_the_run_continue_to_its_end() -> None:
    async def train() -> int:
        await asyncio.sleep(0.02)
        return 7

    async with Tasks() as tasks:
        tasks.start(nothing())
        assert await train() == 7


async def test_a_task_that_a_task_starts_is_watched_too() -> None:
    with pytest.raises(GroupMismatchError):
        async with Tasks() as tasks:

            async def start_another() -> None:
                tasks.start(fail_soon())

            tasks.start(start_another())
            await asyncio.Event().wait()


async def test_the_failure_of_the_run_itself_is_raised_as_it_is() -> None:
    with pytest.raises(GroupMismatchError):
        async with Tasks() as tasks:
            tasks.start(forever([]))
            await fail_soon()


async def test_a_run_that_is_cancelled_takes_its_tasks_along() -> None:
    ended: list[str] = []

    async def run() -> None:
        async with Tasks() as tasks:
            tasks.start(forever(ended))
            await forever(ended)

    running = asyncio.create_task(run())
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == ["forever", "forever"]


async def test_the_cause_of_a_failure_is_kept() -> None:
    async def fail() -> None:
        raise GroupMismatchError("expected sessions to begin alike") from ValueError("why")

    with pytest.raises(GroupMismatchError) as caught:
        await gather_or_cancel(fail(), forever([]))
    assert str(caught.value.__cause__) == "why"


async def test_results_come_in_the_order_of_their_calls_and_a_failure_waits_for_none() -> None:
    async def later(value: int) -> int:
        await asyncio.sleep(0.01 / value)
        return value

    assert await gather_or_cancel(later(1), later(2)) == [1, 2]
    ended: list[str] = []
    with pytest.raises(GroupMismatchError):
        await gather_or_cancel(forever(ended), fail_soon())
    assert ended == ["forever"]
