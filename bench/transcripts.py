"""Measure the cost of transcripts as a share of a training step; the limit is 1 %.

    worker: selects, writes --pickle--> buffer --pickle--> training loop: transcripts.jsonl

Each example runs once for a few steps, with the default number of transcripts per step. Selecting
and writing in the rollout worker, and appending in the training loop, are timed in their process.
Pickling is timed afterwards with the same transcripts. The sum is an upper bound, because the
worker's part overlaps with training.

    python bench/transcripts.py [--only blackjack] [--steps 40]

Prints a row per example, and writes bench/results/transcripts.json. The exit code is 1 if a
share is above 1 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import setting

# The agents' example names a module of the repository.
sys.path.insert(0, str(Path(__file__).parents[1]))

from ludus.proto.runs import TRANSCRIPTS_FILE, read_transcripts
from ludus.trainer import Trainer

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "transcripts.json"
EXAMPLES = {
    "blackjack": "blackjack/tiny.toml",
    "tic_tac_toe": "tic_tac_toe/tiny.toml",
    "agents": "agents/tiny.toml",
}
"""Examples with the shortest steps, with several turns, and with the longest histories."""
MAX_SHARE = 0.01
NUM_WARM_STEPS = 3
NUM_PICKLES = 2
"""Number of transfers: worker to buffer, and buffer to training loop."""


@dataclass(frozen=True, slots=True)
class Row:
    """Cost of the transcripts of one example, in seconds per step."""

    example: str
    num_steps: int
    transcripts_per_step: float
    characters_per_transcript: float
    step_s: float
    written_s: float
    sent_s: float
    appended_s: float

    @property
    def share(self) -> float:
        """Share of a step."""
        return (self.written_s + self.sent_s + self.appended_s) / self.step_s


class TimedFunction:
    """A function that records its total time in seconds."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start_s


def time_writing(worker: Any) -> None:
    """Time the writing of transcripts in the process of a worker."""
    from ludus.trainer.actors import rollout_worker
    from ludus.trainer.rollout import group

    group.make_transcripts = TimedFunction(group.make_transcripts)
    rollout_worker.count_transcripts = TimedFunction(rollout_worker.count_transcripts)


def measure_writing_seconds(worker: Any) -> float:
    """Return the seconds of writing since `time_writing`."""
    from ludus.trainer.actors import rollout_worker
    from ludus.trainer.rollout import group

    return group.make_transcripts.seconds + rollout_worker.count_transcripts.seconds


async def run(name: str, num_steps: int, folder: Path) -> Row:
    """Run an example and return the cost of its transcripts."""
    overrides = [
        *(f"output_dir={folder}", f"name={name}", f"training.num_steps={num_steps}"),
        *("eval.num_games_during=0", "eval.num_games=10", "seed=100"),
    ]
    config = ROOT / "examples" / EXAMPLES[name]
    async with Trainer(config, overrides=overrides) as trainer:
        steps = trainer.steps()
        for _ in range(NUM_WARM_STEPS):
            await anext(steps)
        workers = [worker.actor for worker in trainer.components.workers.roster.ready_workers]
        await asyncio.gather(*(worker.__ray_call__.remote(time_writing) for worker in workers))
        metrics = trainer.components.metrics
        appending = metrics.log_transcripts = TimedFunction(metrics.log_transcripts)
        start_s = time.perf_counter()
        async for step in steps:
            if step.number == num_steps:  # the workers still exist while the loop waits
                took_s = time.perf_counter() - start_s
                calls = [worker.__ray_call__.remote(measure_writing_seconds) for worker in workers]
                written_s = sum(await asyncio.gather(*calls))
        await trainer.train()
    num_timed = num_steps - NUM_WARM_STEPS
    all_transcripts = list(read_transcripts(folder / name))
    timed = [transcript for transcript in all_transcripts if transcript.step > NUM_WARM_STEPS]
    start_s = time.perf_counter()
    for transcript in timed:
        for _ in range(NUM_PICKLES):
            pickle.loads(pickle.dumps(transcript, pickle.HIGHEST_PROTOCOL))
    sent_s = time.perf_counter() - start_s
    size = len((folder / name / TRANSCRIPTS_FILE).read_text(encoding="utf-8"))
    return Row(
        example=name,
        num_steps=num_timed,
        transcripts_per_step=len(timed) / num_timed,
        characters_per_transcript=size / len(all_transcripts),
        step_s=took_s / num_timed,
        written_s=written_s / num_timed,
        sent_s=sent_s / num_timed,
        appended_s=appending.seconds / num_timed,
    )


def main() -> int:
    """Return the exit code: 1 if a share is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=EXAMPLES, default=list(EXAMPLES), metavar="NAME"
    )
    parser.add_argument("--steps", type=int, default=40, metavar="N")
    chosen = parser.parse_args()
    rows = []
    for name in chosen.only:
        with tempfile.TemporaryDirectory(prefix="ludus-bench-") as folder:
            rows.append(asyncio.run(run(name, chosen.steps, Path(folder))))
        row = rows[-1]
        print(
            f"{row.example:<14}{row.share:8.3%} of a step of {row.step_s:.3f} s  "
            f"{row.transcripts_per_step:.1f} transcripts of "
            f"{row.characters_per_transcript:,.0f} characters",
            flush=True,
        )
    if chosen.only == list(EXAMPLES):
        content = {
            "command": "python bench/transcripts.py",
            **setting(),
            "wanted": f"share <= {MAX_SHARE}",
            "examples": [{**asdict(row), "share": row.share} for row in rows],
        }
        RESULTS.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row.share <= MAX_SHARE for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
