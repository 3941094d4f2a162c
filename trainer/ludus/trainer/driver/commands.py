"""The commands for language-model runs: train a run, and evaluate a checkpoint."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from ludus.env.runtime import freeze_heap
from ludus.proto.config import LanguageModelRun
from ludus.proto.runs import CHECKPOINTS_FOLDER, Evaluation, Resume
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.cluster import is_local
from ludus.trainer.actors.workers import RolloutWorkers
from ludus.trainer.core.stopping import stop_on_signals
from ludus.trainer.core.tasks import gather_or_cancel
from ludus.trainer.driver.build import make_worker_spec, play_all_baselines, start_infrastructure
from ludus.trainer.driver.evaluation import Evaluator
from ludus.trainer.driver.trainer import Trainer
from ludus.trainer.run.checkpoint import (
    RunState,
    find_newest_checkpoint,
    model_folder,
    read_state,
)
from ludus.trainer.run.folder import log_to_folder, run_path
from ludus.trainer.setup.resolve import resolve_config


async def train(run: LanguageModelRun, *, resume: Resume, overwrite: bool) -> Path:
    """Train a run to its last step and return its folder.

    Raises:
        UserError: the run cannot start as configured.
        RunStopped: SIGINT, SIGTERM or the control file stopped the run.
    """
    trainer = Trainer(run, resume=resume, overwrite=overwrite, print_rows=not is_local())
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    cancel = task.cancel
    # Ray replaces signal handlers, so they are set after the start. They stay until the run ends.
    with ExitStack() as stack:
        async with trainer:
            freeze_heap()
            stack.enter_context(
                stop_on_signals(trainer.stop_request, lambda: loop.call_soon_threadsafe(cancel))
            )
            await trainer.train()
    return trainer.folder


async def evaluate(
    run: LanguageModelRun, checkpoint: Path | None, *, num_games: int, temperature: float | None
) -> Evaluation:
    """Evaluate the policy of a checkpoint and the fixed policies in each environment.

    Args:
        checkpoint: path, or name within the run. Default: the newest checkpoint.
        temperature: sampling temperature. Default: eval.temperature.
    """
    run = resolve_config(run)
    changes: dict[str, object] = {"num_games": num_games}
    if temperature is not None:
        changes["temperature"] = temperature
    run = run.model_copy(update={"eval": run.eval.model_copy(update=changes)})
    run_folder = run_path(run)
    checkpoint = find_checkpoint(checkpoint, run_folder / CHECKPOINTS_FOLDER)
    read_state(checkpoint, RunState)
    with log_to_folder(run_folder, run.log_level):
        return await _evaluate_checkpoint(run, run_folder, checkpoint, num_games)


def find_checkpoint(path: Path | None, checkpoints: Path) -> Path:
    """Return the checkpoint with a path or a name, or the newest checkpoint, as absolute path."""
    if path is None:
        return find_newest_checkpoint(checkpoints).absolute()
    named_checkpoint = checkpoints / path
    if not path.exists() and named_checkpoint.exists():
        return named_checkpoint.absolute()
    return path.absolute()


async def _evaluate_checkpoint(
    run: LanguageModelRun, run_folder: Path, checkpoint: Path, num_games: int
) -> Evaluation:
    async with start_infrastructure(run, run_folder, with_learner=False) as infrastructure:
        placement = infrastructure.placement
        spec = make_worker_spec(run, str(model_folder(checkpoint)), infrastructure, run_folder)
        workers, baselines = await gather_or_cancel(
            RolloutWorkers.start(spec, RemoteBuffer(run, placement), placement),
            play_all_baselines(run, infrastructure.environments),
        )
        try:
            evaluator = Evaluator(run.eval, run.environments, workers, baselines)
            return Evaluation(environments=await evaluator.evaluate(num_games))
        finally:
            await workers.close()
