"""A program that trains like `ludus train` and breaks its rollout workers during the run.

The product has no code for this: Ray can call any function in an actor.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ludus.trainer import Trainer
from ludus.trainer.actors.workers import RolloutWorkers

WRONG_WEIGHTS_STEP, WRONG_WEIGHTS_WORKER = 12, 1
"""The step after which this worker loads wrong weights, once."""
ENGINE_FAILURE_STEP, ENGINE_FAILURE_WORKER = 24, 0
"""The step after which this worker's engine fails permanently."""


def load_wrong_weights_once(worker: Any) -> None:
    """Let the engine of a worker load different weights at the next load."""
    engine = worker.components.engine.engine
    load_weights = engine.load_weights

    def load_wrong_weights(state: dict[str, Any]) -> None:
        engine.load_weights = load_weights
        load_weights({name: tensor * 1.1 for name, tensor in state.items()})

    engine.load_weights = load_wrong_weights


def fail_permanently(worker: Any) -> None:
    """Let the engine of a worker fail in every step."""

    def step() -> None:
        raise MemoryError("no more memory")

    worker.components.engine.engine.step = step


async def call_in_worker(
    workers: RolloutWorkers, worker_number: int, function: Callable[[Any], None]
) -> None:
    """Call a function in the process of a worker."""
    [worker] = [worker for worker in workers.roster.ready_workers if worker.number == worker_number]
    await worker.actor.__ray_call__.remote(function)


async def train(config: Path, overrides: list[str]) -> None:
    """Train to the end; break a worker after each of two steps."""
    async with Trainer(config, overrides=overrides) as trainer:
        workers = trainer.components.workers
        assert isinstance(workers, RolloutWorkers)
        async for step in trainer.steps():
            if step.number == WRONG_WEIGHTS_STEP:
                await call_in_worker(workers, WRONG_WEIGHTS_WORKER, load_wrong_weights_once)
            if step.number == ENGINE_FAILURE_STEP:
                await call_in_worker(workers, ENGINE_FAILURE_WORKER, fail_permanently)
        await trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    asyncio.run(train(arguments.config, arguments.set))
