"""Compare the training seconds of a small language model with TRL and with Ludus, at sums.

    one model, one GRPOConfig --+--> Ludus --> seconds to 80 % right answers
    (for each seed)             +--> TRL   --> seconds to 80 % right answers

`bench/upstream/trl_sums.py` contains the task and the settings, which are the same for both. The
trainers run one after the other, in an order that changes with the seed, on the same cores. If TRL
does not reach the goal, its whole training time counts, which is less than it needs.

    python bench/trl_smollm.py --model FOLDER [--seeds 0 1 2] [--steps 200]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine, write_runs
from trl_environment import ROOT, find_trl_python

RESULTS = ROOT / "bench" / "results" / "trl_smollm.json"
PROGRAM = ROOT / "bench" / "upstream" / "trl_sums.py"
GOAL = 0.8


def train(trainer: str, seed: int, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train with one trainer; return its course and the seconds to the goal."""
    python = find_trl_python() if trainer == "trl" else Path(sys.executable)
    values = [seed, arguments.steps, arguments.every_steps, GOAL, arguments.learning_rate]
    command = [python, PROGRAM, trainer, arguments.model.absolute(), folder / trainer, *values]
    process = subprocess.run(
        list(map(str, command)),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"},
    )
    course: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    points = course["points"]
    reached = [point["seconds"] for point in points if point["share"] >= GOAL]
    return {"seconds_to_goal": reached[0] if reached else None, "points": points}


def compare(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with both trainers; return their courses and the ratio of their seconds."""
    row: dict[str, Any] = {"seed": seed, "machine": machine(), "load_average": os.getloadavg()[0]}
    row |= {"num_steps": arguments.steps, "learning_rate": arguments.learning_rate}
    with tempfile.TemporaryDirectory() as folder:
        for trainer in ("ludus", "trl") if seed % 2 == 0 else ("trl", "ludus"):
            row[trainer] = train(trainer, seed, arguments, Path(folder))
    ludus_s = row["ludus"]["seconds_to_goal"]
    trl_s = row["trl"]["seconds_to_goal"] or row["trl"]["points"][-1]["seconds"]
    row["ratio"] = None if ludus_s is None else trl_s / max(ludus_s, 1e-9)
    return row


def main() -> int:
    """Return the exit code: 1 if Ludus missed the goal with a seed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a chat model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200, help="maximum optimizer steps")
    parser.add_argument("--every-steps", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = []
    for seed in arguments.seeds:
        rows.append(compare(seed, arguments))
        print(json.dumps(rows[-1]), flush=True)
        ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
        median = statistics.median(ratios) if ratios else None
        write_runs(
            arguments.results, "python bench/trl_smollm.py", rows, goal=GOAL, median_ratio=median
        )
    return int(any(row["ratio"] is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
