"""The commands for language-model runs: train a run, check it, and evaluate a checkpoint."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ludus.env.runtime import freeze_heap
from ludus.proto.config import LanguageModelRun, PretrainedModel
from ludus.proto.memory_plan import MEMORY_PLAN_PREFIX
from ludus.proto.runs import MODEL_SIZE_PREFIX, RESOLVED_PREFIX, Evaluation, Resume
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.cpu_threads import resolve_num_threads
from ludus.trainer.actors.placement import Roles
from ludus.trainer.actors.ray_address import is_local
from ludus.trainer.actors.workers import RolloutWorkers
from ludus.trainer.core.stopping import stop_on_signals
from ludus.trainer.core.tasks import gather_or_cancel
from ludus.trainer.driver.build import make_worker_spec, play_all_baselines, start_infrastructure
from ludus.trainer.driver.checks import check_start, resolve_config, resolve_memory
from ludus.trainer.driver.evaluation import Evaluator
from ludus.trainer.driver.invalid_actions import (
    fetch_return_ranges,
    needs_choice,
    resolve_invalid_action_rewards,
)
from ludus.trainer.driver.trainer import Trainer
from ludus.trainer.run.checkpoint import MODEL_FOLDER, RunState, read_state
from ludus.trainer.run.lifecycle import log_to_folder
from ludus.trainer.setup.episode_lengths import warn_of_short_limits
from ludus.trainer.setup.model_size import measure_model


def train(run: LanguageModelRun, *, resume: Resume, overwrite: bool) -> Path:
    """Train a run to its last step and return its folder.

    Raises:
        UserError: the run cannot start as configured.
        RunStopped: SIGINT, SIGTERM or the control file stopped the run.
    """
    trainer = Trainer(run, resume=resume, overwrite=overwrite, print_rows=not is_local())
    asyncio.run(_run_trainer(trainer))
    return trainer.folder


async def _run_trainer(trainer: Trainer) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    cancel_run = partial(loop.call_soon_threadsafe, task.cancel)
    # Ray replaces signal handlers, so they are set after the start. They stay until the run ends.
    with ExitStack() as stack:
        async with trainer:
            freeze_heap()
            stack.enter_context(stop_on_signals(trainer.stop_request, cancel_run))
            await trainer.train()


def check(run: LanguageModelRun, *, resume: Resume, overwrite: bool) -> None:
    """Check everything that could stop a run from starting, without writing anything.

    Standard output gets the configuration, with the settings that its environments and the memory
    determine, the memory plan, and the size of a pretrained model.
    """
    adapted_run = resolve_config(run)
    check_start(adapted_run, resume)
    warn_of_short_limits(adapted_run)
    adapted_run, memory_plan = resolve_memory(resolve_num_threads(adapted_run))
    # The configuration keeps the user's paths.
    fields = ("generator", "rollout", "learner")
    run = run.model_copy(update={field: getattr(adapted_run, field) for field in fields})
    if needs_choice(run):
        run = resolve_invalid_action_rewards(run, asyncio.run(fetch_return_ranges(run)))
    sys.stdout.write(f"{RESOLVED_PREFIX}{run.model_dump_json()}\n")
    sys.stdout.write(f"{MEMORY_PLAN_PREFIX}{memory_plan.model_dump_json()}\n")
    if isinstance(adapted_run.model, PretrainedModel):
        size = measure_model(adapted_run.model)
        sys.stdout.write(f"{MODEL_SIZE_PREFIX}{size.model_dump_json()}\n")


def evaluate(run: LanguageModelRun, checkpoint: Path) -> Evaluation:
    """Evaluate the policy of a checkpoint and the fixed policies in each environment."""
    run = resolve_config(run)
    read_state(checkpoint, RunState)
    with log_to_folder(run.folder, run.log_level):
        return asyncio.run(_evaluate_checkpoint(run, checkpoint))


async def _evaluate_checkpoint(run: LanguageModelRun, checkpoint: Path) -> Evaluation:
    async with start_infrastructure(run, run.folder, Roles.WORKERS) as infrastructure:
        placement = infrastructure.placement
        run = resolve_invalid_action_rewards(run, infrastructure.return_ranges)
        run = resolve_num_threads(run, Roles.WORKERS)
        spec = make_worker_spec(run, str(checkpoint / MODEL_FOLDER), infrastructure, run.folder)
        workers, baselines = await gather_or_cancel(
            RolloutWorkers.start(spec, RemoteBuffer(run, placement), placement),
            play_all_baselines(run, infrastructure.environments),
        )
        try:
            evaluator = Evaluator(
                run.eval,
                run.environments,
                workers,
                baselines,
                infrastructure.find_max_games(run.eval),
                infrastructure.games,
            )
            return Evaluation(environments=await evaluator.evaluate(run.eval.num_games))
        finally:
            await workers.close()
