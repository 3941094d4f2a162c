"""`algorithm.advantages`: a function of the run's own credits the episodes of a group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from ludus.proto.config import GrpoConfig
from ludus.proto.errors import ConfigError
from ludus.trainer.checks.names import check_names
from ludus.trainer.core.functions import function_path
from ludus.trainer.core.types import Rollout
from ludus.trainer.data.batch import make_batch
from ludus.trainer.driver.trainer import Trainer
from tests.data.rollouts import make_group


def ranks(group: Sequence[Rollout]) -> list[float]:
    ordered = sorted(episode.reward or 0.0 for episode in group)
    return [float(ordered.index(episode.reward or 0.0)) for episode in group]


async def slow_ranks(group: Sequence[Rollout]) -> list[float]:
    await asyncio.sleep(0)
    return ranks(group)


def too_few(group: Sequence[Rollout]) -> list[float]:
    return ranks(group)[1:]


def no_number(group: Sequence[Rollout]) -> list[float]:
    return [float("nan")] * len(group)


def breaks(group: Sequence[Rollout]) -> list[float]:
    raise KeyError("weights")


def algorithm(name: str) -> GrpoConfig:
    return GrpoConfig(advantages=f"{__name__}:{name}")


@pytest.mark.parametrize("function", ["ranks", "slow_ranks"])
def test_every_sampled_token_gets_what_the_function_says_of_its_episode(function: str) -> None:
    batch = make_batch([make_group(3.0, 1.0, 2.0), make_group(0.0, 5.0)], algorithm(function))
    credits = [list(row) for row in batch.advantages]
    assert credits == [[0, 0, rank, rank] for rank in (2, 0, 1, 0, 1)]


def test_an_episode_without_a_reward_is_not_shown_to_it() -> None:
    batch = make_batch([make_group(3.0, None, 2.0)], algorithm("ranks"))
    assert [row[-1] for row in batch.advantages] == [1, 0]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("too_few", "must return 3 finite numbers, one for each episode, got [1.0, 2.0]"),
        ("no_number", "got [nan, nan, nan]"),
        ("breaks", "raised KeyError: 'weights'"),
    ],
)
def test_a_function_that_fails_is_named(function: str, told: str) -> None:
    with pytest.raises(ConfigError) as failed:
        make_batch([make_group(0.0, 1.0, 2.0)], algorithm(function))
    assert f"algorithm.advantages = '{__name__}:{function}'" in str(failed.value)
    assert told in str(failed.value)


def test_it_stands_in_the_place_of_baseline_and_scale() -> None:
    with pytest.raises(ValidationError, match="scale = 'group' has no effect"):
        GrpoConfig(advantages="module:function", scale="group")


def test_one_that_cannot_be_imported_is_refused_before_anything_starts() -> None:
    run = Trainer({"algorithm": {"advantages": "nowhere:ranks"}}).run
    with pytest.raises(ConfigError, match=r"algorithm\.advantages = 'nowhere:ranks'"):
        check_names(run)


def test_a_dictionary_may_hold_the_function_itself() -> None:
    def own(group: Sequence[Rollout]) -> list[float]:
        return ranks(group)

    run = Trainer({"algorithm": {"advantages": own}}).run
    assert isinstance(run.algorithm, GrpoConfig)
    assert run.algorithm.advantages == function_path(own)
    batch = make_batch([make_group(3.0, 1.0)], run.algorithm)
    assert [row[-1] for row in batch.advantages] == [1, 0]
