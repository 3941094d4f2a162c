"""What it costs to write down what was said: the share of a training step, at most 1 % wanted.

    worker: chooses, writes down --pickle--> buffer --pickle--> training loop: transcripts.jsonl

Short real runs of examples, each once, with the default number of transcripts a step. What chooses
and writes in the rollout worker, and what appends in the training loop, is timed where it runs;
the ways between are timed afterwards, with the same transcripts. All of it is counted as if
nothing else went on meanwhile, though the worker's part overlaps training: an upper bound.

    python bench/transcripts.py [--only blackjack] [--steps 40]

Prints a row per example, and writes bench/results/transcripts.json. The exit code is 1 where a
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
"""The shortest steps there are, several turns, and the longest histories."""
AT_MOST = 0.01
NUM_WARM_STEPS = 3
NUM_PICKLES = 2
"""From the worker to the buffer, and from there to the training loop."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the transcripts of one example cost, seconds of a step of `step_s`."""

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
        """Of a step."""
        return (self.written_s + self.sent_s + self.appended_s) / self.step_s


class Timed:
    """A function that also adds up how long it took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - began


def time_writing(worker: Any) -> None:
    """Let the process of a worker time what it writes down."""
    from ludus.trainer.actors import rollout_worker
    from ludus.trainer.rollout import group

    group.make_transcripts = Timed(group.make_transcripts)
    rollout_worker.num_transcripts = Timed(rollout_worker.num_transcripts)


def seconds_of_writing(worker: Any) -> float:
    """Seconds since `time_writing`."""
    from ludus.trainer.actors import rollout_worker
    from ludus.trainer.rollout import group

    return group.make_transcripts.seconds + rollout_worker.num_transcripts.seconds


async def run(name: str, num_steps: int, folder: Path) -> Row:
    """What the transcripts cost in a run of the example."""
    overrides = [
        *(f"output_dir={folder}", f"name={name}", f"training.num_steps={num_steps}"),
        *("eval.num_games_during=0", "eval.num_games=10", "seed=100"),
    ]
    config = ROOT / "examples" / EXAMPLES[name]
    async with Trainer(config, overrides=overrides) as trainer:
        steps = trainer.steps()
        for _ in range(NUM_WARM_STEPS):
            await anext(steps)
        workers = [one.actor for one in trainer._components.workers._roster.ready]
        await asyncio.gather(*(one.__ray_call__.remote(time_writing) for one in workers))
        metrics = trainer._components.metrics
        appending = metrics.log_transcripts = Timed(metrics.log_transcripts)
        began = time.perf_counter()
        async for step in steps:
            if step.number == num_steps:  # while it stands still, its workers are there
                took_s = time.perf_counter() - began
                asked = [one.__ray_call__.remote(seconds_of_writing) for one in workers]
                written_s = sum(await asyncio.gather(*asked))
        await trainer.train()
    num_timed = num_steps - NUM_WARM_STEPS
    written = list(read_transcripts(folder / name))
    said = [one for one in written if one.step > NUM_WARM_STEPS]
    began = time.perf_counter()
    for one in said:
        for _ in range(NUM_PICKLES):
            pickle.loads(pickle.dumps(one, pickle.HIGHEST_PROTOCOL))
    sent_s = time.perf_counter() - began
    size = len((folder / name / TRANSCRIPTS_FILE).read_text(encoding="utf-8"))
    return Row(
        example=name,
        num_steps=num_timed,
        transcripts_per_step=len(said) / num_timed,
        characters_per_transcript=size / len(written),
        step_s=took_s / num_timed,
        written_s=written_s / num_timed,
        sent_s=sent_s / num_timed,
        appended_s=appending.seconds / num_timed,
    )


def main() -> int:
    """The exit code: 1 where a share is too large."""
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
            "wanted": f"share <= {AT_MOST}",
            "examples": [{**asdict(row), "share": row.share} for row in rows],
        }
        RESULTS.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row.share <= AT_MOST for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
