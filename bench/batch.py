"""What a batch costs the driver on its way from buffer to learner; writes results/batch.json.

    ours         the buffer makes the batch; the driver passes on a reference, and reads a summary
    in driver    the groups come to the driver, which makes the batch and puts it away: what it
                 costs to have the tokens pass through the process that runs both loops

Two shapes of a batch, about a million tokens each: short games (two turns of eight tokens, as in
blackjack) and long ones (eight turns of 128). Time is the processor's, in milliseconds per
million tokens: of the driver's event loop, and of the whole driver, whose other threads hold
the same interpreter lock. Memory is what the buffer holds, in bytes per token: of the arrays
that travel, and of Python lists with the same numbers.

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
"""Turns of an episode, and tokens of a prompt and of an answer."""


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one batch."""

    event_loop_ms: float
    driver_ms: float


class GroupHolder:
    """Holds groups, and gives them to whoever asks."""

    def put(self, groups: list[RolloutGroup]) -> None:
        """Keep `groups`."""
        self._groups = groups

    def get(self) -> list[RolloutGroup]:
        """The groups."""
        return self._groups


class Learner:
    """Takes a batch, as a rank does."""

    def train_step(self, batch: Batch) -> int:
        """The number of its samples."""
        return batch.num_samples


def make_groups(num_turns: int, num_tokens: int) -> list[RolloutGroup]:
    """Groups of random tokens, together as many as one batch has."""
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
    """What the action costs this process."""
    of_thread, of_process = time.thread_time(), time.process_time()
    await action()
    return Cost(1e3 * (time.thread_time() - of_thread), 1e3 * (time.process_time() - of_process))


async def measure_ours(groups: list[RolloutGroup]) -> list[Cost]:
    """A batch by reference, once for each round."""
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
        taken = await buffer.take(0, timeout_s=60.0)
        assert len(taken.groups) == len(groups)
        await learner.train_step.remote(taken.batch)

    costs = []
    for _ in range(NUM_ROUNDS):
        await buffer.restore(groups, {}, 0)
        costs.append(await measure(one_step))
    return costs


async def measure_in_driver(groups: list[RolloutGroup]) -> list[Cost]:
    """Groups to the driver and a batch from it, once for each round."""
    holder = ray.remote(num_cpus=0)(GroupHolder).remote()
    learner = ray.remote(num_cpus=0)(Learner).remote()
    algorithm = LanguageModelRun.model_validate(
        {"name": "bench", "environments": {"coins": {}}}
    ).algorithm
    await holder.put.remote(groups)

    async def one_step() -> None:
        batch = make_batch(await holder.get.remote(), algorithm)
        await learner.train_step.remote(ray.put(batch))

    return [await measure(one_step) for _ in range(NUM_ROUNDS)]


def bytes_held(make: Callable[[], object]) -> int:
    """Bytes of what `make` returns."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    held = make()
    num_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    del held
    return num_bytes


def as_lists(groups: list[RolloutGroup]) -> list[tuple[list[int], list[bool], list[float]]]:
    """The sequences of the groups, as lists of tokens, masks and log-probs."""
    sequences = [s for group in groups for rollout in group.rollouts for s in rollout.sequences]
    return [(s.token_ids.tolist(), s.loss_mask.tolist(), s.logprobs.tolist()) for s in sequences]


async def main() -> None:
    """Measure both shapes, print them and save them."""
    ray.init(address="local", include_dashboard=False, configure_logging=False)
    shapes = {}
    for name, shape in SHAPES.items():
        groups = make_groups(*shape)
        travelling = pickle.dumps(groups)
        row: dict[str, object] = {
            "tokens": NUM_TOKENS,
            "bytes_per_token_as_arrays": round(
                bytes_held(lambda data=travelling: pickle.loads(data)) / NUM_TOKENS, 1
            ),
            "bytes_per_token_as_lists": round(
                bytes_held(lambda groups=groups: as_lists(groups)) / NUM_TOKENS, 1
            ),
        }
        for way, costs in (
            ("ours", await measure_ours(groups)),
            ("in_driver", await measure_in_driver(groups)),
        ):
            for field in ("event_loop_ms", "driver_ms"):
                samples = [round(getattr(cost, field), 2) for cost in costs]
                row[f"{way}_{field}"] = statistics.median(samples)
                row[f"{way}_{field}_samples"] = samples
        shapes[name] = row
    result = {"command": "python bench/batch.py", **setting(), "shapes": shapes}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(shapes))


if __name__ == "__main__":
    asyncio.run(main())
