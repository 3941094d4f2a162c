"""What the wire costs TRL's GRPOTrainer: seconds to 41 % at blackjack, over WebSocket and not.

    one warm-started model --+--> TRL, games in its process      --> weights of every 4th round
    (for each seed)          +--> TRL, games on our server (ws://) --> the same weights, seconds

Both play the same deals with the same random numbers, so that their weights are the same, and
only the seconds differ; where they are not, each is judged by itself. Seeds of earlier calls on the
same machine with the same packages are kept:

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

from machine import earlier_runs, machine, write_runs
from speedup import ROOT, TRL_ROUNDS, Course, course, judged, own, trl

RESULTS = ROOT / "bench" / "results" / "trl_wire.json"
AT_MOST = 1.25
NUM_SESSIONS = 600
START_TIMEOUT_S = 60.0


@contextmanager
def serving() -> Iterator[str]:
    """The WebSocket address of a server of the game, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "ludus.env", "openspiel_env"]
        options = ["--options", json.dumps({"game": "blackjack"}), "--port", "0"]
        limits = ["--max-sessions", str(NUM_SESSIONS), "--ready-file", str(ready)]
        server = subprocess.Popen([*command, *options, *limits], stderr=subprocess.DEVNULL)
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not ready.exists():
                assert time.monotonic() < deadline_s, "the server did not get ready"
                time.sleep(0.05)
            yield json.loads(ready.read_text(encoding="utf-8"))["http"].replace("http", "ws", 1)
        finally:
            server.terminate()
            server.wait()


def measure(seed: int, folder: Path, num_rounds: int) -> dict[str, Any]:
    """Both courses of one seed."""
    name = f"wire-{seed}"
    own(seed, folder, ["training.num_steps=1"], name)
    model, run_path = folder / name / "initial_model", folder / name
    load_average = os.getloadavg()[0]
    here = trl(seed, folder / "in-process", model, num_rounds=num_rounds)
    with serving() as address:
        there = trl(seed, folder / "over-the-wire", model, address, num_rounds=num_rounds)
    are_same = all(
        one.read_bytes() == other.read_bytes()
        for one, other in zip(sorted(here), sorted(there), strict=True)
    )
    won = judged(run_path, sorted(here))
    won_there = (
        dict(zip(sorted(there), (won[file] for file in sorted(here)), strict=True))
        if are_same
        else judged(run_path, sorted(there))
    )
    courses = {"in_process": course(seed, here, won), "websocket": course(seed, there, won_there)}
    return {
        "seed": seed,
        "num_rounds": num_rounds,
        "load_average": load_average,
        "machine": machine(),
        "weights_are_the_same": are_same,
        "seconds_to_goal": {who: one.seconds_to_goal for who, one in courses.items()},
        "seconds_in_all": {who: one.points[-1][0] for who, one in courses.items()},
        "won_at_the_end": {who: one.points[-1][1] for who, one in courses.items()},
        "ratio": _ratio(courses),
    }


def _ratio(courses: dict[str, Course]) -> float:
    """Of the seconds to the goal; where one did not arrive, of all seconds."""
    here, there = courses["in_process"], courses["websocket"]
    if here.seconds_to_goal and there.seconds_to_goal:
        return there.seconds_to_goal / here.seconds_to_goal
    return there.points[-1][0] / here.points[-1][0]


def main() -> int:
    """The exit code: 1 where a seed's ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-trl-wire")
    parser.add_argument("--rounds", type=int, default=TRL_ROUNDS, help="of 512 games, at most")
    args = parser.parse_args()
    rows = {row["seed"]: row for row in earlier_runs(RESULTS)}
    for seed in args.seeds:
        rows[seed] = measure(seed, args.folder, args.rounds)
        print(json.dumps(rows[seed]), flush=True)
        _write([rows[seed] for seed in sorted(rows)])
    return int(max(row["ratio"] for row in rows.values()) > AT_MOST)


def _write(rows: list[dict[str, Any]]) -> None:
    median = statistics.median(row["ratio"] for row in rows)
    wanted = f"ratio <= {AT_MOST}"
    write_runs(RESULTS, "make learn-trl", rows, wanted=wanted, median_ratio=median)


if __name__ == "__main__":
    sys.exit(main())
