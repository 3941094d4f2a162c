"""Train a reward model on comparisons by a hidden rule and test it on held-out comparisons.

    preferences            accuracy .95 (a guess: .25), MRR .97 (.5208), loss .25 (1.386), in 60 s
    preferences_shuffled   the control, with a random best answer: accuracy .25 within .045

Each training starts with the command line. The time limit applies to `core_s`, the processor time
including the start of the programs, because `training_s`, the wall time, depends on other processes
of the machine. Results go to bench/results/learn_reward.json.

    make learn-reward
    python bench/learn_reward.py --only preferences --seeds 0 1

The exit code is 1 if a training of this call failed or missed its target.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from machine import machine, read_earlier_runs, write_runs

from ludus.proto.reward_models import METRICS_FILE, RewardModelMetrics

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "reward_model"
RUNS = ROOT / "runs"
RESULTS = ROOT / "bench" / "results" / "learn_reward.json"
SEEDS = (0, 1, 2)
NUM_ERROR_LINES = 5

CASES = ("preferences", "preferences_shuffled")
MAX_CORE_S = 60.0
ACCURACY, MRR, LOSS = 0.95, 0.97, 0.25
CHANCE, CHANCE_WITHIN = 0.25, 0.045
"""Accuracy of a guess, and two standard deviations of it over 400 comparisons."""


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one training."""

    case: str
    seed: int
    values: dict[str, float]
    """Metrics on the held-out comparisons."""
    target: str
    num_comparisons: tuple[int, int]
    """Numbers of training and held-out comparisons."""
    training_s: float
    core_s: float
    load_average: float
    """Load average of the machine in the minute before."""
    passed: bool
    error: str = ""
    machine: str = field(default_factory=machine)


def main() -> int:
    """Return the exit code: 1 if a training failed or missed its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N")
    chosen = parser.parse_args()
    rows = _read_earlier_rows()
    new_rows: list[Row] = []
    for case in chosen.only:
        for seed in chosen.seeds:
            row = _run(case, seed)
            new_rows.append(row)
            rows = [old for old in rows if (old.case, old.seed) != (case, seed)] + [row]
            print(_format_line(row), flush=True)
            _write(rows)
    return 0 if all(row.passed for row in new_rows) else 1


def _run(case: str, seed: int) -> Row:
    load_average = os.getloadavg()[0]
    is_control = case == "preferences_shuffled"
    folder = RUNS / f"learn-{case}-{seed}"
    try:
        _make(folder, seed, is_control)
        core_s = _train(folder, seed)
    except subprocess.CalledProcessError as error:
        message = "\n".join(error.stderr.strip().splitlines()[-NUM_ERROR_LINES:])
        return Row(case, seed, {}, "", (0, 0), 0.0, 0.0, load_average, False, message)
    metrics = RewardModelMetrics.model_validate_json(
        (folder / "reward_model" / METRICS_FILE).read_bytes()
    )
    assert metrics.accuracy is not None and metrics.mrr is not None and metrics.loss is not None
    if is_control:
        target = f"accuracy {CHANCE} within {CHANCE_WITHIN}"
        passed = abs(metrics.accuracy - CHANCE) <= CHANCE_WITHIN
    else:
        target = f"accuracy {ACCURACY}, MRR {MRR}, loss {LOSS}, in {MAX_CORE_S:.0f} s of a core"
        passed = metrics.accuracy >= ACCURACY and metrics.mrr >= MRR and metrics.loss <= LOSS
        passed = passed and core_s <= MAX_CORE_S
    return Row(
        case=case,
        seed=seed,
        values={"accuracy": metrics.accuracy, "mrr": metrics.mrr, "loss": metrics.loss},
        target=target,
        num_comparisons=(metrics.num_train, metrics.num_test),
        training_s=metrics.elapsed_s,
        core_s=core_s,
        load_average=load_average,
        passed=passed,
    )


def _make(folder: Path, seed: int, is_control: bool) -> None:
    """Write the example's data and its model."""
    flags = ["--shuffled"] if is_control else []
    program = EXAMPLE / "make_preferences.py"
    _call([sys.executable, str(program), str(folder), "--seed", str(seed), *flags])


def _train(folder: Path, seed: int) -> float:
    """Train the example and return the processor time in seconds."""
    start_usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    files = {"--model": "model", "--data": "preferences.jsonl", "--output": "reward_model"}
    options = [part for flag, name in files.items() for part in (flag, str(folder / name))]
    switches = ["--set", f"seed={seed}", "--overwrite"]
    ludus = str(Path(sys.executable).parent / "ludus")
    _call([ludus, "train-reward", str(EXAMPLE / "tiny.toml"), *options, *switches])
    end_usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    user_s = end_usage.ru_utime - start_usage.ru_utime
    return user_s + end_usage.ru_stime - start_usage.ru_stime


def _call(command: Sequence[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)


def _format_line(row: Row) -> str:
    head = f"{row.case:<22}seed {row.seed}  "
    if row.error:
        return f"{head}FAILED: {row.error}"
    values = "  ".join(f"{name} {value:.4f}" for name, value in row.values.items())
    verdict = "ok" if row.passed else "MISSED"
    times = f"{row.training_s:.0f} s, {row.core_s:.0f} s of a core"
    return f"{head}{values}  {verdict}  {times}, load {row.load_average:.1f}"


def _compute_medians(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the median of each metric over the seeds, by case."""
    measured = [row for row in rows if row.values]
    return {
        case: {
            name: statistics.median(row.values[name] for row in measured if row.case == case)
            for name in ("accuracy", "mrr", "loss")
        }
        for case in CASES
        if any(row.case == case for row in measured)
    }


def _write(rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=lambda row: (CASES.index(row.case), row.seed))
    runs = [asdict(row) for row in rows]
    write_runs(RESULTS, "make learn-reward", runs, medians=_compute_medians(rows))


def _read_earlier_rows() -> list[Row]:
    """Return the rows of earlier calls with the same packages."""
    runs = read_earlier_runs(RESULTS)
    return [Row(**{**run, "num_comparisons": tuple(run["num_comparisons"])}) for run in runs]


if __name__ == "__main__":
    sys.exit(main())
