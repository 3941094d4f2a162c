"""Train the language examples with several seeds and check the completions of their policies.

    cot             exact answers and mean reward on held-out sums: at least .90 and -.5
    cot_shuffled    the control with shuffled rewards: no better than a blind guess
    summarization   mean reward over both articles: at least 1.35; 1.5 is possible
    rlhf            the reward model's score and the hidden rule's reward, for kl_coef 0, .1 and 1:
                    above the initial values, and lower for a higher kl_coef

Results go to bench/results/learn_language.json.

    make learn-language
    python bench/learn_language.py --only cot --seeds 0 1

The exit code is 1 if a run of this call failed or missed its target.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from answers import Answer, Sampler
from machine import machine, read_earlier_runs, write_runs

from ludus.proto.config import LanguageModelRun
from ludus.proto.runs import CONFIG_FILE, SUMMARY_FILE, Summary
from ludus.proto.seeds import FIRST_EVAL_SEED
from ludus.trainer.compat.gymformer.env.rewards import (
    distance_to_answer,
    extract_final_answer,
    summary_reward,
)
from ludus.trainer.compat.gymformer.env.summarization_env import ARTICLES, make_article_prompt
from ludus.trainer.reward_model import load_reward_model
from prompts_env import make_environment

ROOT = Path(__file__).parents[1]
EXAMPLES, RUNS = ROOT / "examples", ROOT / "runs"
COT, SUMMARIZATION, RLHF = "cot/tiny.toml", "summarization/tiny.toml", "rlhf/tiny.toml"
RESULTS = ROOT / "bench" / "results" / "learn_language.json"
SEEDS = (0, 1, 2)
sys.path.append(str(EXAMPLES / "reward_model"))

MAX_TRAINING_S = 300.0
COT_EXACT, COT_REWARD = 0.90, -0.5
SUMMARY_REWARD = 1.35
KL_COEFS = (0.0, 0.1, 1.0)
PREFERENCES = ("--num", "6000", "--odd", "0.6")
"""Options of the data, as in the first comment of examples/rlhf/tiny.toml."""
REWARD_MODEL_EPOCHS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one case with one seed."""

    case: str
    seed: int
    values: dict[str, float]
    target: str
    training_s: float
    """Training time of all runs of language models in the case."""
    load_average: float
    """Load average of the machine in the minute before."""
    passed: bool
    error: str = ""
    machine: str = field(default_factory=machine)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run."""

    folder: Path
    training_s: float


def train(example: str, name: str, seed: int, *overrides: str) -> FinishedRun:
    """Train an example and return its run.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    all_overrides = (f"name={name}", f"output_dir={RUNS}", f"seed={seed}", *overrides)
    settings = [part for override in all_overrides for part in ("--set", override)]
    call("ludus", "train", str(EXAMPLES / example), "--overwrite", *settings)
    summary = Summary.model_validate_json((RUNS / name / SUMMARY_FILE).read_bytes())
    return FinishedRun(RUNS / name, summary.wall_seconds_training)


def call(program: str, *arguments: str) -> None:
    """Run a program of the current virtual environment.

    Raises:
        subprocess.CalledProcessError: the program failed.
    """
    path = Path(sys.executable).parent / program
    subprocess.run([path, *arguments], cwd=ROOT, check=True, capture_output=True, text=True)


def cot(seed: int) -> Row:
    """Train `cot` and check exact answers and the mean reward on held-out sums."""
    load_average = os.getloadavg()[0]
    run = train(COT, f"learn-cot-{seed}", seed)
    values = evaluate_sums(run.folder)
    passed = values["exact"] >= COT_EXACT and values["reward"] >= COT_REWARD
    target = f"exact {COT_EXACT}, reward {COT_REWARD}, in {MAX_TRAINING_S:.0f} s"
    passed = passed and run.training_s <= MAX_TRAINING_S
    return Row("cot", seed, values, target, run.training_s, load_average, passed)


def cot_shuffled(seed: int) -> Row:
    """Train `cot` with shuffled rewards; it must not beat a constant answer."""
    load_average = os.getloadavg()[0]
    name = f"learn-cot-shuffled-{seed}"
    run = train(COT, name, seed, "training.shuffle_rewards=true")
    values = evaluate_sums(run.folder)
    most_common_share = Counter(held_out_sums().values()).most_common(1)[0][1] / len(
        held_out_sums()
    )
    target = f"exact not above {most_common_share:.2f}"
    passed = values["exact"] <= most_common_share
    return Row("cot_shuffled", seed, values, target, run.training_s, load_average, passed)


def held_out_sums() -> dict[str, int]:
    """Return the solutions of the held-out sums, by question."""
    environment = make_environment(
        path=str(EXAMPLES / "cot" / "sums.jsonl"), prompt="question", test_size=0.1
    )
    rows = {}
    for number in range(1000):
        row = environment.reset(seed=FIRST_EVAL_SEED + number).info
        rows[row["question"]] = row["answer"]
    return rows


def evaluate_sums(run: Path) -> dict[str, float]:
    """Evaluate the policy on held-out sums before and after training."""
    config = LanguageModelRun.model_validate_json((run / CONFIG_FILE).read_bytes())
    max_tokens = config.rollout.max_completion_tokens
    values = {}
    for trained in (False, True):
        solutions = held_out_sums()
        answers = Sampler(run, trained=trained).answers(list(solutions), 40, max_tokens)
        exact = [
            extract_final_answer(answer.text) == str(solutions[answer.prompt]) for answer in answers
        ]
        rewards = [distance_to_answer(answer.text, solutions[answer.prompt]) for answer in answers]
        suffix = "" if trained else "_before"
        values[f"exact{suffix}"] = statistics.fmean(exact)
        values[f"reward{suffix}"] = statistics.fmean(rewards)
    return values


def summarization(seed: int) -> Row:
    """Train `summarization` and check the mean reward on both articles."""
    load_average = os.getloadavg()[0]
    run = train(SUMMARIZATION, f"learn-summarization-{seed}", seed)
    terms = {make_article_prompt(article): article.key_terms for article in ARTICLES}
    values = {}
    for trained in (False, True):
        answers = Sampler(run.folder, trained=trained).answers(list(terms), 500, 32)
        rewards = [summary_reward(answer.text, terms[answer.prompt]) for answer in answers]
        values["reward" if trained else "reward_before"] = statistics.fmean(rewards)
    passed = values["reward"] >= SUMMARY_REWARD
    target = f"reward {SUMMARY_REWARD} of 1.5"
    return Row("summarization", seed, values, target, run.training_s, load_average, passed)


def rlhf(seed: int) -> Row:
    """Train `rlhf` with each KL coefficient and check the reward model's and the rule's rewards."""
    load_average = os.getloadavg()[0]
    folder = RUNS / f"learn-preferences-{seed}"
    make = str(EXAMPLES / "reward_model" / "make_preferences.py")
    call("python", make, str(folder), "--seed", str(seed), *PREFERENCES)
    call("python", str(EXAMPLES / "rlhf" / "make_data.py"), str(folder))
    train_reward_model(folder, seed)
    values: dict[str, float] = {}
    training_s = 0.0
    for kl_coef in KL_COEFS:
        run = train(RLHF, f"learn-rlhf-{seed}-{kl_coef:g}", seed, *_make_overrides(kl_coef, folder))
        training_s += run.training_s
        if not values:
            values |= _evaluate_rlhf("before", run.folder, folder, seed, trained=False)
        values |= _evaluate_rlhf(f"kl_{kl_coef:g}", run.folder, folder, seed, trained=True)
    target = "above the initial value, and lower for a higher kl_coef"
    passed = is_monotone(values, "score") and is_monotone(values, "rule")
    return Row("rlhf", seed, values, target, training_s, load_average, passed)


def train_reward_model(folder: Path, seed: int) -> None:
    """Train a reward model on the preferences in a folder."""
    fields = {
        "model": folder / "model",
        "data": folder / "preferences.jsonl",
        "output": folder / "reward_model",
        "seed": seed,
        "epochs": REWARD_MODEL_EPOCHS,
    }
    settings = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
    example = str(EXAMPLES / "reward_model" / "tiny.toml")
    call("ludus", "train-reward", example, "--overwrite", *settings)


def is_monotone(values: Mapping[str, float], key: str) -> bool:
    """Return whether a value falls with kl_coef and stays above its value before training."""
    series = [values[f"kl_{kl_coef:g}.{key}"] for kl_coef in KL_COEFS] + [values[f"before.{key}"]]
    return all(later < earlier for earlier, later in pairwise(series))


def _make_overrides(kl_coef: float, folder: Path) -> tuple[str, ...]:
    """Return the overrides of a run with this KL coefficient."""
    placement = () if kl_coef else ("algorithm.kl_placement=loss", "algorithm.kl_estimator=k3")
    prompts = {"path": str(folder / "prompts.jsonl"), "example_answers": "examples"}
    term = {"kind": "model", "path": str(folder / "reward_model")}
    return (
        f"algorithm.kl_coef={kl_coef}",
        *placement,
        f"environment.options={json.dumps(prompts)}",
        f"environment.rewards={json.dumps([term])}",
    )


def _evaluate_rlhf(
    name: str, run: Path, folder: Path, seed: int, *, trained: bool
) -> dict[str, float]:
    from make_preferences import TOPICS, HiddenRule

    topics = {f"Tell me about {topic}.": topic for topic in TOPICS}
    answers: list[Answer] = Sampler(run, trained=trained).answers(list(topics), 100, 12)
    model = load_reward_model(folder / "reward_model")
    prompts = [[{"role": "user", "content": answer.prompt}] for answer in answers]
    completions = [[{"role": "assistant", "content": answer.text}] for answer in answers]
    rule = HiddenRule(seed)
    return {
        f"{name}.score": statistics.fmean(model.score(prompts, completions)),
        f"{name}.rule": statistics.fmean(
            rule.score_answer(topics[answer.prompt], answer.text) for answer in answers
        ),
        f"{name}.kl": statistics.fmean(answer.logprob - answer.ref_logprob for answer in answers),
    }


CASES: dict[str, Callable[[int], Row]] = {
    case.__name__: case for case in (cot, cot_shuffled, summarization, rlhf)
}


def main() -> int:
    """Return the exit code: 1 if a run of this call failed or missed its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = _read_earlier_rows()
    all_passed = True
    for name in chosen.only:
        for seed in chosen.seeds:
            row = _row(name, seed)
            all_passed &= row.passed
            rows = [old for old in rows if (old.case, old.seed) != (name, seed)] + [row]
            print(_format_line(row), flush=True)
            _write(rows)
    return 0 if all_passed else 1


def _row(name: str, seed: int) -> Row:
    try:
        return CASES[name](seed)
    except subprocess.CalledProcessError as error:
        message = "\n".join(str(error.stderr).strip().splitlines()[-5:])
        return Row(name, seed, {}, "", 0.0, os.getloadavg()[0], passed=False, error=message)


def _format_line(row: Row) -> str:
    values = "  ".join(f"{name} {value:.3f}" for name, value in row.values.items())
    verdict = "ok" if row.passed else f"MISSED {row.error}"
    return (
        f"{row.case:<15}seed {row.seed}  {values}  ({row.target})  {row.training_s:.0f} s  "
        f"load {row.load_average:.1f}  {verdict}"
    )


def _write(rows: Sequence[Row]) -> None:
    order = list(CASES)
    rows = sorted(rows, key=lambda row: (order.index(row.case), row.seed))
    write_runs(RESULTS, "make learn-language", [asdict(row) for row in rows])


def _read_earlier_rows() -> list[Row]:
    """Return the rows of earlier calls with the same packages."""
    return [Row(**run) for run in read_earlier_runs(RESULTS)]


if __name__ == "__main__":
    sys.exit(main())
