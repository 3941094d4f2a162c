"""The commands for fine-tuning runs: train a run, and check it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path

from ludus.proto.config import SftRun
from ludus.proto.runs import CONFIG_FILE, SUMMARY_FILE, Phase, Resume, SftSummary
from ludus.trainer.actors.cluster import place_in_ray
from ludus.trainer.actors.cpu_threads import resolve_num_threads
from ludus.trainer.actors.learner import LearnerGroup
from ludus.trainer.actors.placement import Roles
from ludus.trainer.actors.ray_address import check_cluster, is_local
from ludus.trainer.core.output import warn_user
from ludus.trainer.core.stopping import RunStopped, StopRequest, stop_on_signals
from ludus.trainer.core.tasks import CancellingTaskGroup
from ludus.trainer.driver.checks import check_folder, check_gpus
from ludus.trainer.run.checkpoint import LEARNER_FOLDER
from ludus.trainer.run.lifecycle import RunStorage, apply_control_files, find_start, open_run
from ludus.trainer.run.metrics_writer import MetricsWriter
from ludus.trainer.run.summary import list_installed_versions
from ludus.trainer.setup.shared_folder import FolderToken
from ludus.trainer.sft.preparation import PreparedRun, prepare_run
from ludus.trainer.sft.training import SftLearners, SftLoop, SftState


def train(run: SftRun, *, resume: Resume, overwrite: bool) -> Path:
    """Train a run to its last step and return its folder.

    Raises:
        UserError: the run cannot start as configured.
        RunStopped: SIGINT, SIGTERM or the control file stopped the run.
    """
    start_s = time.monotonic()
    prepared = prepare_run(run)
    asyncio.run(_run(prepared, resume, overwrite, start_s))
    return run.folder


def check(run: SftRun, *, resume: Resume, overwrite: bool) -> None:
    """Check everything that could stop a run from starting, without writing anything."""
    prepared = prepare_run(run)
    learner_run = prepared.run.make_learner_run()
    if is_local():
        check_gpus(learner_run, Roles.RANKS)
    else:
        check_cluster()
    check_folder(run.folder)
    _, state, _ = find_start(run, resume, SftState)
    prepared.check_fingerprint(state)
    data = prepared.data
    sys.stdout.write(
        f"{len(data.train_indices)} training conversations, {len(data.validation_indices)} held "
        f"out, {prepared.run.training.num_steps} steps\n"
    )


async def _run(prepared: PreparedRun, resume: Resume, overwrite: bool, start_s: float) -> None:
    run, stop_request = prepared.run, StopRequest(prepared.run.training.stop_grace_s)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    num_kept = run.training.keep_checkpoints
    with open_run(run, SftState, num_kept, resume=resume, overwrite=overwrite) as storage:
        prepared.check_fingerprint(storage.state)
        storage.state.fingerprint = prepared.data.compute_fingerprint()
        resume_from = None if storage.checkpoint is None else storage.state.step
        job_log = None if is_local() else sys.stdout
        metrics = MetricsWriter(run, run.folder, resume_from=resume_from, job_log=job_log)
        with closing(metrics):
            metrics.log_phase(Phase.PREPARE_MODEL)
            async with _start_learners(run, storage) as learners:
                # Ray replaces signal handlers, so they are set after the start.
                cancel_run = partial(loop.call_soon_threadsafe, task.cancel)
                with stop_on_signals(stop_request, cancel_run):
                    await _run_loop(prepared, storage, metrics, learners, stop_request, start_s)


@asynccontextmanager
async def _start_learners(
    run: SftRun, storage: RunStorage[SftState]
) -> AsyncIterator[LearnerGroup]:
    """Start the learner's ranks, restore the checkpoint, and stop the ranks after the block."""
    learner_run = resolve_num_threads(run.make_learner_run(), Roles.RANKS)
    async with AsyncExitStack() as stack:
        placement = await stack.enter_async_context(place_in_ray(learner_run, Roles.RANKS))
        token = None
        if not placement.is_one_machine:
            token = FolderToken.write(run.folder)
            stack.callback(token.remove)
        learners = LearnerGroup(learner_run, placement, token)
        stack.callback(learners.close)
        await learners.start(run.model.path, learner_run.weights)
        if storage.checkpoint is not None:
            await learners.load(storage.checkpoint / LEARNER_FOLDER)
        storage.folder.write(CONFIG_FILE, run)
        yield learners


async def _run_loop(
    prepared: PreparedRun,
    storage: RunStorage[SftState],
    metrics: MetricsWriter,
    learners: SftLearners,
    stop_request: StopRequest,
    start_s: float,
) -> None:
    run, state = prepared.run, storage.state
    loop = SftLoop(run, prepared.data, learners, storage, metrics, stop_request)
    async with CancellingTaskGroup() as tasks:
        tasks.start(apply_control_files(run.folder, _ignore_workers, stop_request))
        await loop.run()
    if not loop.is_finished:
        abandonment = f"; step {state.step + 1} was abandoned, and is trained again"
        raise RunStopped(
            f"stopped after step {state.step}{abandonment if loop.is_step_abandoned else ''}",
            is_from_control_file=stop_request.is_from_control_file,
        )
    summary = _make_summary(prepared, loop, state, metrics.clock.elapsed_s, start_s)
    storage.folder.write(SUMMARY_FILE, summary)
    metrics.log_phase(Phase.DONE, state.step)


def _make_summary(
    prepared: PreparedRun, loop: SftLoop, state: SftState, elapsed_s: float, start_s: float
) -> SftSummary:
    run, data = prepared.run, prepared.data
    has_best = run.validation.keep == "best" and state.best_loss is not None
    return SftSummary(
        name=run.name,
        model=run.model.path,
        data=run.data.path,
        model_folder=str(loop.model_folder),
        seed=run.seed,
        num_steps=state.step,
        has_stopped_early=loop.has_stopped_early,
        model_step=state.best_step if has_best else state.step,
        num_train=len(data.train_indices),
        num_validation=len(data.validation_indices),
        num_dropped=data.train_set.num_dropped,
        num_truncated=data.train_set.num_truncated,
        num_conversations_trained=state.step * run.training.batch_size,
        num_tokens_trained=state.num_tokens_trained,
        num_skipped_updates=state.num_skipped_updates,
        num_learner_ranks=run.learner.num_ranks,
        start_loss=state.start_loss,
        validation_loss=state.validation_loss,
        best_loss=state.best_loss,
        wall_seconds_training=elapsed_s,
        wall_seconds_total=time.monotonic() - start_s,
        versions=list_installed_versions(),
    )


def _ignore_workers(num_workers: int) -> None:
    """Ignore a request for rollout workers, because the run has none."""
    warn_user(f"a fine-tuning run has no rollout workers, but {num_workers} were requested")
