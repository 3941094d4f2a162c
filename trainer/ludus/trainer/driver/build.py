"""Builds what a run consists of from its configuration, and ends it in the right order."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ludus.env.contract.schema import random_policy
from ludus.env.evaluation import EpisodeOutcome, FixedPolicy
from ludus.env.serving.subprocess import LocalServer
from ludus.proto.config import (
    AgentConfig,
    CommandAgent,
    LanguageModelRun,
    ModelCritic,
    PpoConfig,
    PretrainedModel,
    RewardModelTerm,
    RewardTerm,
    TransformersGenerator,
    VllmGenerator,
)
from ludus.proto.config.environment import RANDOM_POLICY, reward_term_name
from ludus.proto.runs import Phase
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.cluster import place_in_ray
from ludus.trainer.actors.learner_group import LearnerGroup
from ludus.trainer.actors.placement import Placement
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec
from ludus.trainer.actors.sending import check_given_functions
from ludus.trainer.actors.weight_store import check_reachable, located
from ludus.trainer.actors.workers import RolloutWorkers
from ludus.trainer.core.tasks import together
from ludus.trainer.driver.evaluation import Evaluator, play_baselines
from ludus.trainer.driver.parts import Parts
from ludus.trainer.learner.learner import LearnerSpec
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.engines import has_vllm
from ludus.trainer.rollout.player import limits_of
from ludus.trainer.run.checkpoint import (
    CheckpointFolder,
    learner_folder,
)
from ludus.trainer.run.folder import RunFolder, run_id
from ludus.trainer.setup.environments import (
    Environment,
    check_remote,
    check_rewards,
    connected,
    fixed_policies,
    local_servers,
)
from ludus.trainer.setup.prepare import (
    check_first_prompts,
    is_folder,
    make_canary,
    prepare_model,
)
from ludus.trainer.setup.shared_folder import FolderToken

_INITIAL_MODEL_FOLDER = "initial_model"


@dataclass(frozen=True, slots=True)
class Infrastructure:
    """What a run stands on: Ray, and its environments."""

    placement: Placement
    """Where its actors go."""
    token: FolderToken | None
    """By which actors on other nodes know the run's folder; None on one machine."""
    servers: dict[str, LocalServer]
    """Those that the run owns."""
    environments: dict[str, Environment]
    """All, in the run's order."""

    @property
    def num_tasks(self) -> dict[str, int]:
        """Of the environments that say how many they have, by name."""
        described = {name: one.description.tasks for name, one in self.environments.items()}
        return {name: tasks.num_tasks for name, tasks in described.items() if tasks is not None}

    @property
    def first(self) -> Environment:
        """The environment that the canary prompt and the chart are taken from."""
        return next(iter(self.environments.values()))


@asynccontextmanager
async def built(
    run: LanguageModelRun,
    folder: RunFolder,
    infrastructure: Infrastructure,
    checkpoint: Path | None,
) -> AsyncIterator[Parts]:
    """Everything a run consists of, started and connected."""
    environments, placement = infrastructure.environments, infrastructure.placement
    folder.connected({name: one.description.options for name, one in environments.items()})
    folder.phase(Phase.PREPARE_MODEL)
    model_path = await prepare_model(run, environments, folder.path / _INITIAL_MODEL_FOLDER)
    chat = ChatTokenizer.load(model_path, run.model)
    await check_first_prompts(run, environments, chat)
    canary = await make_canary(infrastructure.first, chat)
    folder.phase(Phase.START_WORKERS)
    learners = LearnerGroup(run, placement, infrastructure.token)
    buffer = RemoteBuffer(run, placement)
    spec = worker_spec(run, model_path, infrastructure, folder.path)
    workers, baselines, _ = await together(
        RolloutWorkers.start(spec, buffer, placement),
        baselines_of(run, environments),
        learners.start(make_learner_spec(run, model_path), spec.weights),
    )
    try:
        if checkpoint:
            await learners.load(learner_folder(checkpoint))
            folder.configure()
        yield Parts(
            run=run,
            folder=folder,
            checkpoints=CheckpointFolder(folder.checkpoints, run.training.keep_checkpoints),
            learners=learners,
            workers=workers,
            buffer=buffer,
            evaluator=Evaluator(run.eval, run.environments, workers, baselines),
            chat=chat,
            canary=canary,
            servers=infrastructure.servers,
            num_tasks=infrastructure.num_tasks,
        )
    finally:
        # Before Ray ends: a supervisor would restart it to replace the worker that it lost.
        await workers.close()
        learners.close()
        buffer.close()


@asynccontextmanager
async def infrastructure_of(
    run: LanguageModelRun, run_path: Path, *, with_learner: bool = True
) -> AsyncIterator[Infrastructure]:
    """Ray and the run's environments, connected; what the run started ends with it.

    The order matters: servers refuse what is wrong before Ray takes seconds to start, and
    Ray forks processes, which must happen before this one speaks gRPC.
    """
    check_given_functions()
    check_reachable(located(run.weights, run_path, run_id(run_path)))
    await check_remote(run)
    with local_servers(run, run_path) as servers:
        await check_rewards(run, servers)
        async with place_in_ray(run, with_learner=with_learner) as placement:
            with _token(run_path, placement) as token:
                async with connected(run, servers) as environments:
                    yield Infrastructure(placement, token, servers, environments)


@contextmanager
def _token(run_path: Path, placement: Placement) -> Iterator[FolderToken | None]:
    """A token in the run's folder as long as actors start; one machine needs none."""
    if placement.is_one_machine:
        yield None
        return
    token = FolderToken.write(run_path)
    try:
        yield token
    finally:
        token.remove()


def make_learner_spec(run: LanguageModelRun, model_path: str) -> LearnerSpec:
    """What the learner's ranks are made from."""
    return LearnerSpec(
        model_path=model_path,
        config=run.learner,
        learning_rate=run.learning_rate,
        algorithm=run.algorithm,
        temperature=run.rollout.temperature,
        max_tokens=run.rollout.max_tokens,
        seed=run.seed,
        lora=run.model.lora,
    )


def worker_spec(
    run: LanguageModelRun, model_path: str, infrastructure: Infrastructure, run_path: Path
) -> RolloutWorkerSpec:
    addresses = {name: one.address for name, one in infrastructure.environments.items()}
    weights = located(run.weights, run_path, run_id(run_path))
    return RolloutWorkerSpec(run, model_path, addresses, weights, infrastructure.token)


async def baselines_of(
    run: LanguageModelRun, environments: Mapping[str, Environment]
) -> dict[str, dict[str, list[EpisodeOutcome]]]:
    """The outcomes of the fixed policies that an evaluation compares with, by environment."""
    return {
        name: await _baselines_of(run, name, environment)
        for name, environment in environments.items()
    }


async def _baselines_of(
    run: LanguageModelRun, name: str, environment: Environment
) -> dict[str, list[EpisodeOutcome]]:
    config = environment.config
    if not config.baselines:
        return {}
    policies: dict[str, FixedPolicy] = {RANDOM_POLICY: random_policy(environment.description)}
    policies |= fixed_policies(run, name, environment.description.options)
    max_turns = limits_of(run, name).max_turns
    return await play_baselines(environment.client, policies, config.baselines, run.eval, max_turns)


def resolved(run: LanguageModelRun) -> LanguageModelRun:
    """The run as this machine can have it, and every process of it understands it.

    transformers generates where vLLM is not installed; folders are absolute, since processes
    elsewhere do not stand where this one does.
    """
    changes: dict[str, object] = {}
    if isinstance(run.generator, VllmGenerator) and not has_vllm():
        sys.stderr.write(
            "warning: vLLM is not installed here; generator.kind = 'transformers' takes over\n"
        )
        changes["generator"] = TransformersGenerator()
    if isinstance(run.model, PretrainedModel) and is_folder(run.model.path):
        folder = Path(run.model.path).expanduser().absolute()
        # One that is not there is refused by the name that the user gave it.
        if folder.exists():
            changes["model"] = run.model.model_copy(update={"path": str(folder)})
    if isinstance(run.algorithm, PpoConfig) and isinstance(run.algorithm.critic, ModelCritic):
        critic = run.algorithm.critic
        located = critic.model_copy(update={"path": _absolute(critic.path)})
        changes["algorithm"] = run.algorithm.model_copy(update={"critic": located})
    changes["environments"] = {
        name: environment.model_copy(
            update={
                "agent": _placed(environment.agent),
                "rewards": tuple(_located(term) for term in environment.rewards),
            }
        )
        for name, environment in run.environments.items()
    }
    return run.model_copy(update=changes)


def _placed(agent: AgentConfig | None) -> AgentConfig | None:
    """The agent with an absolute folder where it is a program."""
    if not isinstance(agent, CommandAgent):
        return agent
    return agent.model_copy(update={"folder": str(Path(agent.folder).absolute())})


def _located(term: RewardTerm | RewardModelTerm) -> RewardTerm | RewardModelTerm:
    """The term with an absolute path where its reward model is a folder of this machine."""
    if not isinstance(term, RewardModelTerm):
        return term
    # Metrics keep the name that the path gave it.
    return term.model_copy(update={"path": _absolute(term.path), "name": reward_term_name(term)})


def _absolute(path: str | None) -> str | None:
    """The absolute path where it is a folder of this machine; a Hugging Face id stays one."""
    if path is None:
        return None
    folder = Path(path).expanduser().absolute()
    return str(folder) if folder.exists() else path
