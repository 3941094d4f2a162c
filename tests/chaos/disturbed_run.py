"""A program that trains like `ludus train` and breaks its rollout workers during the run.

Production code has no hooks for these faults. This program uses Ray to call functions in actors.
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
"""Number of the step after which a worker loads wrong weights once, and the worker's number."""
ENGINE_FAILURE_STEP, ENGINE_FAILURE_WORKER = 24, 0
"""Number of the step after which an engine fails permanently, and its worker's number."""


def load_wrong_weights_once(worker: Any) -> None:
    """Make a worker's engine load wrong weights at the next load."""
    engine = worker.components.engine.engine
    load_weights = engine.load_weights

    def load_wrong_weights(state: dict[str, Any]) -> None:
        engine.load_weights = load_weights
        load_weights({name: tensor * 1.1 for name, tensor in state.items()})

    engine.load_weights = load_wrong_weights


def fail_permanently(worker: Any) -> None:
    """Make a worker's engine raise an error in every step."""

    def raise_memory_error() -> None:
        raise MemoryError("out of memory")

    worker.components.engine.engine.step = raise_memory_error


async def call_in_worker(
    workers: RolloutWorkers, worker_number: int, function: Callable[[Any], None]
) -> None:
    """Call a function in the process of a worker."""
    [worker] = [worker for worker in workers.roster.ready_workers if worker.number == worker_number]
    await worker.actor.__ray_call__.remote(function)


async def train(config: Path, overrides: list[str]) -> None:
    """Train to the end, and break a worker after each of two steps."""
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
