"""Tests of the number of CPU threads that a run chooses."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.proto.config import LanguageModelRun
from ludus.trainer.actors.cpu_threads import resolve_num_threads
from ludus.trainer.actors.placement import Roles

LARGE = {"kind": "tiny", "width": 256, "num_heads": 4}


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def choose(roles: Roles = Roles.ALL, **sections: Any) -> tuple[int | None, int | None]:
    """Return the threads of a rank and of a worker."""
    sections = {"model": LARGE, "training": {"max_staleness": 1}} | sections
    run = resolve_num_threads(LanguageModelRun.model_validate(sections), roles)
    return run.learner.num_threads, run.rollout.num_threads


def test_ranks_and_workers_share_the_cores_while_they_overlap() -> None:
    assert choose() == (4, 4)
    assert choose(rollout={"num_workers": 2}) == (2, 2)
    many_workers = {"num_workers": 20, "group_size": 2, "num_groups_in_flight": 2}
    assert choose(rollout=many_workers) == (1, 1)


def test_all_cores_are_used_if_one_waits_for_the_other() -> None:
    on_policy = {"max_staleness": 0}
    assert choose(training=on_policy) == (8, 8)
    assert choose(training=on_policy, learner={"num_ranks": 2}) == (4, 4)


def test_workers_of_an_evaluation_use_all_cores() -> None:
    assert choose(Roles.WORKERS)[1] == 8


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"model": {"kind": "tiny", "width": 64}}, (1, 1)),
        ({"learner": {"num_gpus_per_rank": 1}}, (1, 4)),
        ({"rollout": {"num_gpus_per_worker": 1}}, (4, 1)),
        ({"learner": {"num_threads": 3}}, (3, 4)),
        ({"rollout": {"num_threads": 3}}, (4, 3)),
    ],
)
def test_small_models_gpus_and_set_numbers_are_exceptions(
    section: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert choose(**section) == expected


def test_one_thread_is_requested_from_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray-head:6379")
    assert choose() == (1, 1)
