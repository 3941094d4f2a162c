"""Builds a run from its configuration, runs it, and writes what it came to."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from ludus.env import PolicyProbe
from ludus.env.client import AsyncEnvClient
from ludus.env.evaluation import EpisodeOutcome
from ludus.env.local_server import LocalServer
from ludus.env.types import EnvironmentDescription
from ludus.proto.config import (
    FolderWeightStore,
    LocalEnvironment,
    RunConfig,
    TransformersGenerator,
    VllmGenerator,
    WeightStoreConfig,
)
from ludus.proto.errors import AuthenticationError, ConfigError, UnavailableError, UserError
from ludus.proto.runs import (
    CHART_FILE,
    CHECKPOINTS_FOLDER,
    ENVIRONMENT_LOG_FILE,
    SUMMARY_FILE,
    EvalReport,
    Phase,
)
from ludus.trainer.actors.groups import Buffer, LearnerGroup, RolloutWorkers
from ludus.trainer.actors.rollout_worker import RolloutWorkerSpec, environment_token
from ludus.trainer.checkpoint import (
    CheckpointFolder,
    RunState,
    learner_folder,
    model_folder,
    newest_checkpoint,
    read_state,
)
from ludus.trainer.controller import Controller, Parts
from ludus.trainer.evaluation import Evaluator, play_baselines
from ludus.trainer.learner.learner import LearnerSpec
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.prepare import make_probe, prepare_model
from ludus.trainer.rollout.engines import has_vllm
from ludus.trainer.rollout.face import import_object, make_face
from ludus.trainer.run_folder import RunFolder, log_to
from ludus.trainer.summary import chart_questions, make_chart, make_summary

_log = logging.getLogger(__name__)
_INITIAL_MODEL_FOLDER = "initial_model"


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment of a run, up and connected."""

    server: LocalServer | None
    """The server that this run owns."""
    address: str
    client: AsyncEnvClient
    description: EnvironmentDescription


class Stopped(Exception):
    """The user ended the run before its last step; a checkpoint is written."""


async def train(run: RunConfig, *, resume: bool, overwrite: bool) -> Path:
    """The folder of the run, which has trained its last step.

    Raises:
        UserError: the run cannot start as configured.
        Stopped: SIGINT or SIGTERM ended it.
    """
    run = with_available_generator(run)
    if resume:
        checkpoint, state = _starting_point(run)
        folder = RunFolder.reopen(run, state.step)
    else:
        checkpoint, state = None, RunState()
        folder = RunFolder.create(run, overwrite=overwrite)
    log_to(folder.path, run.log_level)
    try:
        await _train(run, folder, checkpoint, state)
    except UserError:
        if not resume:
            # It could not start as configured, so there is nothing to keep.
            folder.discard()
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
    async with _infrastructure(run, folder.path) as environment:
        parts = await _build(run, folder, environment, checkpoint)
        controller = Controller(parts, state)
        with _stop_on_signal(controller):
            await controller.run()
        if not controller.finished:
            raise Stopped(f"stopped after step {state.step}")
        await _finish(parts, state, environment.description, begun)
        await parts.workers.close()
    folder.phase(Phase.DONE, state.step)


async def evaluate(
    run: RunConfig, checkpoint: Path | None, *, num_games: int, temperature: float | None
) -> EvalReport:
    """How a checkpoint's policy does beside the fixed policies."""
    run = with_available_generator(run)
    chosen = run.eval.model_copy(
        update={
            "num_games": num_games,
            "temperature": run.eval.temperature if temperature is None else temperature,
        }
    )
    run = run.model_copy(update={"eval": chosen})
    run_path = Path(run.output_dir) / run.name
    checkpoint = checkpoint or newest_checkpoint(run_path / CHECKPOINTS_FOLDER)
    read_state(checkpoint)
    log_to(run_path, run.log_level)
    async with _infrastructure(run, run_path) as environment:
        weights = _resolved(run.weights, run_path)
        specs = _worker_specs(run, str(model_folder(checkpoint)), environment, weights)
        workers, baselines = await asyncio.gather(
            RolloutWorkers.start(specs, Buffer(run)), _baselines(run, environment)
        )
        report = await Evaluator(run.eval, run.environment, workers, baselines).judge(num_games)
        await workers.close()
    return report


async def _build(
    run: RunConfig, folder: RunFolder, environment: Environment, checkpoint: Path | None
) -> Parts:
    """Everything a run consists of, started and connected."""
    face = make_face(run.environment)
    folder.phase(Phase.PREPARE_MODEL)
    initial = folder.path / _INITIAL_MODEL_FOLDER
    model_path = (
        str(model_folder(checkpoint))
        if checkpoint
        else await prepare_model(run, environment.client, face, initial)
    )
    chat = ChatTokenizer.load(model_path, run.model)
    probe = await make_probe(environment.client, face, chat)
    folder.phase(Phase.START_WORKERS)
    learners, buffer = LearnerGroup(run), Buffer(run)
    weights = _resolved(run.weights, folder.path)
    _, workers, baselines = await asyncio.gather(
        learners.start(_learner_spec(run, model_path), weights),
        RolloutWorkers.start(_worker_specs(run, model_path, environment, weights), buffer),
        _baselines(run, environment),
    )
    if checkpoint:
        await learners.load(learner_folder(checkpoint))
    return Parts(
        run=run,
        folder=folder,
        checkpoints=CheckpointFolder(folder.checkpoints, run.training.keep_checkpoints),
        learners=learners,
        workers=workers,
        buffer=buffer,
        evaluator=Evaluator(run.eval, run.environment, workers, baselines),
        chat=chat,
        probe=probe,
        server=environment.server,
    )


async def _finish(
    parts: Parts, state: RunState, environment: EnvironmentDescription, begun: float
) -> None:
    """Nothing; the final evaluation, summary and chart are written."""
    run, folder = parts.run, parts.folder
    folder.phase(Phase.EVALUATE, state.step)
    report = await parts.evaluator.judge(run.eval.num_games)
    folder.evaluated(state.step, state.games_trained, report)
    if run.environment.probes:
        await _write_chart(parts)
    summary = make_summary(
        run,
        state,
        report,
        environment,
        training_s=folder.elapsed_s,
        total_s=time.monotonic() - begun,
    )
    folder.record(SUMMARY_FILE, summary)


async def _write_chart(parts: Parts) -> None:
    path = parts.run.environment.probes
    assert path is not None
    probes: Sequence[PolicyProbe] = import_object(path, "environment.probes")()
    chat = parts.chat
    logprobs = await parts.learners.answer_logprobs(chart_questions(probes, chat))
    parts.folder.record(CHART_FILE, make_chart(probes, logprobs))


@asynccontextmanager
async def _infrastructure(run: RunConfig, log_folder: Path) -> AsyncIterator[Environment]:
    """Ray and the run's environment, connected; what the run started ends with it.

    The order matters: a server refuses bad options before Ray takes seconds to start, and
    Ray forks processes, which must happen before this one speaks gRPC.
    """
    config = run.environment
    with ExitStack() as stack:
        server = None
        if isinstance(config, LocalEnvironment):
            log_file = log_folder / ENVIRONMENT_LOG_FILE
            server = LocalServer(config.package, config.options, config.max_sessions, log_file)
            stack.callback(server.stop)
            address = server.start().grpc
        else:
            address = config.address
        _start_ray()
        stack.callback(ray.shutdown)
        async with await _connect(run, address) as client:
            yield Environment(server, address, client, await client.describe())


async def _connect(run: RunConfig, address: str) -> AsyncEnvClient:
    """A client; a server that is not there when a run begins is the user's to mend."""
    try:
        return await AsyncEnvClient.connect(
            address,
            token=environment_token(run.environment),
            reconnect_timeout_s=run.environment.reconnect_timeout_s,
        )
    except (UnavailableError, AuthenticationError) as error:
        raise ConfigError(f"environment.address = '{address}': {error}") from error


def _start_ray() -> None:
    """Nothing; joins the Ray cluster of RAY_ADDRESS, or starts one on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS", "local")
    is_local = address == "local"
    ray.init(
        address=address,
        include_dashboard=False if is_local else None,
        log_to_driver=not is_local,
        logging_level=logging.WARNING,
        configure_logging=False,
    )


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


def _starting_point(run: RunConfig) -> tuple[Path, RunState]:
    checkpoint = newest_checkpoint(Path(run.output_dir) / run.name / CHECKPOINTS_FOLDER)
    return checkpoint, read_state(checkpoint)


def _learner_spec(run: RunConfig, model_path: str) -> LearnerSpec:
    return LearnerSpec(
        model_path=model_path,
        config=run.learner,
        algorithm=run.algorithm,
        temperature=run.rollout.temperature,
        max_tokens=run.rollout.max_tokens,
        seed=run.seed,
    )


def _worker_specs(
    run: RunConfig, model_path: str, environment: Environment, weights: WeightStoreConfig
) -> list[RolloutWorkerSpec]:
    return [
        RolloutWorkerSpec(
            run=run,
            model_path=model_path,
            environment_address=environment.address,
            weights=weights,
            seed=run.seed * 1_000_003 + index,
        )
        for index in range(run.rollout.num_workers)
    ]


async def _baselines(run: RunConfig, environment: Environment) -> dict[str, list[EpisodeOutcome]]:
    """The outcomes of the fixed policies that the evaluation compares with."""
    if not run.environment.baselines:
        return {}
    path = run.environment.policies
    assert path is not None
    policies = import_object(path, "environment.policies")(environment.description.options)
    unknown = sorted(set(run.environment.baselines) - policies.keys())
    if unknown:
        raise ConfigError(
            f"environment.baselines: '{path}' has no policy {unknown}; it has {sorted(policies)}"
        )
    return await play_baselines(environment.client, policies, run.environment.baselines, run.eval)


def _resolved(weights: WeightStoreConfig, run_path: Path) -> WeightStoreConfig:
    """The store's configuration with its folder named in full."""
    if isinstance(weights, FolderWeightStore):
        return weights.model_copy(
            update={"path": str(Path(weights.path or run_path / "weights").absolute())}
        )
    return weights


def with_available_generator(run: RunConfig) -> RunConfig:
    """The run as configured, or with transformers generating where vLLM is not installed."""
    if not isinstance(run.generator, VllmGenerator) or has_vllm():
        return run
    sys.stderr.write(
        "warning: vLLM is not installed here; generator.kind = 'transformers' takes over\n"
    )
    return run.model_copy(update={"generator": TransformersGenerator()})
