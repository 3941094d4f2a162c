"""The order in which the learner and the rollout workers of a run start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec
from ludus.trainer.driver import build


@pytest.mark.parametrize(
    ("learner_gpus", "worker_gpus", "starts_in_turn"),
    [(0.5, 0.5, True), (1, 1, False), (0, 0.5, False), (0, 0, False)],
)
async def test_actors_that_may_share_a_gpu_start_in_turn(
    monkeypatch: pytest.MonkeyPatch, learner_gpus: float, worker_gpus: float, starts_in_turn: bool
) -> None:
    events = []

    class Learners:
        async def start(self, *_: object) -> None:
            events.append("learner begins")
            await asyncio.sleep(0.01)
            events.append("learner ready")

    class Workers:
        @staticmethod
        async def start(*_: object) -> None:
            events.append("worker begins")

    monkeypatch.setattr(build, "RolloutWorkers", Workers)
    sections = {
        "learner": {"num_gpus_per_rank": learner_gpus},
        "rollout": {"num_gpus_per_worker": worker_gpus},
    }
    run, unused = LanguageModelRun.model_validate(sections), None
    learners: Any = Learners()
    await build.start_actors(
        learners,
        RolloutWorkerSpec(run, "model", {}, run.weights),
        unused,  # type: ignore[arg-type]
        unused,  # type: ignore[arg-type]
    )
    is_in_turn = events.index("worker begins") > events.index("learner ready")
    assert is_in_turn == starts_in_turn
