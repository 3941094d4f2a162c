"""Time the commands that must respond at once, also in multiples of Python's start time.

    python bench/command_times.py runs/demo

For `ludus runs`, the run is copied 200 times, without checkpoints and models. The commands and a
bare start of Python take turns; a row has the medians. Results go to
bench/results/command_times.json. The exit code is 1 if the median time of a command exceeds its
limit, or if a command exits with an unexpected code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import setting

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "command_times.json"
NUM_RUNS = 200
NUM_ROUNDS = 7
PACKAGES = ("proto", "envs/sdk", "envs", "services", "trainer")
_LUDUS = "import sys; sys.argv[0] = 'ludus'; from ludus.services.cli.app import main; main()"


@dataclass(frozen=True)
class Command:
    """A command, the limit of its time and its expected exit code."""

    name: str
    arguments: tuple[str, ...]
    max_s: float
    exit_code: int = 0


@dataclass(frozen=True)
class Row:
    """Times of a command."""

    name: str
    max_s: float
    median_s: float
    longest_s: float
    ratio: float
    """Median time divided by the median start time of Python."""


COMMANDS = (
    Command("ludus --help", ("--help",), max_s=0.5),
    Command(f"ludus runs, {NUM_RUNS} runs", ("runs", "--local"), max_s=2.0),
    Command(
        "dry run of a wrong file",
        ("train", "wrong.toml", "--dry-run"),
        max_s=3.0,
        exit_code=2,
    ),
)


def copy_run(run: Path, folder: Path) -> None:
    """Copy a run without checkpoints and models NUM_RUNS times, under different names."""
    ignore = shutil.ignore_patterns("checkpoints", "model", "weights")
    for number in range(NUM_RUNS):
        copy = folder / "runs" / f"run-{number:03}"
        shutil.copytree(run, copy, ignore=ignore)
        config_path = copy / "config.json"
        config = json.loads(config_path.read_text(encoding="utf-8"))
        config_path.write_text(json.dumps(config | {"name": copy.name}), encoding="utf-8")


def time_command(command: Sequence[str], folder: Path, exit_code: int = 0) -> float:
    """Return the seconds that a command takes.

    Raises:
        RuntimeError: the command exited with another code.
    """
    paths = os.pathsep.join(str(ROOT / package) for package in PACKAGES)
    start_s = time.monotonic()
    completed = subprocess.run(
        [sys.executable, "-c", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    duration_s = time.monotonic() - start_s
    if completed.returncode != exit_code:
        raise RuntimeError(f"{command[1:]} exited with {completed.returncode}: {completed.stderr}")
    return duration_s


def measure(folder: Path) -> list[Row]:
    """Time the commands in a folder, in turns with a bare start of Python."""
    python_times: list[float] = []
    times: dict[str, list[float]] = {command.name: [] for command in COMMANDS}
    for _ in range(NUM_ROUNDS):
        python_times.append(time_command(["pass"], folder))
        for command in COMMANDS:
            times[command.name].append(
                time_command([_LUDUS, *command.arguments], folder, command.exit_code)
            )
    python_s = statistics.median(python_times)
    print(f"start of Python: {python_s:.3f} s")
    return [
        Row(
            name=command.name,
            max_s=command.max_s,
            median_s=(median_s := statistics.median(times[command.name])),
            longest_s=max(times[command.name]),
            ratio=median_s / python_s,
        )
        for command in COMMANDS
    ]


def main() -> None:
    """Measure and write the results."""
    description, _, _ = __doc__.partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_run(args.run, folder)
        (folder / "wrong.toml").write_text("[trainng]\nnum_steps = 2\n", encoding="utf-8")
        rows = measure(folder)
    for row in rows:
        verdict = "ok" if row.median_s <= row.max_s else "MISSED"
        print(f"{verdict:<7}{row.median_s:.2f} s, {row.ratio:.0f} times Python's start: {row.name}")
    content = {**setting(), "rows": [asdict(row) for row in rows]}
    RESULTS.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if all(row.median_s <= row.max_s for row in rows) else 1)


if __name__ == "__main__":
    main()
