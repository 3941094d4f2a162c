"""A run ends with the error of whatever fails beside its training loop."""

from __future__ import annotations

import asyncio

import pytest

from ludus.proto.errors import GroupMismatchError
from ludus.trainer.background import Background

pytestmark = pytest.mark.timeout(10)


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
        async with Background() as background:
            background.start(nothing())
            background.start(fail_soon())
            background.start(forever(ended))
            await background.run(forever(ended))
    assert ended == ["forever", "forever"], "nothing outlives it"


async def test_background_tasks_that_end_well_let_the_run_continue_to_its_end() -> None:
    async def train() -> int:
        await asyncio.sleep(0.02)
        return 7

    async with Background() as background:
        background.start(nothing())
        assert await background.run(train()) == 7


async def test_a_task_that_a_task_starts_is_watched_too() -> None:
    with pytest.raises(GroupMismatchError):
        async with Background() as background:

            async def start_another() -> None:
                background.start(fail_soon())

            background.start(start_another())
            await background.run(asyncio.Event().wait())


async def test_the_failure_of_the_run_itself_is_raised_as_it_is() -> None:
    async with Background() as background:
        background.start(forever([]))
        with pytest.raises(GroupMismatchError):
            await background.run(fail_soon())
