"""Measure the cost of a batch for the driver, from the buffer to the learner.

    ours         the buffer makes the batch; the driver only passes on a reference
    in driver    the driver gets the groups, makes the batch and stores it: the cost of passing the
                 tokens through the process that runs both loops

There are two shapes of a batch, each of about a million tokens: short episodes (two turns of eight
tokens, as in blackjack) and long episodes (eight turns of 128 tokens). Times are processor time in
milliseconds per million tokens, of the driver's event loop and of the whole driver, whose other
threads share the interpreter lock. Memory is that of the buffer in bytes per token, for the arrays
that are used and for Python lists with the same numbers. Results go to results/batch.json.

    python bench/batch.py
"""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import ray
from machine import setting

from ludus.proto.config import LanguageModelRun
from ludus.trainer.actors.buffer import RemoteBuffer
from ludus.trainer.actors.placement import place_on_one_machine
from ludus.trainer.core.types import (
    Batch,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    SampledCompletion,
    ScoredTerm,
    Turn,
    join_turns,
)
from ludus.trainer.data.batch import make_batch

RESULTS = Path(__file__).parent / "results" / "batch.json"
NUM_TOKENS = 1_000_000
GROUP_SIZE = 8
NUM_ROUNDS = 5
VOCABULARY = 150_000
SHAPES = {"short": (2, 8), "long": (8, 128)}
"""Number of turns per episode, and of tokens per prompt and per completion."""


@dataclass(frozen=True)
class Cost:
    """Processor time for one batch."""

    event_loop_ms: float
    driver_ms: float


class GroupActor:
    """An actor that stores groups and returns them on request."""

    def put(self, groups: list[RolloutGroup]) -> None:
        """Store the groups."""
        self._groups = groups

    def get(self) -> list[RolloutGroup]:
        """Return the groups."""
        return self._groups


class Learner:
    """An actor that receives a batch, like a rank."""

    def train_step(self, batch: Batch) -> int:
        """Return the number of samples."""
        return batch.num_samples


def make_groups(num_turns: int, num_tokens: int) -> list[RolloutGroup]:
    """Return groups of random tokens for one batch."""
    draw = random.Random(0)

    def numbers() -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(num_tokens)]

    def turn() -> Turn:
        logprobs = [-draw.random() for _ in range(num_tokens)]
        return Turn(numbers(), SampledCompletion(numbers(), logprobs, 0, has_end_token=True))

    def episode(number: int) -> Rollout:
        reward = float(number % 2)
        sequence = join_turns([turn() for _ in range(num_turns)])
        term, status = ScoredTerm("environment", reward), RolloutStatus.TERMINATED
        return Rollout("coins", number, (sequence,), reward, reward, (term,), status, 0)

    num_groups = NUM_TOKENS // (2 * num_turns * num_tokens * GROUP_SIZE)
    return [
        RolloutGroup(index, "coins", tuple(episode(number) for number in range(GROUP_SIZE)))
        for index in range(num_groups)
    ]


async def measure(action: Callable[[], Awaitable[object]]) -> Cost:
    """Run the action and return its processor time in this process."""
    start_thread_s, start_process_s = time.thread_time(), time.process_time()
    await action()
    thread_s = time.thread_time() - start_thread_s
    return Cost(1e3 * thread_s, 1e3 * (time.process_time() - start_process_s))


async def measure_ours(groups: list[RolloutGroup]) -> list[Cost]:
    """Pass a batch by reference and return the cost of each round."""
    run = LanguageModelRun.model_validate(
        {
            "name": "bench",
            "environments": {"coins": {}},
            "training": {"groups_per_step": len(groups)},
        }
    )
    buffer, learner = (
        RemoteBuffer(run, place_on_one_machine(run)),
        ray.remote(num_cpus=0)(Learner).remote(),
    )

    async def one_step() -> None:
        selection = await buffer.take(0, timeout_s=60.0)
        assert len(selection.groups) == len(groups)
        await learner.train_step.remote(selection.batch)

    costs = []
    for _ in range(NUM_ROUNDS):
        await buffer.restore(groups, {}, 0)
        costs.append(await measure(one_step))
    return costs


async def measure_in_driver(groups: list[RolloutGroup]) -> list[Cost]:
    """Make the batch in the driver and return the cost of each round."""
    group_actor = ray.remote(num_cpus=0)(GroupActor).remote()
    learner = ray.remote(num_cpus=0)(Learner).remote()
    algorithm = LanguageModelRun.model_validate(
        {"name": "bench", "environments": {"coins": {}}}
    ).algorithm
    await group_actor.put.remote(groups)

    async def one_step() -> None:
        batch = make_batch(await group_actor.get.remote(), algorithm)
        await learner.train_step.remote(ray.put(batch))

    return [await measure(one_step) for _ in range(NUM_ROUNDS)]


def measure_bytes(make: Callable[[], object]) -> int:
    """Return the size of the object that `make` returns, in bytes."""
    tracemalloc.start()
    start_bytes = tracemalloc.get_traced_memory()[0]
    result = make()
    num_bytes = tracemalloc.get_traced_memory()[0] - start_bytes
    tracemalloc.stop()
    del result
    return num_bytes


def as_lists(groups: list[RolloutGroup]) -> list[tuple[list[int], list[bool], list[float]]]:
    """Return the tokens, masks and log-probs of the groups' sequences as lists."""
    sequences = [s for group in groups for rollout in group.rollouts for s in rollout.sequences]
    return [(s.token_ids.tolist(), s.loss_mask.tolist(), s.logprobs.tolist()) for s in sequences]


async def main() -> None:
    """Measure both shapes; print and save the results."""
    ray.init(address="local", include_dashboard=False, configure_logging=False)
    shapes = {}
    for name, shape in SHAPES.items():
        groups = make_groups(*shape)
        pickled = pickle.dumps(groups)
        row: dict[str, object] = {
            "tokens": NUM_TOKENS,
            "bytes_per_token_as_arrays": round(
                measure_bytes(lambda data=pickled: pickle.loads(data)) / NUM_TOKENS, 1
            ),
            "bytes_per_token_as_lists": round(
                measure_bytes(lambda groups=groups: as_lists(groups)) / NUM_TOKENS, 1
            ),
        }
        for variant, costs in (
            ("ours", await measure_ours(groups)),
            ("in_driver", await measure_in_driver(groups)),
        ):
            for field in ("event_loop_ms", "driver_ms"):
                samples = [round(getattr(cost, field), 2) for cost in costs]
                row[f"{variant}_{field}"] = statistics.median(samples)
                row[f"{variant}_{field}_samples"] = samples
        shapes[name] = row
    result = {"command": "python bench/batch.py", **setting(), "shapes": shapes}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(shapes))


if __name__ == "__main__":
    asyncio.run(main())
