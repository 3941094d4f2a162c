"""Trains a reward model on comparisons by a hidden rule and judges it on those held out.

    preferences            accuracy .95 (a guess: .25), MRR .97 (.5208), loss .25 (1.386), in 60 s
    preferences_shuffled   the best answer drawn by lot, the control: accuracy .25 within .045

Each training is started as a user would start it. `core_s` are seconds of a core, the start of
the programs included: what decides whether a training was in time, since others who compute make
`training_s`, the clock on the wall, as long as they like. Results go to
bench/results/learn_reward.json.

    make learn-reward
    python bench/learn_reward.py --only preferences --seeds 0 1

The exit code is 1 when a training of this call failed or missed its target.
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

from machine import earlier_runs, machine, write_runs

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
"""Two deviations of a share of 400 comparisons, of which a quarter is guessed right."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one training came to with one seed."""

    case: str
    seed: int
    values: dict[str, float]
    """On the comparisons held out."""
    target: str
    num_comparisons: tuple[int, int]
    """To train on, and held out."""
    training_s: float
    core_s: float
    load_average: float
    """Of the machine, over the minute before."""
    passed: bool
    error: str = ""
    machine: str = field(default_factory=machine)


def main() -> int:
    """The exit code: 1 when a training failed or missed its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N")
    chosen = parser.parse_args()
    rows = _earlier_rows()
    of_this_call: list[Row] = []
    for case in chosen.only:
        for seed in chosen.seeds:
            row = _run(case, seed)
            of_this_call.append(row)
            rows = [one for one in rows if (one.case, one.seed) != (case, seed)] + [row]
            print(_line(row), flush=True)
            _write(rows)
    return 0 if all(row.passed for row in of_this_call) else 1


def _run(case: str, seed: int) -> Row:
    load_average = os.getloadavg()[0]
    is_control = case == "preferences_shuffled"
    folder = RUNS / f"learn-{case}-{seed}"
    try:
        _make(folder, seed, is_control)
        core_s = _train(folder, seed)
    except subprocess.CalledProcessError as error:
        last = "\n".join(error.stderr.strip().splitlines()[-NUM_ERROR_LINES:])
        return Row(case, seed, {}, "", (0, 0), 0.0, 0.0, load_average, False, last)
    found = RewardModelMetrics.model_validate_json(
        (folder / "reward_model" / METRICS_FILE).read_bytes()
    )
    assert found.accuracy is not None and found.mrr is not None and found.loss is not None
    if is_control:
        target = f"accuracy {CHANCE} within {CHANCE_WITHIN}"
        passed = abs(found.accuracy - CHANCE) <= CHANCE_WITHIN
    else:
        target = f"accuracy {ACCURACY}, MRR {MRR}, loss {LOSS}, in {MAX_CORE_S:.0f} s of a core"
        passed = found.accuracy >= ACCURACY and found.mrr >= MRR and found.loss <= LOSS
        passed = passed and core_s <= MAX_CORE_S
    return Row(
        case=case,
        seed=seed,
        values={"accuracy": found.accuracy, "mrr": found.mrr, "loss": found.loss},
        target=target,
        num_comparisons=(found.num_train, found.num_test),
        training_s=found.elapsed_s,
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
    """Train as the example does; seconds of a core that this took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    places = {"--model": "model", "--data": "preferences.jsonl", "--output": "reward_model"}
    options = [part for flag, name in places.items() for part in (flag, str(folder / name))]
    switches = ["--set", f"seed={seed}", "--overwrite"]
    ludus = str(Path(sys.executable).parent / "ludus")
    _call([ludus, "train-reward", str(EXAMPLE / "tiny.toml"), *options, *switches])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _call(command: Sequence[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)


def _line(row: Row) -> str:
    head = f"{row.case:<22}seed {row.seed}  "
    if row.error:
        return f"{head}FAILED: {row.error}"
    values = "  ".join(f"{name} {value:.4f}" for name, value in row.values.items())
    verdict = "ok" if row.passed else "MISSED"
    times = f"{row.training_s:.0f} s, {row.core_s:.0f} s of a core"
    return f"{head}{values}  {verdict}  {times}, load {row.load_average:.1f}"


def _medians(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By case: the median of each value over its seeds."""
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
    write_runs(RESULTS, "make learn-reward", runs, medians=_medians(rows))


def _earlier_rows() -> list[Row]:
    """What earlier calls measured, as far as the packages are the same."""
    runs = earlier_runs(RESULTS)
    return [Row(**{**run, "num_comparisons": tuple(run["num_comparisons"])}) for run in runs]


if __name__ == "__main__":
    sys.exit(main())
