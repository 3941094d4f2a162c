"""A rollout worker as a Ray actor: one engine, one connection to each environment.

play(specs)            groups of any environment --+
evaluate(name, seeds)  games of one                +--> players --> one generator, one engine
load_weights(version)  fetch, load, canary       --+
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import ray
import torch

from ludus.env.client import AsyncEnvClient
from ludus.env.evaluation import EpisodeOutcome
from ludus.env.runtime import freeze_heap
from ludus.proto.config import LanguageModelRun, WeightStoreConfig
from ludus.proto.errors import WeightSyncError
from ludus.trainer.actors.weight_store import make_store
from ludus.trainer.agents.player import AgentPlayer
from ludus.trainer.core.functions import Function, register_functions, registered_functions
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.tasks import Tasks
from ludus.trainer.core.types import (
    Completion,
    GroupSpec,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Sampling,
    make_lost_group,
)
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.batch.completions import Completions
from ludus.trainer.rollout.batch.generate_port import GeneratePort
from ludus.trainer.rollout.engines import make_engine
from ludus.trainer.rollout.generator import Generator
from ludus.trainer.rollout.group_player import WorkerParts, make_group_player
from ludus.trainer.rollout.player import limits_of, sampling_of
from ludus.trainer.rollout.reward_models import RewardModels
from ludus.trainer.rollout.transcript import num_transcripts
from ludus.trainer.setup.environments import make_connect_options
from ludus.trainer.setup.shared_folder import FolderToken
from ludus.trainer.weights import WorkerWeights, check_canary
from ludus.trainer.weights.adapters import AdapterMerger


@dataclass(frozen=True, slots=True)
class RolloutWorkerSpec:
    """What a rollout worker is made from."""

    run: LanguageModelRun
    model_path: str
    addresses: Mapping[str, str]
    """Of each environment, by its name in the run."""
    weights: WeightStoreConfig
    token: FolderToken | None = None
    """Of the run's folder, which holds the model; None where it cannot but be seen."""
    number: int = 0
    """Tells workers apart."""
    functions: Mapping[str, Function] = field(default_factory=registered_functions)
    """What the configuration names and nobody can import."""


class RolloutWorkerActor:
    """Plays what it is asked to play; calls interleave on one event loop."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._closed = asyncio.Event()
        self._abandoned = asyncio.Event()
        self._num_loads = 0
        self._clients = AsyncExitStack()

    async def start(self, spec: RolloutWorkerSpec) -> str:
        """Connect to the environments and load the engine; the id of the node that does it.

        Raises:
            ConfigError: this node does not see the run's folder.
        """
        if spec.token is not None:
            await asyncio.to_thread(spec.token.check)
        register_functions(spec.functions)
        run = spec.run
        self._run = run
        self._weights = spec.weights
        self._store = make_store(spec.weights)
        chat = ChatTokenizer.load(spec.model_path, run.model)
        clients = {name: await self._connect(spec, name) for name in run.environments}
        self._generator = Generator(make_engine(run, spec.model_path, chat))
        self._merger = None
        if run.model.lora is not None:
            self._merger = AdapterMerger.load(spec.model_path, run.model.lora)
        self._reward_models = RewardModels()
        number, max_tokens = spec.number, run.rollout.max_tokens
        completions = Completions(self._generator, chat, max_tokens, run.seed, number)
        port = await self._open_port(completions, run.rollout.generate_port)
        parts = WorkerParts(self._generator, chat, self._reward_models, completions, port)
        self._players = {
            name: await make_group_player(run, name, client, parts, await self._agent(name, chat))
            for name, client in clients.items()
        }
        freeze_heap()
        return ray.get_runtime_context().get_node_id()

    async def play(self, specs: Sequence[GroupSpec]) -> list[RolloutGroup]:
        """The groups, in any order, once all of them are over; lost where they were abandoned."""
        of_environment: dict[str, list[GroupSpec]] = {}
        for spec in specs:
            of_environment.setdefault(spec.environment, []).append(spec)
        groups = [self._play(name, own) for name, own in of_environment.items()]
        abandoned = asyncio.ensure_future(self._abandoned.wait())
        playing = asyncio.gather(*groups)
        either: list[asyncio.Future[Any]] = [playing, abandoned]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                return [group for own in playing.result() for group in own]
            playing.cancel()
            # Their sessions are free before others begin.
            await asyncio.wait([playing])
            return [make_lost_group(spec) for spec in specs]
        finally:
            abandoned.cancel()

    async def abandon(self) -> None:
        """Give up what is being played: it is not known which weights it was sampled from."""
        self._abandoned.set()
        self._abandoned = asyncio.Event()

    async def evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        """The outcome of one game per seed, in their order."""
        sampling = Sampling(temperature, self._run.rollout.max_completion_tokens)
        return list(map(_outcome, await self._players[environment].play_games(seeds, sampling)))

    async def complete(
        self, prompt_ids: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """What the policy says after the prompt, once per seed."""
        said = (self._generator(list(prompt_ids), sampling, seed) for seed in seeds)
        return list(await asyncio.gather(*said))

    async def load_weights(self, published: PublishedWeights, from_scratch: bool) -> WorkerWeights:
        """What the worker holds now, and how it answers the canary prompt.

        Args:
            from_scratch: nothing that was fetched before is trusted any more.

        Raises:
            WeightSyncError: they did not arrive whole, or others were asked for meanwhile.
        """
        self._num_loads += 1
        number = self._num_loads
        if from_scratch:
            # A store keeps what the next difference builds on, and a fetch that hangs has the old.
            self._store = make_store(self._weights)
        # A store that is unavailable is waited for, while the games continue.
        fetched = await asyncio.to_thread(self._store.fetch, published)
        paused_before_s = self._generator.pause_s
        state = fetched.state
        if self._merger is not None:
            state = await asyncio.to_thread(self._merger.merge, state)
        if number != self._num_loads:
            raise WeightSyncError(
                f"weights version {published.manifest.version} came after others were asked for"
            )
        await self._generator.load_weights(state, published.manifest.version)
        answers = await self._generator.score(published.manifest.canary)
        dtype = self._run.learner.dtype
        canary = check_canary(published.manifest, answers, self._weights.canary, dtype)
        pause_s = self._generator.pause_s - paused_before_s
        return WorkerWeights(canary, fetched.fetch_s, pause_s, fetched.num_bytes)

    async def until_closed(self) -> None:
        """Wait until `close` is called: whoever awaits this learns of this process's death.

        Raises:
            EngineLostError: the engine has failed; nothing can be played here any more.
        """
        async with Tasks() as tasks:
            tasks.start(self._generator.until_lost())
            await self._closed.wait()

    async def sign_of_life(self) -> None:
        """Return at once: the event loop turns."""

    async def close(self) -> None:
        """End the engine and the connections."""
        await self._clients.aclose()
        self._generator.close()
        self._reward_models.close()
        self._closed.set()

    async def _play(self, environment: str, specs: Sequence[GroupSpec]) -> list[RolloutGroup]:
        """The groups of one environment, with what is written down of them."""
        run = self._run
        per_step, groups_per_step = run.metrics.transcripts_per_step, run.training.groups_per_step
        numbers = [
            num_transcripts(spec.index, per_step, groups_per_step, run.seed) for spec in specs
        ]
        return await self._players[environment].play_groups(
            specs, sampling_of(run.rollout), numbers
        )

    async def _open_port(self, completions: Completions, port: int | None) -> int | None:
        """Where POST /generate/ is answered; None where nobody asked for it."""
        if port is None:
            return None
        listening = GeneratePort(completions, port)
        await listening.start()
        self._clients.push_async_callback(listening.stop)
        return listening.port

    async def _agent(self, name: str, chat: ChatTokenizer) -> AgentPlayer | None:
        """The agent of an environment that has one; it ends with the connections."""
        config = self._run.environments[name].agent
        if config is None:
            return None
        limits = limits_of(self._run, name)
        return await AgentPlayer.start(config, self._generator, chat, limits, self._clients)

    async def _connect(self, spec: RolloutWorkerSpec, name: str) -> AsyncEnvClient:
        environment = spec.run.environments[name]
        client = await AsyncEnvClient.connect(
            spec.addresses[name],
            dataclasses.replace(
                make_connect_options(environment),
                timeout_s=spec.run.rollout.group_timeout_s,
                # A worker may join while the server is being started again.
                connect_timeout_s=environment.reconnect_timeout_s,
            ),
        )
        return await self._clients.enter_async_context(client)


def _outcome(rollout: Rollout) -> EpisodeOutcome:
    return EpisodeOutcome(
        rollout.seed,
        rollout.episode_return,
        len(rollout.turns),
        success=rollout.success,
        invalid=rollout.status is RolloutStatus.INVALID_ACTION,
        failure=rollout.failure,
    )
