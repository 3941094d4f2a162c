"""Episodes, log and warnings of a tiny model's warm start."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ludus.env import Transition
from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import LanguageModelRun
from ludus.trainer.rollout.adapters.environment_adapter import make_renderer
from ludus.trainer.setup.environments import ConnectedEnvironment
from ludus.trainer.setup.tiny_model import prepare_model
from tests.env.counting_env import CountAction, CountingEnv, CountObservation

NUM_EPISODES = 120
TINY_MODEL = {
    "kind": "tiny",
    "num_layers": 1,
    "width": 16,
    "num_heads": 1,
    "intermediate": 16,
    "vocab_size": 300,
    "warm_start_games": NUM_EPISODES,
    "warm_start_epochs": 1,
}


class GuessingEnv(CountingEnv):
    """A game that ends when the player guesses a number from 1 to 3, drawn from the seed."""

    def __init__(self) -> None:
        super().__init__()
        self._secret = self._num_tries = 0

    def reset(self, *, seed: int | None = None, **_: Any) -> Transition[CountObservation]:
        self._secret = random.Random(seed).choice([1, 2, 3])
        self._num_tries = 0
        return super().reset(seed=seed)

    def step(self, action: CountAction) -> Transition[CountObservation]:
        self._num_tries += 1
        is_correct = action.add == self._secret
        reward = float(is_correct and self._num_tries == 1)
        return Transition(self._observe(), reward=reward, terminated=is_correct)


class OneStepGuessingEnv(GuessingEnv):
    """A guessing game that ends after the first action."""

    def step(self, action: CountAction) -> Transition[CountObservation]:
        transition = super().step(action)
        return Transition(transition.observation, reward=transition.reward, terminated=True)


class AlwaysWonEnv(CountingEnv):
    """A game that ends after the first action and rewards every action."""

    def step(self, action: CountAction) -> Transition[CountObservation]:
        return Transition(self._observe(), reward=1.0, terminated=True)


@dataclass(slots=True)
class RecordedEpisode:
    """Seed, length and success of an episode."""

    environment: str
    seed: int
    num_steps: int = 0
    is_success: bool = False


def make_run(*names: str, **environment: Any) -> LanguageModelRun:
    """Return a run with environments of these names."""
    environments = dict.fromkeys(names, environment)
    sections = {"environments": environments, "model": TINY_MODEL, "seed": 3}
    return LanguageModelRun.model_validate(sections)


@asynccontextmanager
async def serve_environments(
    run: LanguageModelRun, factory: type[CountingEnv]
) -> AsyncIterator[tuple[dict[str, ConnectedEnvironment], list[RecordedEpisode]]]:
    """Serve each environment of the run; yield the environments and the recorded episodes."""
    environments: dict[str, ConnectedEnvironment] = {}
    episodes: list[RecordedEpisode] = []
    async with AsyncExitStack() as stack:
        for name, config in run.environments.items():

            class RecordingEnv(factory):  # type: ignore[misc, valid-type]
                environment_name = name

                def reset(self, *, seed: int, **options: Any) -> Transition[CountObservation]:
                    self.episode = RecordedEpisode(self.environment_name, seed)
                    episodes.append(self.episode)
                    return super().reset(seed=seed, **options)

                def step(self, action: CountAction) -> Transition[CountObservation]:
                    transition = super().step(action)
                    self.episode.num_steps += 1
                    self.episode.is_success = transition.reward == 1.0
                    return transition

            options = ServerOptions(port=0, max_sessions=256)
            server = await stack.enter_async_context(EnvServer(RecordingEnv, options))
            client = await stack.enter_async_context(
                await AsyncEnvClient.connect(server.grpc_address)
            )
            environments[name] = ConnectedEnvironment(
                config,
                server.grpc_address,
                client,
                await client.describe(),
                make_renderer(config, "game"),
            )
        episodes.clear()
        yield environments, episodes


@pytest.mark.slow
async def test_warm_start_succeeds_only_by_chance_on_a_seeded_secret(
    tmp_path: Path,
) -> None:
    run = make_run("guess")
    async with serve_environments(run, GuessingEnv) as (environments, episodes):
        await prepare_model(run, environments, tmp_path)
    assert len(episodes) == NUM_EPISODES
    success_rate = sum(episode.is_success for episode in episodes) / NUM_EPISODES
    assert abs(success_rate - 1 / 3) < 0.17, "the rate is off by four standard errors"
    mean_steps = sum(episode.num_steps for episode in episodes) / NUM_EPISODES
    assert 2.0 < mean_steps < 4.0, "the mean is far from 3 steps"


@pytest.mark.slow
async def test_warm_start_is_summarized_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = make_run("guess")
    async with serve_environments(run, GuessingEnv) as (environments, episodes):
        await prepare_model(run, environments, tmp_path)
    steps = [episode.num_steps for episode in episodes]
    mean_steps = sum(steps) / NUM_EPISODES
    summary = f"{NUM_EPISODES} episodes of {mean_steps:.1f} turns on average, at most {max(steps)}"
    assert summary in caplog.text
    assert (
        f"trained on {NUM_EPISODES} of {NUM_EPISODES} episodes: a cross-entropy of" in caplog.text
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
async def test_warm_start_seeds_are_distinct_in_all_environments(
    tmp_path: Path,
) -> None:
    run = make_run("left", "right")
    async with serve_environments(run, GuessingEnv) as (environments, episodes):
        await prepare_model(run, environments, tmp_path)
    assert {episode.environment for episode in episodes} == {"left", "right"}
    seeds = [episode.seed for episode in episodes]
    assert len(set(seeds)) == len(seeds) == NUM_EPISODES
    assert 2**30 <= min(seeds) <= max(seeds) < 2**31


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "environment", "is_suspicious"),
    [
        (AlwaysWonEnv, {}, True),
        (AlwaysWonEnv, {"max_turns": 1}, False),
        (OneStepGuessingEnv, {}, False),
    ],
)
async def test_equal_one_step_episodes_give_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    factory: type[CountingEnv],
    environment: dict[str, int],
    is_suspicious: bool,
) -> None:
    run = make_run("quick", **environment)
    async with serve_environments(run, factory) as (environments, _):
        await prepare_model(run, environments, tmp_path)
    message = f"all {NUM_EPISODES} episodes of the warm start in 'quick' ended after one step"
    assert (message in caplog.text) == is_suspicious
    assert ("warning: " + message in capsys.readouterr().err) == is_suspicious
