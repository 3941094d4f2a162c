"""Compare TRL's GRPOTrainer with games in its process and over WebSocket, at blackjack.

    one warm-started model --+--> TRL, games in its process      --> weights of every 4th round
    (for each seed)          +--> TRL, games on our server (ws://) --> the same weights, seconds

Both play the same deals with the same random numbers, so their weights should be equal and only the
seconds until 41 % wins differ. If the weights differ, each is evaluated separately. Seeds of
earlier calls on the same machine with the same packages are kept:

    python bench/trl_wire.py [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import machine, read_earlier_runs, write_runs
from speedup import (
    ROOT,
    TRL_ROUNDS,
    Course,
    judge_snapshots,
    make_course,
    train_with_ludus,
    train_with_trl,
)

RESULTS = ROOT / "bench" / "results" / "trl_wire.json"
MAX_RATIO = 1.25
NUM_SESSIONS = 600
START_TIMEOUT_S = 60.0


@contextmanager
def serving() -> Iterator[str]:
    """Start a server of the game in a separate process and yield its WebSocket address."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "ludus.env", "openspiel_env"]
        options = ["--options", json.dumps({"game": "blackjack"}), "--port", "0"]
        limits = ["--max-sessions", str(NUM_SESSIONS), "--ready-file", str(ready)]
        server = subprocess.Popen([*command, *options, *limits], stderr=subprocess.DEVNULL)
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not ready.exists():
                assert time.monotonic() < deadline_s, "the server did not start in time"
                time.sleep(0.05)
            yield json.loads(ready.read_text(encoding="utf-8"))["http"].replace("http", "ws", 1)
        finally:
            server.terminate()
            server.wait()


def measure(seed: int, folder: Path, num_rounds: int) -> dict[str, Any]:
    """Train both variants with one seed and compare them."""
    name = f"wire-{seed}"
    train_with_ludus(seed, folder, ["training.num_steps=1"], name)
    model, run_path = folder / name / "initial_model", folder / name
    load_average = os.getloadavg()[0]
    local = train_with_trl(seed, folder / "in-process", model, num_rounds=num_rounds)
    with serving() as address:
        remote = train_with_trl(
            seed, folder / "over-the-wire", model, address, num_rounds=num_rounds
        )
    are_same = all(
        local_file.read_bytes() == remote_file.read_bytes()
        for local_file, remote_file in zip(sorted(local), sorted(remote), strict=True)
    )
    local_won = judge_snapshots(run_path, sorted(local))
    remote_won = (
        dict(zip(sorted(remote), (local_won[file] for file in sorted(local)), strict=True))
        if are_same
        else judge_snapshots(run_path, sorted(remote))
    )
    courses = {
        "in_process": make_course(seed, local, local_won),
        "websocket": make_course(seed, remote, remote_won),
    }
    return {
        "seed": seed,
        "num_rounds": num_rounds,
        "load_average": load_average,
        "machine": machine(),
        "weights_are_the_same": are_same,
        "seconds_to_goal": {name: course.seconds_to_goal for name, course in courses.items()},
        "seconds_in_all": {name: course.points[-1][0] for name, course in courses.items()},
        "won_at_the_end": {name: course.points[-1][1] for name, course in courses.items()},
        "ratio": _compute_ratio(courses),
    }


def _compute_ratio(courses: dict[str, Course]) -> float:
    """Return the ratio of the seconds to the goal, or of all seconds if a variant missed it."""
    local, remote = courses["in_process"], courses["websocket"]
    if local.seconds_to_goal and remote.seconds_to_goal:
        return remote.seconds_to_goal / local.seconds_to_goal
    return remote.points[-1][0] / local.points[-1][0]


def main() -> int:
    """Return the exit code: 1 if a seed's ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-trl-wire")
    parser.add_argument(
        "--rounds", type=int, default=TRL_ROUNDS, help="maximum rounds of 512 games"
    )
    args = parser.parse_args()
    rows = {row["seed"]: row for row in read_earlier_runs(RESULTS)}
    for seed in args.seeds:
        rows[seed] = measure(seed, args.folder, args.rounds)
        print(json.dumps(rows[seed]), flush=True)
        _write([rows[seed] for seed in sorted(rows)])
    return int(max(row["ratio"] for row in rows.values()) > MAX_RATIO)


def _write(rows: list[dict[str, Any]]) -> None:
    median = statistics.median(row["ratio"] for row in rows)
    target = f"ratio <= {MAX_RATIO}"
    write_runs(RESULTS, "make learn-trl", rows, wanted=target, median_ratio=median)


if __name__ == "__main__":
    sys.exit(main())
