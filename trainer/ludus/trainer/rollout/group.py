"""Groups of episodes of one environment, which a runner plays and a reward scores.

starts --runner--> played episodes --reward--> rollouts, transcripts

    settings of an environment              runner
    none                                    TurnLoopRunner      policy and environment take turns
    rollout = "module:function"             FunctionRunner      a function plays one episode
    rollout = "module:Class"                the class itself, a runner
    rollout = "NAME:module:function"        the runner class that entry point NAME registers
    agent = {...}                           AgentRunner         an agent plays one episode

An installed package registers a runner class under a name with an entry point of group
`ludus.episode_runners`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, cast

from ludus.env.evaluation import EpisodeOutcome
from ludus.env.types import TaskSet
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.proto.runs import Transcript
from ludus.trainer.core.functions import import_callable
from ludus.trainer.core.streams import Stream, derive_key
from ludus.trainer.core.types import GroupSpec, Rollout, RolloutGroup, RolloutStatus, Sampling
from ludus.trainer.rollout.agents.runner import AgentRunner
from ludus.trainer.rollout.episode import FunctionRunner, TurnLoopRunner
from ludus.trainer.rollout.rewards.reward_models import RewardModels
from ludus.trainer.rollout.rewards.scoring import PlayedEpisode, Reward
from ludus.trainer.rollout.runner import (
    EpisodeRunner,
    EpisodeStart,
    RunnerComponents,
    episode_limits,
)
from ludus.trainer.rollout.transcript import make_transcript

_log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "ludus.episode_runners"
_PAUSE_AFTER_FAILURE_S = 0.5


@dataclass(frozen=True, slots=True)
class GroupPlayer:
    """The component that plays the groups and evaluation episodes of one environment."""

    runner: EpisodeRunner
    reward: Reward
    timeout_s: float
    """Time limit in seconds for each term of the reward."""
    max_evaluation_episodes: int
    """Maximum number of evaluation episodes at the same time."""
    run_seed: int = 0
    environment_index: int = 0
    """Index of the environment in the run. The random numbers of evaluations depend on it."""
    tasks: TaskSet | None = None
    """Tasks of the environment; None if every seed is a different task."""

    @classmethod
    async def start(cls, components: RunnerComponents, reward_models: RewardModels) -> GroupPlayer:
        """Return the player of an environment, with its runner and its reward."""
        runner = await start_runner(components)
        tasks = (await components.client.describe()).tasks
        return cls.make(runner, components.run, components.environment, tasks, reward_models)

    @classmethod
    def make(
        cls,
        runner: EpisodeRunner,
        run: LanguageModelRun,
        environment: str,
        tasks: TaskSet | None,
        reward_models: RewardModels,
    ) -> GroupPlayer:
        """Return the player of an environment, with a runner that has been started."""
        rollout, config = episode_limits(run, environment), run.environments[environment]
        return cls(
            runner,
            Reward(config.rewards, rollout.known_invalid_action_reward, reward_models),
            rollout.group_timeout_s,
            rollout.num_groups_in_flight * rollout.group_size,
            run.seed,
            list(run.environments).index(environment),
            tasks,
        )

    async def play_groups(
        self, specs: Sequence[GroupSpec], sampling: Sampling, num_transcripts: Sequence[int]
    ) -> list[RolloutGroup]:
        """Return the groups, played with one call of the runner and scored with one of the reward.

        All episodes of a group fail if they start differently from the same seed, or if a reward
        function fails or exceeds the time limit, because their rewards could not be compared.

        Args:
            num_transcripts: number of transcripts of each group.

        Raises:
            UserError: the run cannot work as configured.
        """
        starts = [start for spec in specs for start in make_group_starts(self.run_seed, spec)]
        episodes = await self.runner.play_episodes(starts, sampling, is_evaluation=False)
        rollouts = await self.reward.score(episodes, self.timeout_s)
        release_episodes(rollouts, episodes)
        if all(rollout.status is RolloutStatus.FAILED for rollout in rollouts):
            # Without a pause, groups that fail immediately would be replaced at a very high rate.
            await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
        groups, offset = [], 0
        for spec, num_written in zip(specs, num_transcripts, strict=True):
            end = offset + len(spec.seeds)
            written = slice(offset, offset + num_written)
            transcripts = make_transcripts(spec.index, rollouts[written], episodes[written])
            group_rollouts = tuple(rollouts[offset:end])
            groups.append(RolloutGroup(spec.index, spec.environment, group_rollouts, transcripts))
            offset = end
        return groups

    async def evaluate(
        self,
        seeds: Sequence[int],
        sampling: Sampling,
        on_episode: Callable[[int, Rollout, PlayedEpisode], None] | None = None,
    ) -> list[Rollout]:
        """Play one episode for each seed and return the rollouts in the order of the seeds.

        The reward is computed only if the environment's return of an episode is unknown. A seed
        that repeats a task starts the episode with the first seed of this task, which the rollout
        contains, and samples with other random numbers.

        Args:
            sampling: sampling parameters, in which the environment's limits replace `max_tokens`.
            on_episode: called with the seed, the rollout and the episode as soon as it has ended,
                in any order.
        """
        stream, environment_index = Stream.EVALUATION_SAMPLING, self.environment_index
        starts = [
            EpisodeStart(
                index,
                seed if self.tasks is None else self.tasks.find_first_seed(seed),
                derive_key(self.run_seed, stream, environment_index, seed),
            )
            for index, seed in enumerate(seeds)
        ]
        num_per_call = self.max_evaluation_episodes if self.runner.plays_groups_together else 1
        slots = asyncio.Semaphore(self.max_evaluation_episodes // num_per_call)

        async def play_call(starts: Sequence[EpisodeStart]) -> list[Rollout]:
            async with slots:
                episodes = await self.runner.play_episodes(starts, sampling, is_evaluation=True)
            rollouts = [episode.rollout for episode in episodes]
            if any(episode.needs_score for episode in episodes):
                rollouts = await self.reward.score(episodes, self.timeout_s)
            if on_episode is not None:
                for start, rollout, episode in zip(starts, rollouts, episodes, strict=True):
                    on_episode(seeds[start.group_index], rollout, episode)
            release_episodes(rollouts, episodes)
            return rollouts

        calls = [
            play_call(starts[index : index + num_per_call])
            for index in range(0, len(starts), num_per_call)
        ]
        return [rollout for rollouts in await asyncio.gather(*calls) for rollout in rollouts]


def make_outcome(seed: int, rollout: Rollout) -> EpisodeOutcome:
    """Return the outcome of an evaluation episode."""
    return EpisodeOutcome(
        seed,
        rollout.episode_return,
        len(rollout.turns),
        success=rollout.success,
        invalid=rollout.status is RolloutStatus.INVALID_ACTION,
        failure=rollout.failure,
        task_seed=rollout.seed,
    )


def make_group_starts(run_seed: int, spec: GroupSpec) -> list[EpisodeStart]:
    """Return the start of each episode of a group."""
    stream = Stream.TRAINING_SAMPLING
    return [
        EpisodeStart(spec.index, seed, derive_key(run_seed, stream, spec.index, episode_index))
        for episode_index, seed in enumerate(spec.seeds)
    ]


def release_episodes(rollouts: Sequence[Rollout], episodes: Sequence[PlayedEpisode]) -> None:
    """Release what the episodes use, except if a reward function may still read it."""
    for rollout, episode in zip(rollouts, episodes, strict=True):
        # A function that exceeded its time limit may still run in its thread.
        if episode.release is not None and not rollout.failure:
            episode.release()


def make_transcripts(
    group_index: int, rollouts: Sequence[Rollout], episodes: Sequence[PlayedEpisode]
) -> tuple[Transcript, ...]:
    """Return the transcripts of a group's first episodes. Failures are logged and left out."""
    transcripts = []
    for episode_index, (rollout, episode) in enumerate(zip(rollouts, episodes, strict=True)):
        try:
            transcripts.append(
                make_transcript(
                    group_index, episode_index, rollout, episode.history, episode.unanswered
                )
            )
        except Exception:  # noqa: BLE001 - third-party messages and actions can have any form
            _log.exception("no transcript for an episode of '%s'", rollout.environment)

    return tuple(transcripts)


async def start_runner(components: RunnerComponents) -> EpisodeRunner:
    """Return the runner that plays the episodes of one environment."""
    config = components.config
    runner_class: Any = TurnLoopRunner
    if config.agent is not None:
        runner_class = AgentRunner
    elif config.rollout_runner is not None:
        runner_class = find_registered_runner(config.rollout_runner)
    elif config.rollout_function is not None:
        function = import_callable(config.rollout_function, "environment.rollout")
        runner_class = function if isinstance(function, type) else FunctionRunner
    return cast(EpisodeRunner, await runner_class.start(components))


def find_registered_runner(name: str) -> Any:
    """Return the runner class that an installed package registers under `name`."""
    registered_runners = entry_points(group=ENTRY_POINT_GROUP)
    if name not in registered_runners.names:
        raise ConfigError(
            f"environment.rollout = '{name}:...' names a runner that is not registered; expected "
            f"one of {sorted(registered_runners.names)}. Install the package that registers "
            f"'{name}' as an entry point of '{ENTRY_POINT_GROUP}'"
        )
    return registered_runners[name].load()
