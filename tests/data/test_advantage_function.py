"""Advantages of a group that a user's function computes (`algorithm.advantages`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from ludus.proto.config import GrpoConfig
from ludus.proto.errors import ConfigError
from ludus.trainer.core.functions import get_or_register_path
from ludus.trainer.core.types import Rollout
from ludus.trainer.data.batch import make_batch
from ludus.trainer.driver.checks import check_importable_names
from ludus.trainer.driver.trainer import Trainer
from tests.data.rollouts import make_group


def compute_ranks(group: Sequence[Rollout]) -> list[float]:
    sorted_rewards = sorted(episode.reward or 0.0 for episode in group)
    return [float(sorted_rewards.index(episode.reward or 0.0)) for episode in group]


async def compute_ranks_async(group: Sequence[Rollout]) -> list[float]:
    await asyncio.sleep(0)
    return compute_ranks(group)


def return_too_few(group: Sequence[Rollout]) -> list[float]:
    return compute_ranks(group)[1:]


def return_huge(group: Sequence[Rollout]) -> list[float]:
    return [1e308] * len(group)


def return_nan(group: Sequence[Rollout]) -> list[float]:
    return [float("nan")] * len(group)


def raise_error(group: Sequence[Rollout]) -> list[float]:
    raise KeyError("weights")


def make_algorithm(name: str) -> GrpoConfig:
    return GrpoConfig(advantages=f"{__name__}:{name}")


@pytest.mark.parametrize("function", ["compute_ranks", "compute_ranks_async"])
def test_function_sets_the_advantage_of_every_sampled_token(function: str) -> None:
    batch = make_batch([make_group(3.0, 1.0, 2.0), make_group(0.0, 5.0)], make_algorithm(function))
    advantages = [list(row) for row in batch.advantages]
    assert advantages == [[0, 0, rank, rank] for rank in (2, 0, 1, 0, 1)]


def test_unscored_episode_is_not_passed_to_the_function() -> None:
    batch = make_batch([make_group(3.0, None, 2.0)], make_algorithm("compute_ranks"))
    assert [row[-1] for row in batch.advantages] == [1, 0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("return_too_few", "must return 3 finite numbers, one for each episode, of at most 1e+12"),
        ("return_nan", "got [nan, nan, nan]"),
        ("return_huge", "got [1e+308, 1e+308, 1e+308]"),
        ("raise_error", "raised KeyError: 'weights'"),
    ],
)
def test_invalid_function_is_refused(function: str, message: str) -> None:
    with pytest.raises(ConfigError) as error_info:
        make_batch([make_group(0.0, 1.0, 2.0)], make_algorithm(function))
    assert f"algorithm.advantages = '{__name__}:{function}'" in str(error_info.value)
    assert message in str(error_info.value)


def test_function_cannot_be_combined_with_scale() -> None:
    with pytest.raises(ValidationError, match="scale = 'group' has no effect"):
        GrpoConfig(advantages="module:function", scale="group")


def test_unimportable_function_is_refused() -> None:
    run = Trainer({"algorithm": {"advantages": "nowhere:compute_ranks"}}).run
    with pytest.raises(ConfigError, match=r"algorithm\.advantages = 'nowhere:compute_ranks'"):
        check_importable_names(run)


def test_configuration_accepts_a_function_object() -> None:
    def rank_episodes(group: Sequence[Rollout]) -> list[float]:
        return compute_ranks(group)

    run = Trainer({"algorithm": {"advantages": rank_episodes}}).run
    assert isinstance(run.algorithm, GrpoConfig)
    assert run.algorithm.advantages == get_or_register_path(rank_episodes)
    batch = make_batch([make_group(3.0, 1.0)], run.algorithm)
    assert [row[-1] for row in batch.advantages] == [1, 0]
