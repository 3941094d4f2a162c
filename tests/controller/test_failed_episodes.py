"""A run continues after a few failed episodes, and stops with the reason if nearly all fail."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.env import StepResult
from ludus.env.types import TextView
from ludus.proto.config import RewardTerm
from ludus.proto.errors import ConfigError, EpisodesFailedError, ExecutionError
from ludus.proto.metrics import TrainMetric
from ludus.trainer.core.types import GroupSpec, RolloutGroup
from ludus.trainer.driver.loops.controller import Controller
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer
from ludus.trainer.rollout.rewards.scoring import Reward
from tests.controller.simulated_run import SimulatedRun, SimulatedWorkers
from tests.rollout.scripted_policy import make_player

pytestmark = pytest.mark.timeout(120)


class Session:
    """A session of one step with alternating rewards of 1 and -1."""

    def __init__(self, number: int, is_failing: bool) -> None:
        self._number, self._is_failing = number, is_failing

    async def step(self, **action: Any) -> StepResult:
        await asyncio.sleep(0.001)
        if self._is_failing:
            raise ExecutionError(f"step failed with KeyError: 'tile' in episode {self._number}")
        return StepResult({}, reward=1.0 - 2.0 * (self._number % 2), terminated=True)

    async def close(self) -> None:
        """Do nothing."""


class Client:
    """A client of an in-process environment in which some episodes fail."""

    def __init__(self, is_failing: Callable[[int], bool]) -> None:
        self._is_failing = is_failing
        self._episode_numbers = itertools.count()

    async def open(self, **arguments: Any) -> tuple[Session, StepResult]:
        number = next(self._episode_numbers)
        text = TextView([{"role": "user", "content": "go"}])
        return Session(number, self._is_failing(number)), StepResult({}, text=text)


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer(["go", "well"] * 5, 320))


def make_run(
    folder: Path, chat: ChatTokenizer, is_failing: Callable[[int], bool], **player_options: Any
) -> SimulatedRun:
    """Return a run with real players and a policy that always samples the same completion."""
    settings = {
        "environments": {"coins": {"reconnect_timeout_s": 0.5}},
        "training": {"num_steps": 15, "groups_per_step": 4},
        "rollout": {"num_groups_in_flight": 8, "group_size": 4},
    }
    run = SimulatedRun(folder, settings)

    def prepare(workers: SimulatedWorkers, _: Controller) -> None:
        responses: Iterator[str] = itertools.repeat("well")
        player, policy = make_player(Client(is_failing), chat, responses, **player_options)

        async def play_group(spec: GroupSpec) -> RolloutGroup:
            assert workers.published_weights is not None
            policy.version = workers.published_weights.manifest.version
            return await player.play_group(spec)

        workers.play_group = play_group

    run.prepare = prepare
    return run


@pytest.mark.slow
async def test_few_failed_episodes_do_not_stop_the_run(
    tmp_path: Path, chat: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path, chat, lambda number: number % 50 == 7)
    state = await run.train()
    assert state.step == 15
    assert state.episodes_failed > 0
    assert state.episodes_lost == 0
    num_failed = sum(row.values[TrainMetric.NUM_EPISODES_FAILED] for row in run.rows)
    assert num_failed == state.episodes_failed
    warnings = [record.message for record in caplog.records if "is void" in record.message]
    assert len(warnings) == 1
    assert "KeyError: 'tile'" in warnings[0]


@pytest.mark.slow
async def test_run_stops_if_all_episodes_fail(tmp_path: Path, chat: ChatTokenizer) -> None:
    run = make_run(tmp_path, chat, lambda number: True)
    with pytest.raises(EpisodesFailedError, match=r"'coins'.*step failed with KeyError: 'tile'"):
        await run.train()


@pytest.mark.slow
async def test_environment_that_starts_to_fail_stops_the_run(
    tmp_path: Path, chat: ChatTokenizer
) -> None:
    run = make_run(tmp_path, chat, lambda number: number > 100)
    with pytest.raises(EpisodesFailedError, match="step failed with KeyError: 'tile'"):
        await run.train()
    assert run.learner.num_steps > 0


@pytest.mark.slow
async def test_broken_reward_function_stops_the_run(tmp_path: Path, chat: ChatTokenizer) -> None:
    reward = Reward([RewardTerm(function="tests.rollout.reward_functions:raise_key_error")])
    run = make_run(tmp_path, chat, lambda number: False, reward=reward)
    with pytest.raises(
        EpisodesFailedError, match=r"reward_functions:raise_key_error.*KeyError: 'answer'"
    ):
        await run.train()


async def test_configuration_error_in_an_episode_stops_the_run(
    tmp_path: Path, chat: ChatTokenizer
) -> None:
    async def raise_config_error(*_: object) -> None:
        raise ConfigError("environments.coins.tools = true, but it offers no tools")

    run = make_run(tmp_path, chat, lambda number: False, function=raise_config_error)
    with pytest.raises(ConfigError, match="offers no tools"):
        await run.train()
