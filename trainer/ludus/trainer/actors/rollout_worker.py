"""A rollout worker as a Ray actor: one engine, one connection, many episodes at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ludus.env.client import AsyncEnvClient
from ludus.env.evaluation import EpisodeOutcome
from ludus.proto.config import EnvironmentConfig, RunConfig, WeightStoreConfig
from ludus.trainer.actors.learner import make_store
from ludus.trainer.interfaces import PublishedWeights
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.engines import make_engine
from ludus.trainer.rollout.episode import Player
from ludus.trainer.rollout.face import make_face
from ludus.trainer.rollout.generator import Generator
from ludus.trainer.rollout.group import play_group
from ludus.trainer.types import GroupSpec, Rollout, RolloutGroup, RolloutStatus, Sampling
from ludus.trainer.weights.canary import CanaryReport, check_canary


@dataclass(frozen=True, slots=True)
class RolloutWorkerSpec:
    """What a rollout worker is made from."""

    run: RunConfig
    model_path: str
    environment_address: str
    weights: WeightStoreConfig
    seed: int
    """Of its sampling; differs between workers."""


class RolloutWorkerActor:
    """Plays what it is asked to play; calls interleave on one event loop."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    async def start(self, spec: RolloutWorkerSpec) -> None:
        """Nothing; connects to the environment and loads the engine."""
        run = spec.run
        self._run = run
        self._store = make_store(spec.weights)
        chat = ChatTokenizer.load(spec.model_path, run.model)
        self._client = await AsyncEnvClient.connect(
            spec.environment_address,
            token=environment_token(run.environment),
            timeout_s=run.rollout.group_timeout_s,
            reconnect_timeout_s=run.environment.reconnect_timeout_s,
        )
        engine = make_engine(run, spec.model_path, chat, spec.seed)
        self._generator = Generator(engine)
        self._player = Player(
            next(iter(run.environments)),
            self._client,
            self._generator,
            chat,
            make_face(run.environment),
            run.rollout,
            max_sessions=(await self._client.describe()).max_sessions,
        )

    async def play(self, specs: Sequence[GroupSpec]) -> list[RolloutGroup]:
        """The groups, once all of them are over."""
        rollout = self._run.rollout
        sampling = Sampling(rollout.temperature, rollout.max_completion_tokens)
        groups = [
            play_group(self._player, spec, sampling, rollout.group_timeout_s) for spec in specs
        ]
        return list(await asyncio.gather(*groups))

    async def evaluate(self, seeds: Sequence[int], temperature: float) -> list[EpisodeOutcome]:
        """The outcome of one game per seed, in their order."""
        rollout = self._run.rollout
        sampling = Sampling(temperature, rollout.max_completion_tokens)
        places = asyncio.Semaphore(rollout.num_groups_in_flight * rollout.group_size)

        async def play(seed: int) -> EpisodeOutcome:
            async with places:
                return _outcome(await self._player.play(seed, sampling))

        return list(await asyncio.gather(*(play(seed) for seed in seeds)))

    async def load_weights(self, published: PublishedWeights) -> CanaryReport:
        """What the canary said after the weights were loaded; raises nothing by itself."""
        state = self._store.fetch(published)
        await self._generator.load_weights(state, published.manifest.version)
        answer = await self._generator.score(published.manifest.probe)
        return check_canary(published.manifest, answer, self._run.learner.dtype)

    async def close(self) -> None:
        """Nothing; ends the engine and the connection."""
        await self._client.close()
        self._generator.close()


def environment_token(environment: EnvironmentConfig) -> str | None:
    """The bearer token for the run's environment; it never stands in a configuration."""
    return os.environ.get(environment.token_env) if environment.kind == "remote" else None


def _outcome(rollout: Rollout) -> EpisodeOutcome:
    invalid = rollout.status is RolloutStatus.INVALID_ACTION
    return EpisodeOutcome(rollout.seed, rollout.episode_return, len(rollout.turns), invalid=invalid)
