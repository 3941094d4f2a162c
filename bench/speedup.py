"""Training seconds to 41 % wins at blackjack, beside TRL's GRPOTrainer: part of `make bench-train`.

    one warm-started model --+--> ludus train     --> weights of every k-th version, seconds
    (for each seed)          +--> TRL GRPOTrainer --> weights of every k-th round,  seconds
                                                               |
                             judge.py: 4,000 games of the same deals each, after all training

Both begin with the same weights and tokenizer and see the same texts. The clock runs while a
trainer trains: not while it starts, nor while weights are judged. A trainer has arrived at the
second of two snapshots in a row that win 41 % or more. One that never does counts with all the
time it had if it is TRL's, which is less than it needs, and with infinity if it is ours. TRL runs
in a virtual environment of its own, on the same two cores, with nothing beside it.
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

from upstream_environment import python_in  # noqa: E402

from ludus.proto.runs import read_metrics  # noqa: E402

CONFIG = ROOT / "bench" / "speedup.toml"
TRL = "trl==1.16.0"
BESIDE_TRL = (
    "torch==2.13.0",
    "transformers==5.19.0",
    "accelerate==1.15.0",
    "datasets",
    "open_spiel==2.0.2",
    "pydantic",
    "grpcio",
    "protobuf",
    "numpy",
    # What our client and the game's package import.
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
OWN_SNAPSHOT_STEPS = 4
"""As TRL's 4 rounds: 2,048 games from one snapshot to the next."""
TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Course:
    """How one training went."""

    seed: int
    seconds_to_goal: float | None
    """None = it never won 41 % twice in a row."""
    points: tuple[tuple[float, float], ...]
    """(seconds, share of games won) of each snapshot."""

    @property
    def at_least_s(self) -> float:
        """Seconds to the goal; where it was not reached, all that it trained."""
        return self.seconds_to_goal or self.points[-1][0]

    @property
    def surely_s(self) -> float:
        """Seconds to the goal; where it was not reached, infinity."""
        return self.seconds_to_goal or math.inf


def course(seed: int, seconds: Mapping[Path, float], won: Mapping[Path, float]) -> Course:
    """The course of a training whose snapshots were judged."""
    points = sorted((seconds[file], won[file]) for file in seconds)
    pairs = itertools.pairwise(points)
    arrived = [later[0] for earlier, later in pairs if min(earlier[1], later[1]) >= GOAL]
    return Course(seed, arrived[0] if arrived else None, tuple(points))


def own(seed: int, folder: Path, overrides: list[str], name: str) -> dict[Path, float]:
    """Our snapshots, and the seconds of training that each took."""
    fixed = [f"name={name}", f"output_dir={folder}", f"seed={seed}", *overrides]
    sets = [argument for one in fixed for argument in ("--set", one)]
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
        if version % OWN_SNAPSHOT_STEPS == 0
        for file in run_path.glob(f"weights/*{version:08d}*")
    }
    return {_tensors(file): elapsed[version] for version, file in files.items()}


def trl(
    seed: int, folder: Path, model: Path, *server: str, num_rounds: int = TRL_ROUNDS
) -> dict[Path, float]:
    """TRL's snapshots, and the seconds of training that each took.

    Args:
        server: the address of one that has the games, where TRL's process is not to have them.
    """
    python = python_in(f"upstream-{TRL.replace('==', '-')}", [TRL, *BESIDE_TRL])
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


def judged(run_path: Path, files: list[Path]) -> dict[Path, float]:
    """The share of games that each file's weights win."""
    model = run_path / "initial_model"
    command = [sys.executable, str(ROOT / "bench" / "judge.py"), str(run_path / "config.json")]
    answer = subprocess.run(
        [*command, str(model), *map(str, files), "--games", str(NUM_GAMES)],
        check=True,
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    shares = json.loads(answer.stdout.splitlines()[-1])
    return {Path(file): share for file, share in shares.items()}


def compare(
    seeds: list[int], folder: Path, overrides: list[str], *, with_trl: bool
) -> dict[str, list[Course]]:
    """The courses of both trainers, seed by seed, one after the other."""
    courses: dict[str, list[Course]] = {"ludus": []} | ({"trl": []} if with_trl else {})
    for seed in seeds:
        name = f"ludus-{seed}"
        seconds = {"ludus": own(seed, folder, overrides, name)}
        if with_trl:
            seconds["trl"] = trl(seed, folder, folder / name / "initial_model")
        for who, of_file in seconds.items():
            won = judged(folder / name, list(of_file))
            courses[who].append(course(seed, of_file, won))
            sys.stderr.write(f"{who} seed {seed}: {courses[who][-1].seconds_to_goal} s\n")
    return courses


def _tensors(path: Path) -> Path:
    return path if path.is_file() else next(path.glob("*.safetensors"))


def main() -> None:
    """Prints one JSON object with all courses, medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-speedup")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--without-trl", action="store_true", help="train with Ludus alone")
    args = parser.parse_args()
    with_trl = not args.without_trl
    courses = compare(args.seeds, args.folder, args.set, with_trl=with_trl)
    # What is unknown counts against us on either side.
    median_s = {"ludus": statistics.median(one.surely_s for one in courses["ludus"])}
    if with_trl:
        median_s["trl"] = statistics.median(one.at_least_s for one in courses["trl"])
    result: dict[str, object] = {
        "goal": GOAL,
        "num_games": NUM_GAMES,
        "courses": {who: [asdict(one) for one in of_who] for who, of_who in courses.items()},
        # JSON knows no infinity.
        "median_seconds": {
            who: None if math.isinf(seconds) else seconds for who, seconds in median_s.items()
        },
        "num_arrived": {
            who: sum(one.seconds_to_goal is not None for one in of_who)
            for who, of_who in courses.items()
        },
    }
    if with_trl:
        result["speedup"] = median_s["trl"] / median_s["ludus"]
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
