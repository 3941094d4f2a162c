"""Program that trains with `Trainer`, like a notebook, and prints its results as JSON.

Argument: folder. The program starts Ray, configures logging, runs its event loop in a thread and
uses a closure as a reward function.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import ray

from ludus.proto.errors import CheckpointError
from ludus.proto.runs import read_metrics
from ludus.trainer import Step, Trainer
from tests.e2e.runs import EXAMPLE, SMALL_RUN

OUTPUT: dict[str, Any] = {}


class BodyError(Exception):
    """An error that the body of `async with` raises."""


def make_settings(folder: str) -> dict[str, Any]:
    """Return the settings of the small example, with this program's functions."""
    penalty = 0.01
    words = "word by word"

    def brevity(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        assert words
        return [-penalty * len(completion) for completion in completions]

    run = Trainer(
        EXAMPLE, overrides=[*SMALL_RUN, "name=run", f"output_dir={json.dumps(folder)}"]
    ).run
    fields = run.model_dump(mode="json")
    fields["environments"]["blackjack"]["rewards"] = [{}, brevity]
    fields["training"]["num_steps"] = 4
    return fields


async def train_two_steps(folder: str) -> None:
    """Train two steps, save, evaluate, and raise an error in the next step."""
    steps: list[Step] = []
    async with Trainer(make_settings(folder)) as trainer:
        OUTPUT["before"] = await trainer.policy.generate("hard 15 vs 10", num=3)
        async for step in trainer.steps():
            steps.append(step)
            if step.number == 1:
                break
        await asyncio.sleep(0.5)
        rows = [row for row in read_metrics(trainer.folder) if row.kind == "train"]
        OUTPUT["steps while paused"] = len(rows)
        OUTPUT["saved"] = (await trainer.save()).name
        report = (await trainer.evaluate(20))["blackjack"]
        OUTPUT["games"] = report.policy.num_games
        async for step in trainer.steps():
            steps.append(step)
            OUTPUT["steps"] = [step_result.number for step_result in steps]
            OUTPUT["terms"] = sorted(
                metric for metric in step.environments["blackjack"] if "term" in metric
            )
            OUTPUT["transcripts"] = len(step.transcripts)
            raise BodyError


async def finish_training(folder: str) -> None:
    """Resume the run and train the remaining steps."""
    async with Trainer(make_settings(folder), resume="always") as trainer:
        sampling = {"num": 2, "temperature": 0.0}
        OUTPUT["greedy"] = await trainer.policy.generate(
            [{"role": "user", "content": "hard 20 vs 10"}], **sampling
        )
        train_task = asyncio.create_task(trainer.train())
        await asyncio.sleep(0)
        try:
            await trainer.save()
        except CheckpointError as error:
            OUTPUT["refused"] = str(error)
        summary = await train_task
        OUTPUT["finished"], OUTPUT["num_steps"] = summary.finished, summary.num_steps


def main(folder: str) -> None:
    """Train twice in a thread, then print the output."""
    log_output = io.StringIO()
    logging.basicConfig(stream=log_output, level=logging.WARNING)
    handlers, sigint_handler = list(logging.getLogger().handlers), signal.getsignal(signal.SIGINT)
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    num_cpus = ray.available_resources()["CPU"]

    def train_all() -> None:
        try:
            asyncio.run(train_two_steps(folder))
        except BodyError:
            OUTPUT["raised"] = True
        asyncio.run(finish_training(folder))

    thread = threading.Thread(target=train_all)
    thread.start()
    thread.join()
    OUTPUT["ray stays"] = ray.is_initialized()
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU") != num_cpus and time.monotonic() < deadline:
        time.sleep(0.2)
    OUTPUT["ray is free"] = ray.available_resources().get("CPU") == num_cpus
    OUTPUT["logging stays"] = logging.getLogger().handlers == handlers
    OUTPUT["signals stay"] = signal.getsignal(signal.SIGINT) == sigint_handler
    sys.stdout.write(json.dumps(OUTPUT) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
