"""Every wait has a limit and a description."""

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

STEP = None, Coefficients(1e-3, entropy=0.0, kl=0.0)


async def forever(ended: list[str]) -> None:
    """Wait until cancelled, and record the end."""
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("forever")


async def test_wait_beyond_the_limit_is_cancelled_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[str] = []
    with pytest.raises(TimeoutError, match=r"waited for a friend longer than patience = 0\.01 s"):
        await wait_with_limit(forever(ended), "a friend", timeout_s=0.01, setting="patience")
    await asyncio.sleep(0)
    assert ended == ["forever"]


async def test_long_wait_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("ludus.trainer.core.tasks.LOG_INTERVAL_S", 0.001)
    with pytest.raises(TimeoutError):
        await wait_with_limit(forever([]), "a friend", timeout_s=0.02, setting="patience")
    assert "waiting for a friend" in caplog.text


async def test_result_or_failure_within_the_limit_is_passed_on() -> None:
    async def fail() -> None:
        raise TimeoutError("its own")

    assert await wait_with_limit(asyncio.sleep(0, 7), "it", timeout_s=60, setting="patience") == 7
    with pytest.raises(TimeoutError, match=r"^its own$"):
        await wait_with_limit(fail(), "it", timeout_s=60, setting="patience")


async def test_cancelled_wait_cancels_the_awaited_task() -> None:
    ended: list[str] = []
    waiting = asyncio.create_task(
        wait_with_limit(forever(ended), "a friend", timeout_s=60, setting="patience")
    )
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert ended == ["forever"]


class SimulatedRank:
    """A rank that never responds to one of its methods."""

    def __init__(self, hangs_in: str) -> None:
        self._hangs_in = hangs_in

    def __getattr__(self, method: str) -> Any:
        return SimulatedCall(hangs=method == self._hangs_in)


class SimulatedCall:
    """A call of a rank."""

    def __init__(self, *, hangs: bool) -> None:
        self._hangs = hangs

    async def remote(self, *_: object) -> str:
        """Return a result, or wait forever."""
        if self._hangs:
            await asyncio.Event().wait()
        return "answer"


def make_group(monkeypatch: pytest.MonkeyPatch, hangs_in: str) -> tuple[LearnerGroup, list[Any]]:
    """Return a learner with two such ranks, and the list of killed ranks."""
    ended: list[Any] = []

    class Options:
        def __init__(self, **_: object) -> None:
            pass

        def __call__(self, _: type) -> Options:
            return self

        def remote(self, *_: object) -> SimulatedRank:
            return SimulatedRank(hangs_in)

    monkeypatch.setattr(ray, "remote", Options)
    monkeypatch.setattr(ray, "kill", ended.append)
    settings = {
        "learner": {"num_ranks": 2},
        "placement": {"start_timeout_s": 60 if hangs_in == "train_step" else 0.25},
        "training": {"learner_timeout_s": 0.25},
    }
    run = LanguageModelRun.model_validate(settings)
    return LearnerGroup(run, place_on_one_machine(run)), ended


async def start(group: LearnerGroup) -> None:
    """Start the ranks."""
    await group.start("model", RayWeightStore())


@pytest.mark.parametrize(
    ("hangs_in", "description"),
    [
        ("reply", "the learner's ranks to start"),
        ("rendezvous", "to return its address"),
        ("start", "to connect and load the model"),
    ],
)
async def test_learner_that_does_not_start_is_lost(
    monkeypatch: pytest.MonkeyPatch, hangs_in: str, description: str
) -> None:
    group, ended = make_group(monkeypatch, hangs_in)
    with pytest.raises(
        LearnerLostError, match=rf"{description}.*placement\.start_timeout_s = 0\.25"
    ):
        await start(group)
    assert len(ended) == 2


async def test_learner_that_hangs_is_lost_until_its_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, ended = make_group(monkeypatch, "train_step")
    await start(group)
    with pytest.raises(
        LearnerLostError, match=r"'train_step'.*training\.learner_timeout_s = 0\.25"
    ):
        await group.train_step(*STEP)
    assert len(ended) == 2
    with pytest.raises(LearnerLostError, match="have not been restarted"):
        await group.score_completions([])
