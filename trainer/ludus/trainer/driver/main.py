"""What the command line does with a run: trains it as a process of its own, or judges it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ludus.env.runtime import freeze_heap
from ludus.proto.config import LanguageModelRun
from ludus.proto.runs import CHECKPOINTS_FOLDER, Evaluation, Resume
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.cluster import is_local
from ludus.trainer.actors.workers import RolloutWorkers
from ludus.trainer.core.tasks import together
from ludus.trainer.driver.build import baselines_of, infrastructure_of, resolved, worker_spec
from ludus.trainer.driver.evaluation import Evaluator
from ludus.trainer.driver.trainer import Trainer
from ludus.trainer.run.checkpoint import model_folder, newest_checkpoint, read_state
from ludus.trainer.run.folder import logging_to, path_of

_log = logging.getLogger(__name__)


async def train(run: LanguageModelRun, *, resume: Resume, overwrite: bool) -> Path:
    """The folder of the run, which has trained its last step.

    Raises:
        UserError: the run cannot start as configured.
        Stopped: SIGINT or SIGTERM ended it.
    """
    trainer = Trainer(run, resume=resume, overwrite=overwrite, print_rows=not is_local())
    async with trainer:
        freeze_heap()
        with _stop_on_signal(trainer):
            await trainer.train()
    return trainer.folder


async def evaluate(
    run: LanguageModelRun, checkpoint: Path | None, *, num_games: int, temperature: float | None
) -> Evaluation:
    """How a checkpoint's policy does beside the fixed policies, in each environment."""
    run = resolved(run)
    chosen = run.eval.model_copy(
        update={
            "num_games": num_games,
            "temperature": run.eval.temperature if temperature is None else temperature,
        }
    )
    run = run.model_copy(update={"eval": chosen})
    run_path = path_of(run)
    checkpoint = _named_checkpoint(checkpoint, run_path / CHECKPOINTS_FOLDER)
    read_state(checkpoint)
    with logging_to(run_path, run.log_level):
        return await _judge(run, run_path, checkpoint, num_games)


def _named_checkpoint(path: Path | None, folder: Path) -> Path:
    """A checkpoint by its path, or by its name among those of the run; else the newest."""
    if path is None:
        return newest_checkpoint(folder).absolute()
    of_run = folder / path
    return (of_run if not path.exists() and of_run.exists() else path).absolute()


async def _judge(
    run: LanguageModelRun, run_path: Path, checkpoint: Path, num_games: int
) -> Evaluation:
    async with infrastructure_of(run, run_path, with_learner=False) as infrastructure:
        placement = infrastructure.placement
        spec = worker_spec(run, str(model_folder(checkpoint)), infrastructure, run_path)
        workers, baselines = await together(
            RolloutWorkers.start(spec, RemoteBuffer(run, placement), placement),
            baselines_of(run, infrastructure.environments),
        )
        try:
            judge = Evaluator(run.eval, run.environments, workers, baselines)
            return Evaluation(environments=await judge.judge(num_games))
        finally:
            await workers.close()


@contextmanager
def _stop_on_signal(trainer: Trainer) -> Iterator[None]:
    """SIGINT and SIGTERM end the run after its step; a second one ends it at once."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        if trainer.is_stopping or trainer.is_trained:
            task.cancel()
            return
        _log.warning("stopping after this step; again to stop at once")
        trainer.stop()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.add_signal_handler(number, task.cancel)
