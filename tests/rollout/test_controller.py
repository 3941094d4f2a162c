"""A run ends with the error of whatever fails beside its training loop."""

from __future__ import annotations

import asyncio

import pytest

from ludus.proto.errors import GroupMismatchError
from ludus.trainer.controller import _first_failure


async def nothing() -> None:
    """Ends at once, as the watch over a remote environment does."""


async def fail_soon() -> None:
    await asyncio.sleep(0.01)
    raise GroupMismatchError("expected sessions to begin alike")


@pytest.mark.timeout(10)
async def test_a_failure_in_the_background_ends_the_run_though_another_task_ended_well() -> None:
    background = [asyncio.create_task(one) for one in (nothing(), fail_soon())]
    with pytest.raises(GroupMismatchError):
        await _first_failure(asyncio.Event().wait(), background)


@pytest.mark.timeout(10)
async def test_background_tasks_that_end_well_let_the_run_go_on_to_its_end() -> None:
    steps: list[int] = []

    async def train() -> None:
        await asyncio.sleep(0.02)
        steps.append(1)

    await _first_failure(train(), [asyncio.create_task(nothing())])
    assert steps == [1]
