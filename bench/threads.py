"""Compare the seconds of a training step for numbers of CPU threads per process.

Each case trains an example for a few steps, once with one thread for each rank and worker and once
with one for each core. The runs of a case alternate, so that a slow phase of the machine affects
both. The default of rollout.num_threads and learner.num_threads follows from these results:

    python bench/threads.py
    python bench/threads.py --only smollm2 --rounds 3

SmolLM2 is expected in .cache/models/smollm2 (make demo MODEL=smollm2 puts it there).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import setting

from ludus.proto.runs import METRICS_FILE

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "threads.json"
SMOLLM2 = ("math/smollm2.toml", f"model.path={ROOT / '.cache' / 'models' / 'smollm2'}")
TINY = ("blackjack/tiny.toml", "training.groups_per_step=64", "model.warm_start_games=64")
CASES = {
    "width 64": (*TINY, "model.width=64"),
    "width 256": (*TINY, "model.width=256", "model.num_heads=4"),
    "width 512": (*TINY, "model.width=512", "model.num_heads=8"),
    "smollm2": SMOLLM2,
}
STALENESS = {"waiting": 0, "overlapping": 1}
NUM_STEPS = 8
NUM_START_STEPS = 3
"""Number of steps at the start that do not count."""


def measure_step_s(example: str, *overrides: str) -> float:
    """Train an example; return the median seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ["name=threads", f"output_dir={folder}", f"training.num_steps={NUM_STEPS}"]
        settings += ["eval.num_games_during=0", "eval.num_games=2", *overrides]
        options = [part for setting in settings for part in ("--set", setting)]
        ludus = str(Path(sys.executable).parent / "ludus")
        command = [ludus, "train", str(ROOT / "examples" / example), *options]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        lines = (Path(folder) / "threads" / METRICS_FILE).read_text("utf-8").splitlines()
    steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "train"]
    return statistics.median(step["values"]["step_s"] for step in steps[NUM_START_STEPS:])


def main() -> None:
    """Measure all cases, print the medians and save every result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind (default: 2)")
    options = parser.parse_args()
    num_cores = len(os.sched_getaffinity(0))
    earlier = json.loads(RESULTS.read_text("utf-8"))["seconds"] if RESULTS.exists() else {}
    seconds: dict[str, dict[str, list[float]]] = {}
    for case, (mode, staleness) in itertools.product(options.only, STALENESS.items()):
        row: dict[str, list[float]] = {"1": [], str(num_cores): []}
        for _, num_threads in itertools.product(range(options.rounds), row):
            example, *overrides = CASES[case]
            overrides += [f"{part}.num_threads={num_threads}" for part in ("learner", "rollout")]
            overrides.append(f"training.max_staleness={staleness}")
            row[num_threads].append(measure_step_s(example, *overrides))
        seconds[f"{case}, {mode}"] = row
        medians = {name: statistics.median(values) for name, values in row.items()}
        ratio = medians[str(num_cores)] / medians["1"]
        print(f"{case}, {mode}: {medians} s per step, ratio {ratio:.2f}", flush=True)
        content = setting() | {"seconds": earlier | seconds}
        RESULTS.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
