"""Compare the training seconds to 41 % wins at blackjack with TRL (part of `make bench-train`).

    one warm-started model --+--> ludus train     --> weights of every k-th version, seconds
    (for each seed)          +--> TRL GRPOTrainer --> weights of every k-th round,  seconds
                                                               |
                             judge.py: 4,000 games of the same deals each, after all training

Both trainers start from the same weights and tokenizer and use the same texts. Only training time
counts, not the start of processes or the evaluation of weights. A trainer reaches the goal at the
second of two consecutive snapshots with at least 41 % wins. If TRL never reaches the goal, its
whole training time counts, which is less than it needs; if Ludus never reaches the goal, its time
is infinite. TRL runs in a separate virtual environment, on the same two cores, with no other load.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "dev"))

from upstream_environment import build_virtual_environment  # noqa: E402

from ludus.proto.runs import read_metrics  # noqa: E402

CONFIG = ROOT / "bench" / "speedup.toml"
TRL = "trl==1.16.0"
TRL_DEPENDENCIES = (
    "torch==2.13.0",
    "transformers==5.19.0",
    "accelerate==1.15.0",
    "datasets",
    "open_spiel==2.0.2",
    "pydantic",
    "grpcio",
    "protobuf",
    "numpy",
    # Imports of the Ludus client and of the game's package.
    "fastapi",
    "uvicorn",
    "uvloop",
    "httptools",
    "websockets",
    "orjson",
    "prometheus_client",
    "opentelemetry-api",
    "gymnasium",
)
GOAL = 0.41
NUM_GAMES = 4000
TRL_ROUNDS = 120
TRL_SNAPSHOT_ROUNDS = 4
LUDUS_SNAPSHOT_STEPS = 4
"""Steps between snapshots: 2,048 games, as in 4 rounds of TRL."""
TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Course:
    """The win rates of one training over time."""

    seed: int
    seconds_to_goal: float | None
    """Seconds to the goal; None if the goal was not reached."""
    points: tuple[tuple[float, float], ...]
    """Training seconds and share of games won of each snapshot."""

    @property
    def lower_bound_s(self) -> float:
        """Seconds to the goal, or all training seconds if the goal was not reached."""
        return self.seconds_to_goal or self.points[-1][0]

    @property
    def upper_bound_s(self) -> float:
        """Seconds to the goal, or infinity if the goal was not reached."""
        return self.seconds_to_goal or math.inf


def make_course(seed: int, seconds: Mapping[Path, float], won: Mapping[Path, float]) -> Course:
    """Return the course of a training from its snapshots' seconds and win rates."""
    points = sorted((seconds[file], won[file]) for file in seconds)
    pairs = itertools.pairwise(points)
    goal_times = [later[0] for earlier, later in pairs if min(earlier[1], later[1]) >= GOAL]
    return Course(seed, goal_times[0] if goal_times else None, tuple(points))


def train_with_ludus(seed: int, folder: Path, overrides: list[str], name: str) -> dict[Path, float]:
    """Train with Ludus; return the training seconds of each snapshot."""
    fixed = [f"name={name}", f"output_dir={folder}", f"seed={seed}", *overrides]
    sets = [argument for setting in fixed for argument in ("--set", setting)]
    ludus = Path(sys.executable).parent / "ludus"
    subprocess.run(
        [str(ludus), "train", str(CONFIG), "--overwrite", *sets],
        check=True,
        timeout=TIMEOUT_S,
        stdout=subprocess.DEVNULL,
    )
    run_path = folder / name
    elapsed = {row.step: row.elapsed_s for row in read_metrics(run_path) if row.kind == "train"}
    files = {
        version: file
        for version in elapsed
        if version % LUDUS_SNAPSHOT_STEPS == 0
        for file in run_path.glob(f"weights/*{version:08d}*")
    }
    return {_tensors(file): elapsed[version] for version, file in files.items()}


def train_with_trl(
    seed: int, folder: Path, model: Path, *server: str, num_rounds: int = TRL_ROUNDS
) -> dict[Path, float]:
    """Train with TRL; return the training seconds of each snapshot.

    Args:
        server: address of a server for the games. Default: games in TRL's process.
    """
    python = build_virtual_environment(
        f"upstream-{TRL.replace('==', '-')}", [TRL, *TRL_DEPENDENCIES]
    )
    target = folder / f"trl-{seed}"
    program = ROOT / "bench" / "upstream" / "trl_blackjack.py"
    arguments = [model, target, seed, num_rounds, TRL_SNAPSHOT_ROUNDS, *server]
    packages = [ROOT / "proto", ROOT / "envs" / "sdk", ROOT / "envs"]
    subprocess.run(
        [str(python), str(program), *map(str, arguments)],
        check=True,
        timeout=TIMEOUT_S,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, packages)),
            "TRL_EXPERIMENTAL_SILENCE": "1",
        },
    )
    seconds = json.loads((target / "seconds.json").read_text(encoding="utf-8"))
    return {
        target / f"round-{int(index):05d}.safetensors": elapsed_s
        for index, elapsed_s in seconds.items()
    }


def judge_snapshots(run_path: Path, files: list[Path]) -> dict[Path, float]:
    """Return the share of games won with each file's weights."""
    model = run_path / "initial_model"
    command = [sys.executable, str(ROOT / "bench" / "judge.py"), str(run_path / "config.json")]
    process = subprocess.run(
        [*command, str(model), *map(str, files), "--games", str(NUM_GAMES)],
        check=True,
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    shares = json.loads(process.stdout.splitlines()[-1])
    return {Path(file): share for file, share in shares.items()}


def compare(
    seeds: list[int], folder: Path, overrides: list[str], *, with_trl: bool
) -> dict[str, list[Course]]:
    """Train with both trainers, one seed after the other, and return their courses."""
    courses: dict[str, list[Course]] = {"ludus": []} | ({"trl": []} if with_trl else {})
    for seed in seeds:
        name = f"ludus-{seed}"
        seconds = {"ludus": train_with_ludus(seed, folder, overrides, name)}
        if with_trl:
            seconds["trl"] = train_with_trl(seed, folder, folder / name / "initial_model")
        for trainer, file_seconds in seconds.items():
            won = judge_snapshots(folder / name, list(file_seconds))
            courses[trainer].append(make_course(seed, file_seconds, won))
            sys.stderr.write(f"{trainer} seed {seed}: {courses[trainer][-1].seconds_to_goal} s\n")
    return courses


def _tensors(path: Path) -> Path:
    return path if path.is_file() else next(path.glob("*.safetensors"))


def main() -> None:
    """Print one JSON object with all courses, medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-speedup")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--without-trl", action="store_true", help="train only with Ludus")
    args = parser.parse_args()
    with_trl = not args.without_trl
    courses = compare(args.seeds, args.folder, args.set, with_trl=with_trl)
    # An unreached goal counts against Ludus for both trainers.
    median_s = {"ludus": statistics.median(course.upper_bound_s for course in courses["ludus"])}
    if with_trl:
        median_s["trl"] = statistics.median(course.lower_bound_s for course in courses["trl"])
    result: dict[str, object] = {
        "goal": GOAL,
        "num_games": NUM_GAMES,
        "courses": {name: [asdict(course) for course in group] for name, group in courses.items()},
        # JSON does not support infinity.
        "median_seconds": {
            name: None if math.isinf(seconds) else seconds for name, seconds in median_s.items()
        },
        "num_arrived": {
            name: sum(course.seconds_to_goal is not None for course in group)
            for name, group in courses.items()
        },
    }
    if with_trl:
        result["speedup"] = median_s["trl"] / median_s["ludus"]
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
