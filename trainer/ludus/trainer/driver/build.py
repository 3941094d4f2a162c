"""Start and stop of a run's infrastructure and components, in the right order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from ludus.env.contract.schema import random_policy
from ludus.env.evaluation import EpisodeOutcome, FixedPolicy
from ludus.env.serving.subprocess import LocalServer
from ludus.env.types import ReturnRange
from ludus.proto.config import EvalConfig, LanguageModelRun
from ludus.proto.config.environment import RANDOM_POLICY
from ludus.proto.runs import CONFIG_FILE, INITIAL_MODEL_FOLDER, Phase
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.cluster import check_sendable_functions, place_in_ray
from ludus.trainer.actors.learner import LearnerGroup
from ludus.trainer.actors.placement import Placement, Roles, may_share_gpu
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec
from ludus.trainer.actors.weight_store import check_reachable, resolve_location
from ludus.trainer.actors.workers import RolloutWorkers
from ludus.trainer.core.tasks import gather_or_cancel
from ludus.trainer.driver import checks
from ludus.trainer.driver.evaluation import Evaluator, find_max_games, play_baselines
from ludus.trainer.driver.loops.components import Components
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.runner import episode_limits
from ludus.trainer.run.checkpoint import LEARNER_FOLDER, RunState
from ludus.trainer.run.lifecycle import RunStorage, ensure_run_id
from ludus.trainer.run.metrics_writer import MetricsWriter
from ludus.trainer.setup.chat_template import keep_chat_template
from ludus.trainer.setup.environments import (
    ConnectedEnvironment,
    connect_environments,
    load_fixed_policies,
    start_local_servers,
)
from ludus.trainer.setup.first_prompts import make_canary_prompts
from ludus.trainer.setup.shared_folder import FolderToken
from ludus.trainer.setup.tiny_model import prepare_model


@dataclass(frozen=True, slots=True)
class Infrastructure:
    """Ray and the environments of a run."""

    placement: Placement
    folder_token: FolderToken | None
    """Token by which actors on other nodes verify the run's folder; None on one machine."""
    servers: dict[str, LocalServer]
    """Environment servers that the run started, by environment."""
    environments: dict[str, ConnectedEnvironment]
    """All environments by name, in the order of the configuration."""

    @property
    def num_tasks(self) -> dict[str, int]:
        """Number of tasks by environment, for the environments that report it."""
        return {
            name: environment.description.tasks.num_tasks
            for name, environment in self.environments.items()
            if environment.description.tasks is not None
        }

    @property
    def return_ranges(self) -> dict[str, ReturnRange | None]:
        """Declared returns by environment; None for an environment that declares none."""
        environments = self.environments.items()
        return {name: environment.description.return_range for name, environment in environments}

    @property
    def games(self) -> frozenset[str]:
        """Names of the environments that are games, not tasks."""
        environments = self.environments.items()
        return frozenset(name for name, item in environments if item.description.is_game)

    def find_max_games(self, config: EvalConfig) -> dict[str, int]:
        """Return the maximum number of evaluation episodes, for environments with tasks."""
        max_games = {
            name: find_max_games(
                config,
                environment.description.tasks,
                has_agent=environment.config.agent is not None,
            )
            for name, environment in self.environments.items()
        }
        return {name: number for name, number in max_games.items() if number is not None}


@asynccontextmanager
async def start_infrastructure(
    run: LanguageModelRun, run_folder: Path, roles: Roles = Roles.ALL
) -> AsyncIterator[Infrastructure]:
    """Start Ray, start local servers, and connect to all environments; stop them after the block.

    The order matters. Servers refuse an invalid configuration before Ray starts, which takes
    seconds. Ray forks processes, which must happen before this process uses gRPC.
    """
    check_sendable_functions()
    check_reachable(resolve_location(run.weights, run_folder, ensure_run_id(run_folder)))
    await checks.check_remote_addresses(run)
    async with AsyncExitStack() as exit_stack:
        servers = exit_stack.enter_context(start_local_servers(run, run_folder))
        await checks.check_server_columns(run, servers)
        ray_connection = place_in_ray(run, roles)
        placement = await exit_stack.enter_async_context(ray_connection)
        folder_token = None
        if not placement.is_one_machine:
            folder_token = FolderToken.write(run_folder)
            exit_stack.callback(folder_token.remove)
        environments = await exit_stack.enter_async_context(connect_environments(run, servers))
        for name, environment in environments.items():
            checks.check_reward_columns(run, name, environment.description.tasks)
        yield Infrastructure(placement, folder_token, servers, environments)


@asynccontextmanager
async def start_components(
    run: LanguageModelRun,
    storage: RunStorage[RunState],
    metrics: MetricsWriter,
    infrastructure: Infrastructure,
) -> AsyncIterator[Components]:
    """Start the learner, the workers and the buffer of a run; stop them after the block."""
    environments, placement = infrastructure.environments, infrastructure.placement
    run = keep_chat_template(run)
    metrics.set_environments(
        {name: environment.description.options for name, environment in environments.items()},
        infrastructure.games,
    )
    metrics.log_phase(Phase.PREPARE_MODEL)
    await checks.check_first_texts(run, environments)
    model_path = await prepare_model(run, environments, run.folder / INITIAL_MODEL_FOLDER)
    tokenizer = ChatTokenizer.load(model_path, run.model)
    await checks.check_first_prompts(run, environments, tokenizer)
    name, environment = next(iter(environments.items()))
    max_tokens = episode_limits(run, name).max_tokens
    canary = await make_canary_prompts(environment, tokenizer, max_tokens)
    metrics.log_phase(Phase.START_WORKERS)
    learners = LearnerGroup(
        run, placement, infrastructure.folder_token, storage.state.reduced_max_tokens
    )
    buffer = RemoteBuffer(run, placement)
    worker_spec = make_worker_spec(run, model_path, infrastructure, run.folder)
    workers, baselines = await gather_or_cancel(
        start_actors(learners, worker_spec, buffer, placement),
        play_all_baselines(run, environments),
    )
    try:
        if storage.checkpoint is not None:
            await learners.load(storage.checkpoint / LEARNER_FOLDER)
            storage.folder.write(CONFIG_FILE, run)
        yield Components(
            run=run,
            metrics=metrics,
            checkpoints=storage.checkpoints,
            learners=learners,
            workers=workers,
            buffer=buffer,
            evaluator=Evaluator(
                run.eval,
                run.environments,
                workers,
                baselines,
                infrastructure.find_max_games(run.eval),
                infrastructure.games,
            ),
            tokenizer=tokenizer,
            canary=canary,
            servers=infrastructure.servers,
            num_tasks=infrastructure.num_tasks,
        )
    finally:
        # Workers stop before Ray; otherwise a supervisor would restart Ray to replace a worker.
        await workers.close()
        learners.close()
        buffer.close()


def make_worker_spec(
    run: LanguageModelRun, model_path: str, infrastructure: Infrastructure, run_folder: Path
) -> RolloutWorkerSpec:
    """Return the specification from which rollout workers are built."""
    environments, folder_token = infrastructure.environments, infrastructure.folder_token
    addresses = {name: environment.address for name, environment in environments.items()}
    weight_store = resolve_location(run.weights, run_folder, ensure_run_id(run_folder))
    return RolloutWorkerSpec(run, model_path, addresses, weight_store, folder_token)


async def start_actors(
    learners: LearnerGroup, spec: RolloutWorkerSpec, buffer: RemoteBuffer, placement: Placement
) -> RolloutWorkers:
    """Start the learner and the workers; return the workers.

    If they may share a GPU, the learner starts first: vLLM measures the free memory when it starts,
    and the learner must not allocate or free memory meanwhile.
    """
    if may_share_gpu(spec.run):
        await learners.start(spec.model_path, spec.weights)
        return await RolloutWorkers.start(spec, buffer, placement)
    workers, _ = await gather_or_cancel(
        RolloutWorkers.start(spec, buffer, placement),
        learners.start(spec.model_path, spec.weights),
    )
    return workers


async def play_all_baselines(
    run: LanguageModelRun, environments: Mapping[str, ConnectedEnvironment]
) -> dict[str, dict[str, list[EpisodeOutcome]]]:
    """Play the evaluation episodes of all fixed policies; return the outcomes by environment."""
    outcomes: dict[str, dict[str, list[EpisodeOutcome]]] = {}
    for name, environment in environments.items():
        baselines, description = environment.config.baselines, environment.description
        policies: dict[str, FixedPolicy] = {RANDOM_POLICY: random_policy(description)}
        if baselines:
            policies |= load_fixed_policies(run, name, description.options)
        max_turns = episode_limits(run, name).max_turns
        outcomes[name] = await play_baselines(
            environment.client, policies, baselines, run.eval, max_turns, description.tasks
        )
    return outcomes
