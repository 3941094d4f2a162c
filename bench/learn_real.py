"""Train a real language model, SmolLM2-135M-Instruct, and evaluate it on held-back seeds.

    sums            right answers, of 1,000: at most .10 before training; at least .90 after at
                    most 15 minutes of training
    sums_shuffled   the control with shuffled rewards: no gain

Every stage is a command of `ludus`. The last one, `ludus eval`, plays the same seeds with the
models before and after training and writes every answer. Results go to
bench/results/learn_real.json; rows of earlier calls with the same packages and examples are kept.

    make learn-real
    python bench/learn_real.py --only sums --seeds 0 1

Training times are wall times, so run nothing else on the machine. The exit code is 1 if a row of
this call failed or missed its target.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from machine import machine, read_earlier_runs, write_runs

from ludus.proto.evaluations import ModelEvaluation
from ludus.proto.runs import METRICS_FILE, SUMMARY_FILE, Summary

ROOT = Path(__file__).parents[1]
EXAMPLES, RUNS = ROOT / "examples", ROOT / "runs"
MODEL = ROOT / ".cache" / "models" / "smollm2"
RESULTS = ROOT / "bench" / "results" / "learn_real.json"
SEEDS = (0, 1, 2)
NUM_EPISODES = 1000
NUM_ERROR_LINES = 5

SUMS = "math/smollm2.toml"
SUMS_EVALUATION = ("--env", "math_env", "--max-completion-tokens", "12")
MAX_SUMS_S = 900.0
SUMS_BEFORE, SUMS_AFTER = 0.10, 0.90


@dataclass(frozen=True, slots=True)
class Share:
    """Share of the episodes with success, and its 95 % interval."""

    value: float
    ci95: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one case and seed."""

    case: str
    seed: int
    shares: dict[str, Share]
    """Shares by the name of the model, such as "before" and "after"."""
    targets: dict[str, bool]
    """Verdict on each target."""
    num_episodes: int
    """Number of episodes of each model."""
    training_s: float
    longest_step: float
    """Longest step of the training divided by the median."""
    load_average: float = 0.0
    """Load average of the machine in the minute before."""
    error: str = ""
    machine: str = field(default_factory=machine)

    @property
    def passed(self) -> bool:
        """True if all targets are reached."""
        return not self.error and all(self.targets.values())


@dataclass(frozen=True, slots=True)
class Training:
    """A finished run of `ludus train`."""

    folder: Path
    training_s: float
    longest_step: float


def train_sums(seed: int) -> Row:
    """Train at sums below 20."""
    training = train("sums", SUMS, seed)
    shares = evaluate(training.folder, {"before": MODEL, "after": training.folder}, SUMS_EVALUATION)
    targets = {
        f"at most {SUMS_BEFORE} before": shares["before"].value <= SUMS_BEFORE,
        f"at least {SUMS_AFTER} after": shares["after"].value >= SUMS_AFTER,
        f"at most {MAX_SUMS_S:.0f} s": training.training_s <= MAX_SUMS_S,
    }
    return make_row("sums", seed, training, shares, targets)


def train_sums_shuffled(seed: int) -> Row:
    """Train at sums with rewards that are shuffled between the episodes of a batch."""
    training = train("sums_shuffled", SUMS, seed, "training.shuffle_rewards=true")
    shares = evaluate(training.folder, {"before": MODEL, "after": training.folder}, SUMS_EVALUATION)
    targets = {"no gain": shares["after"].ci95[0] <= shares["before"].ci95[1]}
    return make_row("sums_shuffled", seed, training, shares, targets)


CASES: dict[str, Callable[[int], Row]] = {
    "sums": train_sums,
    "sums_shuffled": train_sums_shuffled,
}
FILES = {
    "sums": (SUMS,),
    "sums_shuffled": (SUMS,),
}
"""Files of the examples that a case uses. Earlier results count while these files are the same."""


def main() -> int:
    """Return the exit code: 1 if a row failed or missed its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N")
    chosen = parser.parse_args()
    if not MODEL.is_dir():
        call_ludus("model", "get", "smollm2", str(MODEL))
    rows = read_earlier_rows()
    new_rows: list[Row] = []
    for case in chosen.only:
        for seed in chosen.seeds:
            row = run(case, seed)
            new_rows.append(row)
            rows = [old for old in rows if (old.case, old.seed) != (case, seed)] + [row]
            print(format_row(row), flush=True)
            write(rows)
    return 0 if all(row.passed for row in new_rows) else 1


def run(case: str, seed: int) -> Row:
    """Run all stages of a case; a stage that fails makes a row with its error."""
    load_average = os.getloadavg()[0]
    try:
        row = CASES[case](seed)
    except subprocess.CalledProcessError as error:
        message = "\n".join(error.stderr.strip().splitlines()[-NUM_ERROR_LINES:])
        row = Row(case, seed, {}, {}, 0, 0.0, 0.0, error=message)
    return replace(row, load_average=load_average)


def train(name: str, example: str, seed: int, *overrides: str, model: Path = MODEL) -> Training:
    """Train an example without evaluations; return its times."""
    folder = RUNS / f"learn-{name}-{seed}"
    settings = [f"name={folder.name}", f"output_dir={RUNS}", f"seed={seed}", f"model.path={model}"]
    settings += ["eval.num_games_during=0", "eval.num_games=10", *overrides]
    options = [part for setting in settings for part in ("--set", setting)]
    call_ludus("train", str(EXAMPLES / example), "--overwrite", *options)
    summary = Summary.model_validate_json((folder / SUMMARY_FILE).read_bytes())
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "train"]
    seconds = [step["values"]["step_s"] for step in steps]
    return Training(
        folder=folder,
        training_s=summary.wall_seconds_training,
        longest_step=max(seconds) / statistics.median(seconds),
    )


def evaluate(folder: Path, models: dict[str, Path], options: Sequence[str]) -> dict[str, Share]:
    """Play the same held-back seeds with all models; keep every answer in the run's folder."""
    answers = folder / "answers.json"
    names = [part for model in models.values() for part in ("--model", str(model))]
    episodes = ("--episodes", str(NUM_EPISODES), "--baseline", "random", "--json", str(answers))
    call_ludus("eval", *names, *options, *episodes)
    evaluation = ModelEvaluation.model_validate_json(answers.read_bytes())
    shares = {}
    for name, result in zip(models, evaluation.models.values(), strict=True):
        value, ci95 = result.result.win_rate, result.result.win_rate_ci95
        assert value is not None and ci95 is not None
        shares[name] = Share(value, ci95)
    return shares


def make_row(
    case: str, seed: int, training: Training, shares: dict[str, Share], targets: dict[str, bool]
) -> Row:
    """Return the row of a finished case."""
    return Row(
        case=case,
        seed=seed,
        shares=shares,
        targets=targets,
        num_episodes=NUM_EPISODES,
        training_s=training.training_s,
        longest_step=training.longest_step,
    )


def call_ludus(*arguments: str) -> None:
    """Call the command line and wait for its end."""
    ludus = str(Path(sys.executable).parent / "ludus")
    subprocess.run([ludus, *arguments], cwd=ROOT, check=True, capture_output=True, text=True)


def format_row(row: Row) -> str:
    """Return a line with the results of a row."""
    head = f"{row.case:<16}seed {row.seed}  "
    if row.error:
        return f"{head}FAILED: {row.error}"
    shares = "  ".join(
        f"{name} {share.value:.3f} ({share.ci95[0]:.3f} to {share.ci95[1]:.3f})"
        for name, share in row.shares.items()
    )
    misses = [target for target, is_reached in row.targets.items() if not is_reached]
    verdict = f"MISSED: {', '.join(misses)}" if misses else "ok"
    times = f"{row.training_s:.0f} s, longest step {row.longest_step:.1f} x median"
    return f"{head}{shares}  {times}, load {row.load_average:.1f}  {verdict}"


def write(rows: Sequence[Row]) -> None:
    """Write all rows in the order of the cases."""
    order = list(CASES)
    rows = sorted(rows, key=lambda row: (order.index(row.case), row.seed))
    runs = [{**asdict(row), "passed": row.passed, "files": hash_files(row.case)} for row in rows]
    write_runs(RESULTS, "make learn-real", runs)


def read_earlier_rows() -> list[Row]:
    """Return the rows of earlier calls with the same packages and examples."""
    rows = []
    for entry in read_earlier_runs(RESULTS):
        files, _ = entry.pop("files"), entry.pop("passed")
        if files == hash_files(entry["case"]):
            shares = {
                name: Share(share["value"], tuple(share["ci95"]))
                for name, share in entry.pop("shares").items()
            }
            rows.append(Row(shares=shares, **entry))
    return rows


def hash_files(case: str) -> dict[str, str]:
    """Return the SHA-256 of each file of a case."""
    return {
        name: hashlib.sha256((EXAMPLES / name).read_bytes()).hexdigest() for name in FILES[case]
    }


if __name__ == "__main__":
    sys.exit(main())
