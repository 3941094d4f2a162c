"""Train a real language model, SmolLM2-135M-Instruct, and evaluate it on held-back seeds.

    sums            right answers, of 1,000: at most .10 before training; at least .90 after at
                    most 15 minutes of training
    sums_shuffled   the control with shuffled rewards: no gain
    blackjack       by training alone, at least .85 of the gap from random play to basic strategy,
                    after at most 45 minutes; no step longer than three times the median
    number_guess    a number in several turns: fine-tuned on recorded games, then trained, wins
                    more than after fine-tuning alone and after training alone
    thinking        sums of three numbers after a thought: training raises the share of right
                    answers of the fine-tuned model, and .95 of the answers keep the format

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

from ludus.env.evaluation import wilson_interval
from ludus.proto.evaluations import ModelEvaluation
from ludus.proto.runs import METRICS_FILE, SUMMARY_FILE, Summary

ROOT = Path(__file__).parents[1]
EXAMPLES, RUNS = ROOT / "examples", ROOT / "runs"
MODEL = ROOT / ".cache" / "models" / "smollm2"
RESULTS = ROOT / "bench" / "results" / "learn_real.json"
SEEDS = (0, 1, 2)
NUM_EPISODES = 1000
NUM_ERROR_LINES = 5
ANSWERS_FILE = "answers.json"

SUMS = "math/smollm2.toml"
SUMS_EVALUATION = ("--env", "math_env", "--max-completion-tokens", "16")
MAX_SUMS_S = 900.0
SUMS_BEFORE, SUMS_AFTER = 0.10, 0.90

BLACKJACK = "blackjack/smollm2.toml"
MAX_BLACKJACK_S, MAX_LONGEST_STEP = 2700.0, 3.0
MIN_GAP_CLOSED = 0.85
NUM_BLACKJACK_GAMES = 4000

GUESS_SFT, GUESS = "number_guess/sft.toml", "number_guess/smollm2.toml"
GUESS_PLAYERS = "number_guess/players.py"
GUESS_ENVIRONMENT = "number_guess_env"
GUESS_OPTIONS = ("--option", "highest=15", "--option", "max_tries=4")
GUESS_PLAYER = "examples.number_guess.players:fixed_policies"
NUM_RECORDED_GAMES = 100

THINKING_SFT, THINKING = "thinking/sft.toml", "thinking/smollm2.toml"
THINKING_DATA = "thinking/make_data.py"
MIN_THOUGHTS = 0.95
sys.path.append(str(EXAMPLES / "thinking"))


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
    """Shares by the name of the model or policy, such as "before" and "after"."""
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
    models = {"before": MODEL, "after": training.folder}
    shares = make_shares(models, evaluate(training.folder, models, SUMS_EVALUATION))
    targets = {
        f"at most {SUMS_BEFORE} before": shares["before"].value <= SUMS_BEFORE,
        f"at least {SUMS_AFTER} after": shares["after"].value >= SUMS_AFTER,
        f"at most {MAX_SUMS_S:.0f} s": training.training_s <= MAX_SUMS_S,
    }
    return make_row("sums", seed, training, shares, targets)


def train_sums_shuffled(seed: int) -> Row:
    """Train at sums with rewards that are shuffled between the episodes of a batch."""
    training = train("sums_shuffled", SUMS, seed, "training.shuffle_rewards=true")
    models = {"before": MODEL, "after": training.folder}
    shares = make_shares(models, evaluate(training.folder, models, SUMS_EVALUATION))
    targets = {"no gain": shares["after"].ci95[0] <= shares["before"].ci95[1]}
    return make_row("sums_shuffled", seed, training, shares, targets)


def train_blackjack(seed: int) -> Row:
    """Train at blackjack; the run's own evaluations compare it with random play and the optimum."""
    training = train("blackjack", BLACKJACK, seed, f"eval.num_games={NUM_BLACKJACK_GAMES}")
    summary = read_summary(training.folder)
    policies = {"before": summary.start, **summary.baselines}
    shares = {
        name: Share(policy.win_rate, policy.win_rate_ci95)
        for name, policy in policies.items()
        if policy is not None and policy.win_rate is not None and policy.win_rate_ci95 is not None
    }
    assert summary.win_rate is not None and summary.win_rate_ci95 is not None
    assert summary.gap_closed is not None and summary.gap_closed_ci95 is not None
    shares["after"] = Share(summary.win_rate, summary.win_rate_ci95)
    shares["gap closed"] = Share(summary.gap_closed, summary.gap_closed_ci95)
    targets = {
        f"at least {MIN_GAP_CLOSED} of the gap": summary.gap_closed >= MIN_GAP_CLOSED,
        f"at most {MAX_BLACKJACK_S:.0f} s": training.training_s <= MAX_BLACKJACK_S,
        f"no step above {MAX_LONGEST_STEP:.0f} x median": training.longest_step <= MAX_LONGEST_STEP,
    }
    row = make_row("blackjack", seed, training, shares, targets)
    return replace(row, num_episodes=NUM_BLACKJACK_GAMES)


def train_number_guess(seed: int) -> Row:
    """Fine-tune on recorded games, train, and do both, at guessing a number."""
    folder = RUNS / f"learn-number_guess-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    games = folder / "games.jsonl"
    games.unlink(missing_ok=True)
    if not (folder / GUESS_ENVIRONMENT).is_dir():
        call_ludus("env", "init", "number_guess", folder=folder)
    recording = ("--policies", GUESS_PLAYER, "--policy", "careless", "--min-return", "1")
    recording += ("--episodes", str(NUM_RECORDED_GAMES), "--seed", str(1000 * seed))
    environment = (GUESS_ENVIRONMENT, *GUESS_OPTIONS)
    call_ludus("env", "record", *environment, *recording, "--output", str(games), folder=folder)
    tuned = fine_tune("number_guess-sft", GUESS_SFT, seed, games, folder)
    models = {
        "fine-tuned": tuned,
        "trained": train("number_guess-rl", GUESS, seed, start_folder=folder).folder,
    }
    training = train("number_guess-both", GUESS, seed, model=tuned, start_folder=folder)
    models["both"] = training.folder
    options = ("--env", *environment, "--set", "rollout.constrain=legal_answers")
    evaluation = evaluate(folder, models, options)
    both = str(models["both"])
    targets = {}
    for name in ("fine-tuned", "trained"):
        low, _ = find_difference(evaluation, both, str(models[name]))
        targets[f"both above {name}"] = low > 0
    return make_row("number_guess", seed, training, make_shares(models, evaluation), targets)


def train_thinking(seed: int) -> Row:
    """Fine-tune on thoughts, then train at sums of three numbers."""
    from show_shares import read_outcomes  # of examples/thinking

    folder = RUNS / f"learn-thinking-{seed}"
    program = [sys.executable, str(EXAMPLES / THINKING_DATA), str(folder), "--seed", str(seed)]
    subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True)
    tuned = fine_tune("thinking-sft", THINKING_SFT, seed, folder / "chats.jsonl", ROOT)
    files = {"path": "sums.jsonl", "test_path": "test.jsonl"}
    settings = [f"environment.options.{key}={folder / name}" for key, name in files.items()]
    training = train("thinking-rl", THINKING, seed, *settings, model=tuned)
    models = {"fine-tuned": tuned, "trained": training.folder}
    data = ("--option", f"path={folder / 'test.jsonl'}", "--option", "answer=answer")
    options = ("--env", "prompts_env", *data, "--max-completion-tokens", "32")
    evaluate(folder, models, options)
    shares: dict[str, Share] = {}
    outcomes = read_outcomes(folder / ANSWERS_FILE)
    for name, model in models.items():
        right, thoughts = zip(*outcomes[str(model)], strict=True)
        shares[name] = count_share(right)
        shares[f"thoughts, {name}"] = count_share(thoughts)
    targets = {
        "trained above fine-tuned": shares["trained"].ci95[0] > shares["fine-tuned"].ci95[1],
        f"at least {MIN_THOUGHTS} thoughts": shares["thoughts, trained"].value >= MIN_THOUGHTS,
    }
    return make_row("thinking", seed, training, shares, targets)


CASES: dict[str, Callable[[int], Row]] = {
    "sums": train_sums,
    "sums_shuffled": train_sums_shuffled,
    "blackjack": train_blackjack,
    "number_guess": train_number_guess,
    "thinking": train_thinking,
}
FILES = {
    "sums": (SUMS,),
    "sums_shuffled": (SUMS,),
    "blackjack": (BLACKJACK,),
    "number_guess": (GUESS_SFT, GUESS, GUESS_PLAYERS),
    "thinking": (THINKING_SFT, THINKING, THINKING_DATA),
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


def train(
    name: str,
    example: str,
    seed: int,
    *overrides: str,
    model: Path = MODEL,
    start_folder: Path = ROOT,
) -> Training:
    """Train an example without evaluations; return its times."""
    folder = RUNS / f"learn-{name}-{seed}"
    settings = [f"name={folder.name}", f"output_dir={RUNS}", f"seed={seed}", f"model.path={model}"]
    settings += ["eval.num_games_during=0", "eval.num_games=10", *overrides]
    options = [part for setting in settings for part in ("--set", setting)]
    call_ludus("train", str(EXAMPLES / example), "--overwrite", *options, folder=start_folder)
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "train"]
    seconds = [step["values"]["step_s"] for step in steps]
    return Training(
        folder=folder,
        training_s=read_summary(folder).wall_seconds_training,
        longest_step=max(seconds) / statistics.median(seconds),
    )


def read_summary(folder: Path) -> Summary:
    """Return the summary of a finished run."""
    return Summary.model_validate_json((folder / SUMMARY_FILE).read_bytes())


def fine_tune(name: str, example: str, seed: int, data: Path, start_folder: Path) -> Path:
    """Fine-tune the model; return the folder of the result."""
    folder = RUNS / f"learn-{name}-{seed}"
    settings = [f"name={folder.name}", f"output_dir={RUNS}", f"seed={seed}"]
    settings += [f"model.path={MODEL}", f"data.path={data}"]
    options = [part for setting in settings for part in ("--set", setting)]
    call_ludus("sft", str(EXAMPLES / example), "--overwrite", *options, folder=start_folder)
    return folder


def evaluate(folder: Path, models: dict[str, Path], options: Sequence[str]) -> ModelEvaluation:
    """Play the same held-back seeds with all models; keep every answer in a folder."""
    answers = folder / ANSWERS_FILE
    names = [part for model in models.values() for part in ("--model", str(model))]
    episodes = ("--episodes", str(NUM_EPISODES), "--baseline", "random", "--json", str(answers))
    call_ludus("eval", *names, *options, *episodes, folder=folder)
    return ModelEvaluation.model_validate_json(answers.read_bytes())


def make_shares(models: dict[str, Path], evaluation: ModelEvaluation) -> dict[str, Share]:
    """Return the share of won episodes of each model."""
    shares = {}
    for name, model in models.items():
        result = evaluation.models[str(model)].result
        assert result.win_rate is not None and result.win_rate_ci95 is not None
        shares[name] = Share(result.win_rate, result.win_rate_ci95)
    return shares


def count_share(outcomes: Sequence[bool]) -> Share:
    """Return the share of the true outcomes."""
    num_true, num_all = sum(outcomes), len(outcomes)
    return Share(num_true / num_all, wilson_interval(num_true, num_all))


def find_difference(evaluation: ModelEvaluation, first: str, second: str) -> tuple[float, float]:
    """Return the 95 % interval of the win rate of the first model minus that of the second."""
    for difference in evaluation.differences:
        low, high = difference.win_rate_difference_ci95 or (0.0, 0.0)
        if (difference.first, difference.second) == (first, second):
            return low, high
        if (difference.first, difference.second) == (second, first):
            return -high, -low
    raise LookupError(f"the evaluation does not compare {first} with {second}")


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


def call_ludus(*arguments: str, folder: Path = ROOT) -> None:
    """Call the command line in a folder, and wait for its end."""
    ludus = str(Path(sys.executable).parent / "ludus")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [ludus, *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


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
