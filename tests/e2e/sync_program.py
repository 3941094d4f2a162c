"""Program that trains with `SyncTrainer`, like a script, and prints its results as JSON.

Argument: folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import ludus.trainer
from ludus.trainer import SyncTrainer, train
from tests.e2e.runs import EXAMPLE, SMALL_RUN

OUTPUT: dict[str, Any] = {}


def main(folder: str) -> None:
    """Train two steps, stop with Ctrl-C, resume inside an event loop, and print the output."""
    settings = (*SMALL_RUN, "name=run", f"output_dir={json.dumps(folder)}", "training.num_steps=4")
    with (
        contextlib.suppress(KeyboardInterrupt),
        SyncTrainer(EXAMPLE, overrides=settings) as trainer,
    ):
        OUTPUT["before"] = trainer.generate("hard 15 vs 10", num=3)
        for step in trainer.steps():
            OUTPUT["first step"] = step.number
            break
        OUTPUT["saved"] = trainer.save().name
        OUTPUT["games"] = trainer.evaluate(20)["blackjack"].policy.num_games
        for step in trainer.steps():
            OUTPUT["second step"] = step.number
            OUTPUT["columns"] = {name: len(column) for name, column in trainer.metrics.items()}
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(60)  # the signal ends it
        OUTPUT["not interrupted"] = True
    OUTPUT["is loop closed"] = threading.active_count() == 1 or [
        thread.name for thread in threading.enumerate()
    ]

    async def run_cell() -> None:
        summary = train(EXAMPLE, overrides=settings, resume="always")
        OUTPUT["finished"], OUTPUT["num_steps"] = summary.finished, summary.num_steps

    asyncio.run(run_cell())
    OUTPUT["names"] = dir(ludus.trainer)
    sys.stdout.write(json.dumps(OUTPUT) + "\n")


if __name__ == "__main__":
    # A shell that starts the tests in the background lets them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(sys.argv[1])
