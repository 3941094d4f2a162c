"""Every wait has a time limit and a description in its log and error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray

from ludus.proto.config import LanguageModelRun, RayWeightStore
from ludus.proto.errors import LearnerLostError
from ludus.trainer.actors.learner import LearnerGroup
from ludus.trainer.actors.placement import place_on_one_machine
from ludus.trainer.core.tasks import wait_with_limit
from ludus.trainer.core.types import Coefficients

pytestmark = pytest.mark.timeout(60)

STEP_ARGUMENTS = None, Coefficients(1e-3, entropy=0.0, kl=0.0)


async def wait_forever(ended_tasks: list[str]) -> None:
    """Wait until cancelled, then append to `ended_tasks`."""
    try:
        await asyncio.Event().wait()
    finally:
        ended_tasks.append("forever")


async def test_wait_beyond_the_limit_is_cancelled_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended_tasks: list[str] = []
    with pytest.raises(TimeoutError, match=r"waited for a task longer than limit = 0\.01 s"):
        await wait_with_limit(wait_forever(ended_tasks), "a task", timeout_s=0.01, setting="limit")
    await asyncio.sleep(0)
    assert ended_tasks == ["forever"]


async def test_long_wait_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("ludus.trainer.core.tasks.LOG_INTERVAL_S", 0.001)
    with pytest.raises(TimeoutError):
        await wait_with_limit(wait_forever([]), "a task", timeout_s=0.02, setting="limit")
    assert "waiting for a task" in caplog.text


async def test_result_or_error_within_the_limit_is_unchanged() -> None:
    async def fail() -> None:
        raise TimeoutError("the task failed")

    assert await wait_with_limit(asyncio.sleep(0, 7), "a task", timeout_s=60, setting="limit") == 7
    with pytest.raises(TimeoutError, match=r"^the task failed$"):
        await wait_with_limit(fail(), "a task", timeout_s=60, setting="limit")


async def test_cancelled_wait_cancels_the_awaited_task() -> None:
    ended_tasks: list[str] = []
    waiting_task = asyncio.create_task(
        wait_with_limit(wait_forever(ended_tasks), "a task", timeout_s=60, setting="limit")
    )
    await asyncio.sleep(0.01)
    waiting_task.cancel()
    await asyncio.gather(waiting_task, return_exceptions=True)
    assert ended_tasks == ["forever"]


class SimulatedRank:
    """A rank that never responds to one of its methods."""

    def __init__(self, hanging_method: str) -> None:
        self._hanging_method = hanging_method

    def __getattr__(self, method: str) -> Any:
        return SimulatedCall(is_hanging=method == self._hanging_method)


class SimulatedCall:
    """A remote method of a rank."""

    def __init__(self, *, is_hanging: bool) -> None:
        self._is_hanging = is_hanging

    async def remote(self, *_: object) -> str:
        """Return a response, or wait forever."""
        if self._is_hanging:
            await asyncio.Event().wait()
        return "answer"


def make_learner_group(
    monkeypatch: pytest.MonkeyPatch, hanging_method: str
) -> tuple[LearnerGroup, list[Any]]:
    """Return a learner with two simulated ranks, and the list of its killed ranks."""
    killed_ranks: list[Any] = []

    class Options:
        def __init__(self, **_: object) -> None:
            pass

        def __call__(self, _: type) -> Options:
            return self

        def remote(self, *_: object) -> SimulatedRank:
            return SimulatedRank(hanging_method)

    monkeypatch.setattr(ray, "remote", Options)
    monkeypatch.setattr(ray, "kill", killed_ranks.append)
    settings = {
        "learner": {"num_ranks": 2},
        "placement": {"start_timeout_s": 60 if hanging_method == "train_step" else 0.25},
        "training": {"learner_timeout_s": 0.25},
    }
    run = LanguageModelRun.model_validate(settings)
    return LearnerGroup(run, place_on_one_machine(run)), killed_ranks


async def start_ranks(group: LearnerGroup) -> None:
    await group.start("model", RayWeightStore())


@pytest.mark.parametrize(
    ("hanging_method", "description"),
    [
        ("reply", "the learner's ranks to start"),
        ("rendezvous", "to return its address"),
        ("start", "to connect and load the model"),
    ],
)
async def test_learner_that_does_not_start_is_lost(
    monkeypatch: pytest.MonkeyPatch, hanging_method: str, description: str
) -> None:
    group, killed_ranks = make_learner_group(monkeypatch, hanging_method)
    with pytest.raises(
        LearnerLostError, match=rf"{description}.*placement\.start_timeout_s = 0\.25"
    ):
        await start_ranks(group)
    assert len(killed_ranks) == 2


async def test_hanging_learner_is_lost_until_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, killed_ranks = make_learner_group(monkeypatch, "train_step")
    await start_ranks(group)
    with pytest.raises(
        LearnerLostError, match=r"'train_step'.*training\.learner_timeout_s = 0\.25"
    ):
        await group.train_step(*STEP_ARGUMENTS)
    assert len(killed_ranks) == 2
    with pytest.raises(LearnerLostError, match="have not been restarted"):
        await group.score_completions([])
