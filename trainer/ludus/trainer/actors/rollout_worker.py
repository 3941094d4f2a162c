"""A rollout worker as a Ray actor, with one engine and one connection to each environment.

play(specs)            groups of any environment        --+
evaluate(name, seeds)  episodes of one environment        +--> one GroupPlayer for each environment
load_weights(version)  fetch, load, check with canaries --+    --> one engine
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from ludus.env.runtime import freeze_heap, pause_collection

with pause_collection():
    import ray
    import torch

    from ludus.env.client import AsyncEnvClient
    from ludus.env.evaluation import EpisodeOutcome
    from ludus.proto.config import LanguageModelRun, WeightStoreConfig
    from ludus.proto.errors import WeightSyncError
    from ludus.proto.runs import Transcript
    from ludus.trainer.actors.gpus import limit_visible_gpus
    from ludus.trainer.actors.weight_store import make_store
    from ludus.trainer.core.devices import choose_reserved_device
    from ludus.trainer.core.functions import Function, copy_registered_functions, register_functions
    from ludus.trainer.core.interfaces import Engine, PublishedWeights
    from ludus.trainer.core.tasks import CancellingTaskGroup
    from ludus.trainer.core.types import (
        GroupSpec,
        Rollout,
        RolloutGroup,
        SampledCompletion,
        Sampling,
        make_lost_group,
    )
    from ludus.trainer.models.chat import ChatTokenizer
    from ludus.trainer.rollout.engines.async_engine import AsyncEngine, make_engine
    from ludus.trainer.rollout.group import GroupPlayer, make_outcome, make_transcripts
    from ludus.trainer.rollout.rewards.reward_models import RewardModels
    from ludus.trainer.rollout.runner import PlayedEpisode, RunnerComponents, sampling_settings
    from ludus.trainer.rollout.transcript import count_transcripts
    from ludus.trainer.setup.environments import make_connect_options
    from ludus.trainer.setup.shared_folder import FolderToken
    from ludus.trainer.weights.adapters import AdapterMerger
    from ludus.trainer.weights.canary import WorkerWeights, check_canary


@dataclass(frozen=True, slots=True)
class RolloutWorkerSpec:
    """Arguments that create a rollout worker."""

    run: LanguageModelRun
    model_path: str
    addresses: Mapping[str, str]
    """Address of each environment, by the environment's name in the run."""
    weights: WeightStoreConfig
    folder_token: FolderToken | None = None
    """Token of the run folder, which contains the model; None on a single machine."""
    number: int = 0
    """Number of the worker, from 0."""
    functions: Mapping[str, Function] = field(default_factory=copy_registered_functions)
    """Functions that the configuration refers to and that cannot be imported."""


@dataclass(frozen=True, slots=True)
class WorkerComponents:
    """The components of a started rollout worker."""

    run: LanguageModelRun
    weights: WeightStoreConfig
    engine: AsyncEngine
    players: Mapping[str, GroupPlayer]
    """Group player of each environment, by the environment's name in the run."""
    reward_models: RewardModels = field(default_factory=RewardModels)
    merger: AdapterMerger | None = None
    """Merger of LoRA adapters into the model's weights; None without LoRA."""


class RolloutWorkerActor:
    """A worker that plays groups; calls interleave on one event loop."""

    components: WorkerComponents
    """Components of the worker, once it has started."""

    def __init__(self, num_threads: int, components: WorkerComponents | None = None) -> None:
        """Create a worker. Without `components`, `start` must create them."""
        limit_visible_gpus()
        torch.set_num_threads(num_threads)
        self._num_threads = num_threads
        if components is not None:
            self._set_components(components)
        self._close_event = asyncio.Event()
        self._abandon_event = asyncio.Event()
        self._num_loads = 0
        self._exit_stack = AsyncExitStack()

    async def start(self, spec: RolloutWorkerSpec) -> str:
        """Load the engine and connect to the environments; return the id of this node.

        The engine may take minutes to load. Meanwhile, the event loop responds, and no environment
        has an idle session.

        Raises:
            ConfigError: this node cannot access the run folder, or cannot run the engine.
        """
        if spec.folder_token is not None:
            await asyncio.to_thread(spec.folder_token.check)
        register_functions(spec.functions)
        run, model_path, exit_stack = spec.run, spec.model_path, self._exit_stack
        tokenizer = ChatTokenizer.load(model_path, run.model)
        engine = AsyncEngine(await asyncio.to_thread(self._load_engine, spec, tokenizer))
        clients = {name: await self._connect(spec, name) for name in run.environments}
        lora = run.model.lora
        merger = None if lora is None else AdapterMerger.load(model_path, lora)
        reward_models = RewardModels()
        players = {}
        for name, client in clients.items():
            parts = RunnerComponents(run, name, client, engine, tokenizer, exit_stack, spec.number)
            players[name] = await GroupPlayer.start(parts, reward_models)
        self._set_components(
            WorkerComponents(run, spec.weights, engine, players, reward_models, merger)
        )
        freeze_heap()
        return ray.get_runtime_context().get_node_id()

    def _load_engine(self, spec: RolloutWorkerSpec, tokenizer: ChatTokenizer) -> Engine:
        torch.set_num_threads(self._num_threads)  # applies to the current thread only
        device = choose_reserved_device(
            spec.run.rollout.num_gpus_per_worker, "rollout.num_gpus_per_worker"
        )
        return make_engine(spec.run, spec.model_path, tokenizer, device)

    async def play(self, specs: Sequence[GroupSpec]) -> list[RolloutGroup]:
        """Play the groups and return them in any order; after `abandon`, all of them are lost."""
        players = self.components.players
        specs_by_call: dict[tuple[str, int], list[GroupSpec]] = {}
        for spec in specs:
            plays_together = players[spec.environment].runner.plays_groups_together
            call_index = -1 if plays_together else spec.index
            specs_by_call.setdefault((spec.environment, call_index), []).append(spec)
        calls = [
            self._play_groups(environment, call_specs)
            for (environment, _), call_specs in specs_by_call.items()
        ]
        play_future = asyncio.gather(*calls)
        abandon_future = asyncio.ensure_future(self._abandon_event.wait())
        futures: list[asyncio.Future[Any]] = [play_future, abandon_future]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if play_future.done():
                return [group for groups in play_future.result() for group in groups]
            play_future.cancel()
            # Their sessions must be closed before other groups start.
            await asyncio.wait([play_future])
            return [make_lost_group(spec) for spec in specs]
        finally:
            abandon_future.cancel()

    async def _play_groups(self, name: str, specs: Sequence[GroupSpec]) -> list[RolloutGroup]:
        run = self.components.run
        num_transcripts, num_groups = run.metrics.transcripts_per_step, run.training.groups_per_step
        transcript_counts = [
            count_transcripts(spec.index, num_transcripts, num_groups, run.seed) for spec in specs
        ]
        sampling = sampling_settings(run.rollout)
        return await self.components.players[name].play_groups(specs, sampling, transcript_counts)

    async def abandon(self) -> None:
        """Abandon all running groups, because it is unknown which weights sampled them."""
        self._abandon_event.set()
        self._abandon_event = asyncio.Event()

    async def evaluate(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[EpisodeOutcome]:
        """Play one episode for each seed and return the outcomes in the order of the seeds."""
        sampling = sampling_settings(self.components.run.rollout, temperature)
        rollouts = await self.components.players[environment].evaluate(seeds, sampling)
        return list(map(make_outcome, seeds, rollouts))

    async def play_samples(
        self, environment: str, seeds: Sequence[int], temperature: float
    ) -> list[Transcript]:
        """Play one evaluation episode for each seed and return the transcripts by seed."""
        sampling = sampling_settings(self.components.run.rollout, temperature)
        transcripts: dict[int, Transcript] = {}

        def write(seed: int, rollout: Rollout, episode: PlayedEpisode) -> None:
            for transcript in make_transcripts(0, [rollout], [episode]):
                transcripts[seed] = transcript.model_copy(update={"seed": seed})

        await self.components.players[environment].evaluate(seeds, sampling, write)
        return [transcripts[seed] for seed in seeds if seed in transcripts]

    async def complete(
        self, prompt_ids: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> list[SampledCompletion]:
        """Sample one completion of the prompt for each seed."""
        completions = (self.components.engine(list(prompt_ids), sampling, seed) for seed in seeds)
        return list(await asyncio.gather(*completions))

    async def load_weights(
        self, published_weights: PublishedWeights, is_from_scratch: bool
    ) -> WorkerWeights:
        """Fetch and load weights, and return the result of the canary check.

        With `is_from_scratch`, all weights that were fetched earlier are ignored.

        Raises:
            WeightSyncError: the weights are incomplete, or a later version was requested.
        """
        components, manifest = self.components, published_weights.manifest
        self._num_loads += 1
        load_number = self._num_loads
        if is_from_scratch:
            # A store keeps the last weights, to which it adds differences. A fetch that hangs keeps
            # the old store.
            self._store = make_store(components.weights)
        # Episodes continue while the store is unavailable.
        fetched_weights = await asyncio.to_thread(self._store.fetch, published_weights)
        old_pause_s = components.engine.pause_s
        state = fetched_weights.state
        if components.merger is not None:
            state = await asyncio.to_thread(components.merger.merge, state)
        if load_number != self._num_loads:
            raise WeightSyncError(
                f"weights version {manifest.version} arrived after a later version was requested"
            )
        try:
            await components.engine.load_weights(state, manifest.version)
            logprobs = await components.engine.score(manifest.canary)
        except BaseException:
            await self.abandon()
            raise
        dtype = components.run.learner.dtype
        canary = check_canary(manifest, logprobs, components.weights.canary, dtype)
        pause_s = components.engine.pause_s - old_pause_s
        return WorkerWeights(canary, fetched_weights.fetch_s, pause_s, fetched_weights.num_bytes)

    async def wait_until_closed(self) -> None:
        """Wait until `close` is called, so that the caller notices the death of this process.

        Raises:
            EngineLostError: the engine has failed, so no more episodes can be played.
        """
        async with CancellingTaskGroup() as tasks:
            tasks.start(self.components.engine.wait_until_lost())
            await self._close_event.wait()

    async def ping(self) -> None:
        """Return at once, which proves that the event loop responds."""

    async def close(self) -> None:
        """Close the connections and the engine."""
        await self._exit_stack.aclose()
        self.components.engine.close()
        self.components.reward_models.close()
        self._close_event.set()

    def _set_components(self, components: WorkerComponents) -> None:
        self.components = components
        self._store = make_store(components.weights)

    async def _connect(self, spec: RolloutWorkerSpec, name: str) -> AsyncEnvClient:
        environment = spec.run.environments[name]
        options = dataclasses.replace(
            make_connect_options(environment),
            timeout_s=spec.run.rollout.group_timeout_s,
            # A worker may start while the server restarts.
            connect_timeout_s=environment.reconnect_timeout_s,
        )
        client = await AsyncEnvClient.connect(spec.addresses[name], options)
        return await self._exit_stack.enter_async_context(client)
