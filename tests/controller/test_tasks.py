"""A failed background task cancels its block, which then raises the task's error."""

from __future__ import annotations

import asyncio

import pytest

from ludus.proto.errors import GroupMismatchError
from ludus.trainer.core.tasks import CancellingTaskGroup, gather_or_cancel

pytestmark = pytest.mark.timeout(60)


async def return_immediately() -> None:
    """Return without waiting."""


async def fail_soon() -> None:
    await asyncio.sleep(0.01)
    raise GroupMismatchError("sessions started differently")


async def wait_forever(ended_tasks: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended_tasks.append("forever")


async def test_background_failure_cancels_the_block() -> None:
    ended_tasks: list[str] = []
    with pytest.raises(GroupMismatchError):
        async with CancellingTaskGroup() as tasks:
            tasks.start(return_immediately())
            tasks.start(fail_soon())
            tasks.start(wait_forever(ended_tasks))
            await wait_forever(ended_tasks)
    assert ended_tasks == ["forever", "forever"], "a task outlived the block"


async def test_finished_background_tasks_do_not_end_the_block() -> None:
    async def train() -> int:
        await asyncio.sleep(0.02)
        return 7

    async with CancellingTaskGroup() as tasks:
        tasks.start(return_immediately())
        assert await train() == 7


async def test_task_started_by_a_task_is_supervised() -> None:
    with pytest.raises(GroupMismatchError):
        async with CancellingTaskGroup() as tasks:

            async def start_another() -> None:
                tasks.start(fail_soon())

            tasks.start(start_another())
            await asyncio.Event().wait()


async def test_failure_of_the_block_is_raised_unchanged() -> None:
    with pytest.raises(GroupMismatchError):
        async with CancellingTaskGroup() as tasks:
            tasks.start(wait_forever([]))
            await fail_soon()


async def test_cancelled_block_cancels_its_tasks() -> None:
    ended_tasks: list[str] = []

    async def run() -> None:
        async with CancellingTaskGroup() as tasks:
            tasks.start(wait_forever(ended_tasks))
            await wait_forever(ended_tasks)

    run_task = asyncio.create_task(run())
    await asyncio.sleep(0.01)
    run_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run_task
    assert ended_tasks == ["forever", "forever"]


async def test_failure_keeps_its_cause() -> None:
    async def fail() -> None:
        raise GroupMismatchError("sessions started differently") from ValueError("the cause")

    with pytest.raises(GroupMismatchError) as error_info:
        await gather_or_cancel(fail(), wait_forever([]))
    assert str(error_info.value.__cause__) == "the cause"


async def test_gather_keeps_the_order_and_cancels_after_a_failure() -> None:
    async def return_later(number: int) -> int:
        await asyncio.sleep(0.01 / number)
        return number

    assert await gather_or_cancel(return_later(1), return_later(2)) == [1, 2]
    ended_tasks: list[str] = []
    with pytest.raises(GroupMismatchError):
        await gather_or_cancel(wait_forever(ended_tasks), fail_soon())
    assert ended_tasks == ["forever"]
