"""Fake of `python -m ludus.trainer`.

Usage: `fake_trainer.py SCENARIO train|check|eval ...`.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from ludus.proto.config import LanguageModelRun, PretrainedModel
from ludus.proto.memory_plan import MEMORY_PLAN_PREFIX, MemoryPart, MemoryPlan, MemoryUse
from ludus.proto.metrics import EvalMetric, TrainMetric
from ludus.proto.runs import (
    CONFIG_FILE,
    LOG_FILE,
    METRICS_FILE,
    MODEL_SIZE_PREFIX,
    RESOLVED_PREFIX,
    SUMMARY_FILE,
    EnvironmentResult,
    EvalReport,
    Evaluation,
    MetricsRow,
    ModelSize,
    Phase,
    PolicyResult,
    Summary,
)

GAMES_PER_STEP = 100
FLAGS = ("--resume", "--overwrite")


def main() -> int:
    scenario = sys.argv[1]
    args = parse_arguments(sys.argv[2:])
    match scenario:
        case "refuses":
            sys.stderr.write(
                "error: 'runs/demo' already contains a run\n  continue with --resume\nend\n"
            )
            return 2
        case "crashes":
            sys.stderr.write("Traceback (most recent call last):\nValueError: no gradient\n")
            return 1
        case "dies":
            signal.raise_signal(signal.SIGKILL)
    if args.command == "eval":
        return evaluate(args)
    if args.command == "check" and scenario == "resolves":
        checked_run = LanguageModelRun.model_validate_json(args.config.read_text())
        rollout = checked_run.rollout.model_copy(update={"invalid_action_reward": -3.0})
        model = PretrainedModel(path="owner/model")
        checked_run = checked_run.model_copy(update={"rollout": rollout, "model": model})
        sys.stdout.write(f"{RESOLVED_PREFIX}{checked_run.model_dump_json()}\nnoise\n")
        size = ModelSize(num_parameters=1000, num_trained=100)
        sys.stdout.write(f"{MODEL_SIZE_PREFIX}{size.model_dump_json()}\n")
        sys.stdout.write(f"{MEMORY_PLAN_PREFIX}{build_memory_plan().model_dump_json()}\n")
    if args.command == "check":
        return 0
    run = LanguageModelRun.model_validate_json(args.config.read_text())
    folder = Path(run.output_dir) / run.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(run.model_dump_json())
    (folder / LOG_FILE).write_text("started\n")
    (folder / "flags").write_text(json.dumps([a for a in sys.argv if a.startswith(FLAGS)]))
    if scenario in ("waits", "never_stops"):
        return wait_for_signal(folder, stops_on_signal=scenario == "waits")
    return train(run, folder)


def build_memory_plan() -> MemoryPlan:
    """Return a plan in which the learner rank fits, and the node may be too small."""
    rank = MemoryUse(
        owner="learner rank",
        memory_kind="GPU",
        parts=(
            MemoryPart(name="weights", num_bytes=2**29),
            MemoryPart(name="activations", num_bytes=2**30),
        ),
        num_available_bytes=2**31,
        remedy="set learner.dtype = 'bfloat16'",
    )
    node = rank.model_copy(
        update={"owner": "node", "memory_kind": "main memory", "num_available_bytes": 2**20}
    )
    return MemoryPlan(uses=(rank, node), max_tokens_per_micro_batch=64)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["train", "check", "eval"])
    for name in ("--config", "--run-dir", "--output", "--checkpoint"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--games", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--resume", choices=["always", "auto"])
    parser.add_argument("--overwrite", action="store_true")
    return parser.parse_args(arguments)


def train(run: LanguageModelRun, folder: Path) -> int:
    sys.stdout.write("noise on stdout\n")
    sys.stderr.write("warning: vLLM is not installed here\n")
    with (folder / METRICS_FILE).open("w", buffering=1) as metrics:
        for row in build_rows(run.training.num_steps):
            metrics.write(row.model_dump_json(exclude_defaults=True) + "\n")
            time.sleep(0.02)
    (folder / SUMMARY_FILE).write_text(build_summary(run).model_dump_json())
    return 0


def wait_for_signal(folder: Path, *, stops_on_signal: bool) -> int:
    """Wait for a signal, write all received signals to a file and return the exit code.

    If `stops_on_signal` is false, never return.
    """
    signals: list[int] = []
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda received_signal, _: signals.append(received_signal))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / "pids").write_text(f"{subprocess.os.getpid()} {child.pid}")
    while not signals or not stops_on_signal:
        time.sleep(0.02)
    time.sleep(0.3)
    (folder / "signals").write_text(" ".join(str(signal_number) for signal_number in signals))
    return 130


def build_rows(num_steps: int) -> list[MetricsRow]:
    metrics_rows = [
        MetricsRow(kind="phase", step=0, phase=Phase.TRAIN, elapsed_s=0, num_games_trained=0)
    ]
    for step in range(1, num_steps + 1):
        values = {
            TrainMetric.REWARD_MEAN: -0.25,
            TrainMetric.TOKENS_PER_SECOND: 2345.0,
            TrainMetric.NUM_EPISODES_LOST: 1,
        }
        metrics_rows.append(build_row("train", step, values))
    values: dict[str, float] = {
        EvalMetric.WIN_RATE: 0.401,
        EvalMetric.WIN_RATE_CI95_LOW: 0.391,
        EvalMetric.WIN_RATE_CI95_HIGH: 0.411,
        EvalMetric.RETURN_MEAN: -0.1,
    }
    return [*metrics_rows, build_row("eval", num_steps, values, "openspiel")]


def build_row(
    kind: str, step: int, values: dict[str, float], environment: str | None = None
) -> MetricsRow:
    return MetricsRow.model_validate(
        {
            "kind": kind,
            "step": step,
            "environment": environment,
            "elapsed_s": 2.0 * step,
            "num_games_trained": GAMES_PER_STEP * step,
            "values": values,
        }
    )


def build_result(win_rate: float) -> PolicyResult:
    return PolicyResult(
        num_games=1000,
        win_rate=win_rate,
        win_rate_ci95=(win_rate - 0.01, win_rate + 0.01),
        draw_rate=0.05,
        expected_return=2 * win_rate - 0.95,
        expected_return_ci95=(2 * win_rate - 0.97, 2 * win_rate - 0.93),
    )


def build_report(num_games: int, temperature: float) -> EvalReport:
    return EvalReport(
        policy=build_result(0.401).model_copy(update={"num_games": num_games}),
        baselines={"random": build_result(0.28), "basic_strategy": build_result(0.43)},
        temperature=temperature,
        gap_closed=0.912,
        gap_closed_ci95=(0.881, 0.943),
    )


def build_summary(run: LanguageModelRun) -> Summary:
    final_report = build_report(1000, 1.0)
    start_result = build_result(0.281)
    results = {
        name: EnvironmentResult(
            environment="openspiel_env", start=start_result, report=final_report
        )
        for name in run.environments
    }
    return Summary(
        **final_report.policy.model_dump(exclude={"num_games", "num_tasks", "num_void"}),
        name=run.name,
        environment="openspiel_env",
        results=results,
        finished=True,
        seed=run.seed,
        num_steps=run.training.num_steps,
        generator="transformers",
        num_learner_ranks=1,
        num_rollout_workers=1,
        gap_closed=final_report.gap_closed,
        gap_closed_ci95=final_report.gap_closed_ci95,
        eval_num_games=1000,
        eval_temperature=1.0,
        start=start_result,
        baselines=final_report.baselines,
        games_trained=GAMES_PER_STEP * run.training.num_steps,
        games_played=5000,
        episodes_lost=3,
        wall_seconds_training=42.0,
        wall_seconds_total=60.0,
        weight_syncs=7,
        canary_failures=0,
        canary_max_error=1e-7,
        environment_restarts=0,
        learner_restarts=0,
        groups_rolled_back=0,
        max_staleness_seen=1,
        versions={},
    )


def evaluate(args: argparse.Namespace) -> int:
    temperature = 1.0 if args.temperature is None else args.temperature
    run = LanguageModelRun.model_validate_json(args.config.read_text())
    final_report = build_report(args.games or 1000, temperature)
    evaluation = Evaluation(environments=dict.fromkeys(run.environments, final_report))
    args.output.write_text(evaluation.model_dump_json())
    return 0


sys.exit(main())
