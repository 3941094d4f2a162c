"""Builds a run from its configuration, runs it, and writes what it came to."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from ludus.env import PolicyChartPrompt
from ludus.env.evaluation import EpisodeOutcome
from ludus.env.runtime import freeze_heap
from ludus.env.serving.subprocess import LocalServer
from ludus.proto.config import (
    RunConfig,
    TransformersGenerator,
    VllmGenerator,
)
from ludus.proto.errors import ConfigError, UserError
from ludus.proto.runs import (
    CHART_FILE,
    CHECKPOINTS_FOLDER,
    SUMMARY_FILE,
    Evaluation,
    Phase,
    Resume,
)
from ludus.trainer import control
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.cluster import find_place, is_local, start_ray
from ludus.trainer.actors.learner_group import LearnerGroup
from ludus.trainer.actors.placement import Placement
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec
from ludus.trainer.actors.weight_store import check_reachable, located
from ludus.trainer.actors.workers import RolloutWorkers
from ludus.trainer.checkpoint import (
    CheckpointFolder,
    RunState,
    learner_folder,
    list_checkpoints,
    model_folder,
    newest_checkpoint,
    read_state,
)
from ludus.trainer.controller import Controller, Parts
from ludus.trainer.environments import Environment, check_names, connected, local_servers
from ludus.trainer.evaluation import Evaluator, play_baselines
from ludus.trainer.learner.learner import LearnerSpec
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.prepare import make_canary_prompt, prepare_model
from ludus.trainer.processes import Workers
from ludus.trainer.rollout.engines import has_vllm
from ludus.trainer.rollout.renderer import import_object
from ludus.trainer.run_folder import RunFolder, log_to, path_of
from ludus.trainer.shared_folder import FolderToken
from ludus.trainer.summary import chart_questions, make_chart, make_summary
from ludus.trainer.tasks import Tasks, together

_log = logging.getLogger(__name__)
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
    def first(self) -> Environment:
        """The environment that the canary prompt and the chart are taken from."""
        return next(iter(self.environments.values()))


class Stopped(Exception):
    """The user ended the run before its last step; a checkpoint is written."""

    is_wanted = False
    """True where the run's control file said so, and not a signal."""


async def train(run: RunConfig, *, resume: Resume, overwrite: bool) -> Path:
    """The folder of the run, which has trained its last step.

    Raises:
        UserError: the run cannot start as configured.
        Stopped: SIGINT or SIGTERM ended it.
    """
    run = with_available_generator(run)
    check_names(run)
    checkpoint = _starting_point(run, resume)
    if checkpoint is not None:
        state = read_state(checkpoint)
        folder = RunFolder.reopen(run, state.step)
    else:
        state = RunState()
        # What a run that died before its first checkpoint has left is of no use.
        folder = RunFolder.create(run, overwrite=overwrite or resume is Resume.AUTO)
    log_to(folder.path, run.log_level)
    try:
        folder.open_sinks(in_job_log=not is_local())
        await _train(run, folder, checkpoint, state)
    except UserError:
        if checkpoint is not None or state.step > 0:
            _log.exception("the run has failed")
        else:
            # It could not start as configured, so there is nothing to keep.
            folder.discard()
        raise
    except Stopped as stopped:
        _log.info("%s", stopped)
        raise
    except Exception:
        _log.exception("the run has failed")
        raise
    finally:
        folder.close()
    return folder.path


async def _train(
    run: RunConfig, folder: RunFolder, checkpoint: Path | None, state: RunState
) -> None:
    begun = time.monotonic()
    folder.phase(Phase.START_ENVIRONMENT)
    async with (
        _infrastructure(run, folder.path) as infrastructure,
        _parts(run, folder, infrastructure, checkpoint) as parts,
    ):
        controller = Controller(parts, state)
        freeze_heap()
        with _stop_on_signal(controller):
            is_stop_wanted = await _run_controlled(controller, folder, parts.workers)
        if not controller.finished:
            stopped = Stopped(f"stopped after step {state.step}")
            stopped.is_wanted = is_stop_wanted
            raise stopped
        await _finish(parts, state, infrastructure, begun)
    folder.phase(Phase.DONE, state.step)


async def evaluate(
    run: RunConfig, checkpoint: Path | None, *, num_games: int, temperature: float | None
) -> Evaluation:
    """How a checkpoint's policy does beside the fixed policies, in each environment."""
    run = with_available_generator(run)
    chosen = run.eval.model_copy(
        update={
            "num_games": num_games,
            "temperature": run.eval.temperature if temperature is None else temperature,
        }
    )
    run = run.model_copy(update={"eval": chosen})
    run_path = path_of(run)
    checkpoint = checkpoint or newest_checkpoint(run_path / CHECKPOINTS_FOLDER)
    read_state(checkpoint)
    log_to(run_path, run.log_level)
    async with _infrastructure(run, run_path, with_learner=False) as infrastructure:
        placement = infrastructure.placement
        spec = _worker_spec(run, str(model_folder(checkpoint)), infrastructure, run_path)
        workers, baselines = await together(
            RolloutWorkers.start(spec, RemoteBuffer(run, placement), placement),
            _baselines(run, infrastructure.environments),
        )
        try:
            judge = Evaluator(run.eval, run.environments, workers, baselines)
            return Evaluation(environments=await judge.judge(num_games))
        finally:
            await workers.close()


@asynccontextmanager
async def _parts(
    run: RunConfig, folder: RunFolder, infrastructure: Infrastructure, checkpoint: Path | None
) -> AsyncIterator[Parts]:
    """Everything a run consists of, started and connected."""
    environments, placement = infrastructure.environments, infrastructure.placement
    folder.connected({name: one.description.options for name, one in environments.items()})
    folder.phase(Phase.PREPARE_MODEL)
    model_path = await prepare_model(run, environments, folder.path / _INITIAL_MODEL_FOLDER)
    chat = ChatTokenizer.load(model_path, run.model)
    canary = await make_canary_prompt(infrastructure.first, chat)
    folder.phase(Phase.START_WORKERS)
    learners = LearnerGroup(run, placement, infrastructure.token)
    buffer = RemoteBuffer(run, placement)
    spec = _worker_spec(run, model_path, infrastructure, folder.path)
    workers, baselines, _ = await together(
        RolloutWorkers.start(spec, buffer, placement),
        _baselines(run, environments),
        learners.start(make_learner_spec(run, model_path), spec.weights),
    )
    try:
        if checkpoint:
            await learners.load(learner_folder(checkpoint))
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
        )
    finally:
        # Before Ray ends: a supervisor would restart it to replace the worker that it lost.
        await workers.close()


async def _run_controlled(controller: Controller, folder: RunFolder, workers: Workers) -> bool:
    """Run the controller, and do on the way what the run's control file says.

    Returns:
        Whether the file wanted the run to stop.
    """
    wanted = asyncio.Event()

    def stop() -> None:
        wanted.set()
        controller.stop()

    async with Tasks() as tasks:
        tasks.start(control.follow(folder.path, workers, stop))
        await controller.run()
    return wanted.is_set()


async def _finish(
    parts: Parts, state: RunState, infrastructure: Infrastructure, begun: float
) -> None:
    """Write the final evaluation, the summary and the chart."""
    run, folder = parts.run, parts.folder
    folder.phase(Phase.EVALUATE, state.step)
    reports = await parts.evaluator.judge(run.eval.num_games)
    for name, report in reports.items():
        folder.evaluated(state.step, state.games_trained, name, report)
    await _write_chart(parts)
    summary = make_summary(
        run,
        state,
        reports,
        {name: one.description for name, one in infrastructure.environments.items()},
        training_s=folder.elapsed_s,
        total_s=time.monotonic() - begun,
    )
    folder.record(SUMMARY_FILE, summary)


async def _write_chart(parts: Parts) -> None:
    """Write the chart of the first environment that has prompts for one."""
    for name, environment in parts.run.environments.items():
        if environment.policy_chart is not None:
            prompts: Sequence[PolicyChartPrompt] = import_object(
                environment.policy_chart, "environment.policy_chart"
            )()
            questions = chart_questions(prompts, parts.chat)
            logprobs = await parts.learners.answer_logprobs(questions)
            parts.folder.record(CHART_FILE, make_chart(name, prompts, logprobs))
            return


@asynccontextmanager
async def _infrastructure(
    run: RunConfig, run_path: Path, *, with_learner: bool = True
) -> AsyncIterator[Infrastructure]:
    """Ray and the run's environments, connected; what the run started ends with it.

    The order matters: a server refuses bad options before Ray takes seconds to start, and
    Ray forks processes, which must happen before this one speaks gRPC.
    """
    check_reachable(located(run.weights, run.name, run_path))
    with local_servers(run, run_path) as servers:
        start_ray()
        try:
            placement = await find_place(run, with_learner=with_learner)
            with _token(run_path, placement) as token:
                async with connected(run, servers) as environments:
                    yield Infrastructure(placement, token, servers, environments)
        finally:
            ray.shutdown()


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


@contextmanager
def _stop_on_signal(controller: Controller) -> Iterator[None]:
    """SIGINT and SIGTERM end the run after its step; a second one ends it at once."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        if controller.is_stopping:
            task.cancel()
        _log.warning("stopping after this step; again to stop at once")
        controller.stop()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.add_signal_handler(number, task.cancel)


def _starting_point(run: RunConfig, resume: Resume) -> Path | None:
    """The checkpoint that the run continues from; None where it begins anew."""
    checkpoints = path_of(run) / CHECKPOINTS_FOLDER
    if resume is Resume.NEVER or (resume is Resume.AUTO and not list_checkpoints(checkpoints)):
        return None
    return newest_checkpoint(checkpoints)


def make_learner_spec(run: RunConfig, model_path: str) -> LearnerSpec:
    """What the learner's ranks are made from."""
    return LearnerSpec(
        model_path=model_path,
        config=run.learner,
        algorithm=run.algorithm,
        temperature=run.rollout.temperature,
        max_tokens=run.rollout.max_tokens,
        seed=run.seed,
        lora=run.model.lora,
    )


def _worker_spec(
    run: RunConfig, model_path: str, infrastructure: Infrastructure, run_path: Path
) -> RolloutWorkerSpec:
    addresses = {name: one.address for name, one in infrastructure.environments.items()}
    weights = located(run.weights, run.name, run_path)
    return RolloutWorkerSpec(run, model_path, addresses, weights, infrastructure.token)


async def _baselines(
    run: RunConfig, environments: Mapping[str, Environment]
) -> dict[str, dict[str, list[EpisodeOutcome]]]:
    """The outcomes of the fixed policies that an evaluation compares with, by environment."""
    return {
        name: await _baselines_of(run, name, environment)
        for name, environment in environments.items()
    }


async def _baselines_of(
    run: RunConfig, name: str, environment: Environment
) -> dict[str, list[EpisodeOutcome]]:
    config = environment.config
    if not config.baselines:
        return {}
    assert config.policies is not None
    field = f"environments.{name}"
    policies = import_object(config.policies, f"{field}.policies")(environment.description.options)
    unknown = sorted(set(config.baselines) - policies.keys())
    if unknown:
        raise ConfigError(
            f"{field}.baselines: '{config.policies}' has no policy {unknown}; it has "
            f"{sorted(policies)}"
        )
    return await play_baselines(environment.client, policies, config.baselines, run.eval)


def with_available_generator(run: RunConfig) -> RunConfig:
    """The run as configured, or with transformers generating where vLLM is not installed."""
    if not isinstance(run.generator, VllmGenerator) or has_vllm():
        return run
    sys.stderr.write(
        "warning: vLLM is not installed here; generator.kind = 'transformers' takes over\n"
    )
    return run.model_copy(update={"generator": TransformersGenerator()})
