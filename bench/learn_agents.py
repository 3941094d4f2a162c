"""Train agents of published frameworks without changes and record how they learn to use a tool.

    langgraph             examples/agents/langgraph_agent.py: better than a policy with one look
    langgraph_shuffled    the control, with shuffled rewards: not better than that policy
    smolagents            examples/agents/smolagents_agent.py: better than that policy

One of three boxes contains the key. A policy that looks into one box and names it finds a third of
the keys; only a policy that uses the output of the tool finds more. Each training starts with the
command line, next to a service of the agent. Results, with the curve of every run, go to
bench/results/learn_agents.json, which keeps rows of earlier calls.

    make learn-agents
    python bench/learn_agents.py --only langgraph --seeds 0 1

The exit code is 1 when a training of this call failed or missed its target.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import machine, read_earlier_runs, write_runs

sys.path.insert(0, str(Path(__file__).parents[1] / "dev"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from ludus.proto.runs import METRICS_FILE, SUMMARY_FILE, Summary
from tests.conformance.frameworks import service

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "agents" / "service.toml"
RESULTS = ROOT / "bench" / "results" / "learn_agents.json"
SEEDS = (0, 1, 2)
ONE_LOOK = 1 / 3
"""Success rate of a policy that looks into one box and names it."""
NUM_ERROR_LINES = 5

CASES = {
    "langgraph": ("langgraph", ()),
    "langgraph_shuffled": ("langgraph", ("training.shuffle_rewards=true",)),
    "smolagents": ("smolagents", ()),
}
"""Framework and overrides of each case."""


@dataclass(frozen=True, slots=True)
class Point:
    """An evaluation during training."""

    step: int
    num_games_trained: int
    win_rate: float


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one training."""

    case: str
    seed: int
    curve: list[Point]
    win_rate: float | None
    """Final win rate; None if the training failed."""
    ci95: tuple[float, float] | None
    num_games_judged: int
    target: str
    training_s: float
    load_average: float
    """Load average of the machine in the minute before."""
    passed: bool
    error: str = ""
    machine: str = field(default_factory=machine)


def main() -> int:
    """Return the exit code: 1 if a training failed or missed its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N")
    chosen = parser.parse_args()
    rows = _read_earlier_rows()
    passed = True
    for case in chosen.only:
        for seed in chosen.seeds:
            row = _run(case, seed)
            passed &= row.passed
            rows = [old for old in rows if (old["case"], old["seed"]) != (case, seed)]
            rows.append({**asdict(row), "made_of": _hash_files(case)})
            print(_format_line(row), flush=True)
            _write(rows)
    return 0 if passed else 1


def _run(case: str, seed: int) -> Row:
    framework, overrides = CASES[case]
    is_control = case.endswith("_shuffled")
    target = f"{'not above' if is_control else 'above'} {ONE_LOOK:.3f}, by the 95 % interval"
    load_average = os.getloadavg()[0]
    folder = ROOT / "runs" / f"learn-agents-{case}-{seed}"
    with tempfile.TemporaryDirectory() as log, service(framework, Path(log)) as url:
        settings = (
            *(f"name={folder.name}", f"output_dir={folder.parent}", f"seed={seed}"),
            *(f"environments.boxes.agent.url={url}", *overrides),
        )
        options = [part for setting in settings for part in ("--set", setting)]
        command = [Path(sys.executable).parent / "ludus", "train", EXAMPLE, "--overwrite", *options]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        error = "\n".join(process.stderr.strip().splitlines()[-NUM_ERROR_LINES:])
        return Row(case, seed, [], None, None, 0, target, 0.0, load_average, False, error)
    summary = Summary.model_validate_json((folder / SUMMARY_FILE).read_bytes())
    policy = summary.results["boxes"].report.policy
    assert policy.win_rate is not None and policy.win_rate_ci95 is not None
    low = policy.win_rate_ci95[0]
    return Row(
        case=case,
        seed=seed,
        curve=_read_curve(folder / METRICS_FILE),
        win_rate=policy.win_rate,
        ci95=policy.win_rate_ci95,
        num_games_judged=policy.num_games,
        target=target,
        training_s=summary.wall_seconds_training,
        load_average=load_average,
        passed=low <= ONE_LOOK if is_control else low > ONE_LOOK,
    )


def _read_curve(metrics: Path) -> list[Point]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        Point(row["step"], row["num_games_trained"], row["values"]["win_rate"])
        for row in rows
        if row["kind"] == "eval"
    ]


def _format_line(row: Row) -> str:
    head = f"{row.case:<20}seed {row.seed}  "
    if row.win_rate is None or row.ci95 is None:
        return f"{head}FAILED: {row.error}"
    curve = " ".join(f"{point.win_rate:.2f}" for point in row.curve)
    low, high = row.ci95
    verdict = "ok" if row.passed else "MISSED"
    return (
        f"{head}{row.win_rate:.3f} ({low:.3f} to {high:.3f})  {verdict}  curve {curve}  "
        f"{row.training_s:.0f} s, load {row.load_average:.1f}"
    )


def _write(rows: Sequence[dict[str, Any]]) -> None:
    order = list(CASES)
    runs = sorted(rows, key=lambda row: (order.index(row["case"]), row["seed"]))
    write_runs(RESULTS, "make learn-agents", runs)


def _read_earlier_rows() -> list[dict[str, Any]]:
    """Return the rows of earlier calls with the same packages and example."""
    return [run for run in read_earlier_runs(RESULTS) if run["made_of"] == _hash_files(run["case"])]


def _hash_files(case: str) -> dict[str, str]:
    """Return the hash of each file of an agent's example."""
    framework, _ = CASES[case]
    files = [EXAMPLE, *map(EXAMPLE.with_name, ("boxes.py", f"{framework}_agent.py"))]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


if __name__ == "__main__":
    sys.exit(main())
