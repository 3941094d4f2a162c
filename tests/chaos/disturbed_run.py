"""A program that trains as `ludus train` does, and breaks its own rollout workers on the way.

Nothing in the product knows of it: what breaks is put into the workers' processes by Ray's call of
any function in an actor.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ludus.trainer import Trainer
from ludus.trainer.actors.workers import RolloutWorkers

BREACH_AT, BREACHING = 12, 1
"""The step after which this worker loads weights wrongly, once."""
LOSS_AT, LOSING = 24, 0
"""The step after which this worker's engine fails for good."""


def load_wrongly_once(worker: Any) -> None:
    """Let the engine of a worker change the weights that it loads next."""
    engine = worker.parts.engine.engine
    load = engine.load_weights

    def load_wrongly(state: dict[str, Any]) -> None:
        engine.load_weights = load
        load({name: tensor * 1.1 for name, tensor in state.items()})

    engine.load_weights = load_wrongly


def fail_for_good(worker: Any) -> None:
    """Let the engine of a worker fail in every step from now on."""

    def step() -> None:
        raise MemoryError("no more memory")

    worker.parts.engine.engine.step = step


async def put_into(workers: RolloutWorkers, number: int, change: Callable[[Any], None]) -> None:
    """Change the process of the worker of this number."""
    [worker] = [worker for worker in workers.ready_workers if worker.number == number]
    await worker.actor.__ray_call__.remote(change)


async def train(config: Path, overrides: list[str]) -> None:
    """Train the run to its end; after two of its steps a worker is broken."""
    async with Trainer(config, overrides=overrides) as trainer:
        workers = trainer._components.workers
        assert isinstance(workers, RolloutWorkers)
        async for step in trainer.steps():
            if step.number == BREACH_AT:
                await put_into(workers, BREACHING, load_wrongly_once)
            if step.number == LOSS_AT:
                await put_into(workers, LOSING, fail_for_good)
        await trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    asyncio.run(train(arguments.config, arguments.set))
