"""Synthetic run folders with the files that a trainer writes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

from ludus.env.evaluation import Z95, wilson_interval
from ludus.proto.config import LanguageModelRun, LocalEnvironment, TrainingConfig
from ludus.proto.metrics import REWARD_TERM_PREFIX, EvalMetric, TrainMetric
from ludus.proto.runs import (
    CHART_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    ChartCell,
    EnvironmentResult,
    EvalReport,
    MetricsRow,
    Phase,
    PolicyChart,
    PolicyResult,
    RowKind,
    Summary,
    Transcript,
    TranscriptMessage,
    TranscriptTurn,
)

NUM_STEPS = 120
EPISODES_PER_STEP = 512
BASELINES = {
    "random": (0.2814, 0.0396, -0.3976),
    "always_stand": (0.3849, 0.0491, -0.1811),
    "dealer_rule": (0.4087, 0.1012, -0.0814),
    "basic_strategy": (0.4331, 0.0927, -0.0411),
}
"""Win rate, draw rate and expected return of each baseline."""


def build_run(
    run_dir: Path,
    *,
    name: str = "demo",
    is_finished: bool = True,
    environments: Sequence[str] = ("blackjack",),
) -> Path:
    """Write the folder of a finished run, or of a run that stopped at step 47 without a summary."""
    run_dir.mkdir(parents=True)
    num_steps = NUM_STEPS if is_finished else 47
    write_config(run_dir, name, environments)
    rows = "".join(
        row.model_dump_json() + "\n" for row in make_metrics_rows(num_steps, environments)
    )
    (run_dir / METRICS_FILE).write_text(rows, encoding="utf-8")
    if is_finished:
        summary = build_summary(name, environments)
        (run_dir / SUMMARY_FILE).write_text(summary.model_dump_json(indent=2))
        (run_dir / CHART_FILE).write_text(build_chart().model_dump_json())
    return run_dir


def transcript(step: int, *, environment: str = "blackjack", answer: str = "STAND") -> Transcript:
    """Return the transcript of an episode with one turn."""
    turn = TranscriptTurn(
        shown=(TranscriptMessage(role="user", text="hard 15 vs 10"),),
        answer=answer,
        action={"text": answer},
        reward=1.0,
    )
    return Transcript(
        step=step,
        environment=environment,
        group=step,
        episode=0,
        seed=7,
        policy_version=step - 1,
        status="terminated",
        reward=0.9,
        episode_return=1.0,
        terms={"environment": 1.0, "brevity": -0.1},
        turns=(turn,),
    )


def write_config(run_dir: Path, name: str, environments: Sequence[str]) -> None:
    config = LanguageModelRun.model_construct(
        **LanguageModelRun(
            environments={
                environment: LocalEnvironment(
                    options={"game": environment},
                    policies="openspiel_env.policies:fixed_policies",
                    baselines=tuple(BASELINES),
                    random_policy="random",
                    optimal_policy="basic_strategy",
                )
                for environment in environments
            },
            training=TrainingConfig(num_steps=NUM_STEPS),
        ).__dict__
        | {"name": name}
    )
    (run_dir / CONFIG_FILE).write_text(config.model_dump_json(indent=2), encoding="utf-8")


def make_metrics_rows(
    num_steps: int, environments: Sequence[str] = ("blackjack",)
) -> list[MetricsRow]:
    rng = random.Random(3)

    def evaluate_environments(step: int) -> list[MetricsRow]:
        return [row for name in environments for row in make_eval_rows(step, 2000, rng, name)]

    rows = [
        make_phase_row(Phase.PREPARE_MODEL),
        *evaluate_environments(0),
        make_phase_row(Phase.TRAIN),
    ]
    for step in range(1, num_steps + 1):
        rows.append(make_train_row(step, rng))
        rows += [make_environment_row(step, rng, name) for name in environments]
        if step % 10 == 0 and step < NUM_STEPS:
            rows += evaluate_environments(step)
    return rows


def make_phase_row(phase: Phase) -> MetricsRow:
    return MetricsRow(kind="phase", step=0, phase=phase, elapsed_s=0, num_games_trained=0)


def compute_skill(step: int) -> float:
    """Return the skill at a step, from 0 (random policy) to almost 1 (optimal policy)."""
    return 0.97 / (1 + math.exp(-(step - 32) / 11)) - 0.05 * math.exp(-step / 20)


def build_result(step: int, num_games: int, win_rate_shift: float = 0.0) -> PolicyResult:
    pairs = zip(BASELINES["random"], BASELINES["basic_strategy"], strict=True)
    win_rate, draw_rate, expected_return = (a + compute_skill(step) * (b - a) for a, b in pairs)
    return make_result(
        num_games, win_rate + win_rate_shift, draw_rate, expected_return + 2 * win_rate_shift
    )


def make_result(
    num_games: int, win_rate: float, draw_rate: float, expected_return: float
) -> PolicyResult:
    half_width = Z95 * 0.96 / math.sqrt(num_games)
    return PolicyResult(
        num_games=num_games,
        win_rate=round(win_rate * num_games) / num_games,
        win_rate_ci95=wilson_interval(round(win_rate * num_games), num_games),
        draw_rate=draw_rate,
        expected_return=expected_return,
        expected_return_ci95=(expected_return - half_width, expected_return + half_width),
    )


def make_eval_rows(
    step: int, num_games: int, rng: random.Random, environment: str
) -> list[MetricsRow]:
    """Return the rows of one evaluation of the trained policy and the baselines."""
    trained_result = build_result(step, num_games, rng.gauss(0, 0.006))
    return [
        make_eval_row("eval", step, environment, trained_result),
        *(
            make_eval_row("baseline", step, environment, make_result(num_games, *rates), name)
            for name, rates in BASELINES.items()
        ),
    ]


def make_eval_row(
    kind: RowKind, step: int, environment: str, result: PolicyResult, policy: str | None = None
) -> MetricsRow:
    return MetricsRow(
        kind=kind,
        step=step,
        environment=environment,
        policy=policy,
        elapsed_s=step * 0.78,
        num_games_trained=step * EPISODES_PER_STEP,
        values={
            EvalMetric.NUM_GAMES: result.num_games,
            EvalMetric.WIN_RATE: result.win_rate,
            EvalMetric.WIN_RATE_CI95_LOW: result.win_rate_ci95[0],
            EvalMetric.WIN_RATE_CI95_HIGH: result.win_rate_ci95[1],
            EvalMetric.DRAW_RATE: result.draw_rate,
            EvalMetric.RETURN_MEAN: result.expected_return,
            EvalMetric.RETURN_CI95_LOW: result.expected_return_ci95[0],
            EvalMetric.RETURN_CI95_HIGH: result.expected_return_ci95[1],
            EvalMetric.INVALID_RATE: result.invalid_rate,
        },
    )


def make_environment_row(step: int, rng: random.Random, environment: str) -> MetricsRow:
    result = build_result(step, EPISODES_PER_STEP)
    return MetricsRow(
        kind="environment",
        step=step,
        environment=environment,
        elapsed_s=step * 0.78,
        num_games_trained=step * EPISODES_PER_STEP,
        values={
            TrainMetric.REWARD_MEAN: result.expected_return + rng.gauss(0, 0.04),
            TrainMetric.WIN_RATE: result.win_rate,
            TrainMetric.NUM_EPISODES: EPISODES_PER_STEP,
            TrainMetric.NUM_EPISODES_SCORED: EPISODES_PER_STEP,
            TrainMetric.NUM_EPISODES_FINISHED: EPISODES_PER_STEP,
            TrainMetric.NUM_EPISODES_INVALID: EPISODES_PER_STEP // (4 + step),
            TrainMetric.NUM_EPISODES_TRUNCATED: 0,
            TrainMetric.NUM_TURNS_MEAN: 1.5 + compute_skill(step),
            TrainMetric.NUM_TOOL_CALLS: 0,
            TrainMetric.NUM_TOOL_CALLS_FAILED: 0,
            f"{REWARD_TERM_PREFIX}environment": result.expected_return,
        },
    )


def make_unlock_row(step: int, environment: str) -> MetricsRow:
    """Return the row for the step at which the curriculum opens an environment."""
    return MetricsRow(
        kind="event",
        step=step,
        environment=environment,
        elapsed_s=step * 0.78,
        num_games_trained=step * EPISODES_PER_STEP,
        values={TrainMetric.NUM_UNLOCKS: 1},
    )


def make_train_row(step: int, rng: random.Random) -> MetricsRow:
    result = build_result(step, EPISODES_PER_STEP)
    return MetricsRow(
        kind="train",
        step=step,
        elapsed_s=step * 0.78,
        num_games_trained=step * EPISODES_PER_STEP,
        values={
            TrainMetric.REWARD_MEAN: result.expected_return + rng.gauss(0, 0.04),
            TrainMetric.ENTROPY: 0.65 * math.exp(-step / 60) + abs(rng.gauss(0, 0.01)),
            TrainMetric.STALENESS_MEAN: rng.choice([0.0, 0.5, 1.0, 1.0]),
            TrainMetric.STALENESS_MAX: 1.0,
            TrainMetric.MISMATCH_KL: abs(rng.gauss(2e-8, 1e-8)),
            TrainMetric.GRAD_NORM: 0.4 + abs(rng.gauss(0, 0.3)),
            TrainMetric.TOKENS_PER_SECOND: 2600 + rng.gauss(0, 150),
            TrainMetric.EPISODES_PER_SECOND: 660 + rng.gauss(0, 30),
            TrainMetric.ZERO_VARIANCE_GROUP_RATIO: 0.3,
            TrainMetric.NUM_EPISODES_LOST: 0,
            TrainMetric.CANARY_ERROR: 1e-7,
            TrainMetric.MFU: 0.31 + rng.gauss(0, 0.01),
        },
    )


def build_summary(name: str = "demo", environments: Sequence[str] = ("blackjack",)) -> Summary:
    results = {environment: build_environment_result(environment) for environment in environments}
    first_result = next(iter(results.values()))
    result, report = first_result.report.policy, first_result.report
    return Summary(
        name=name,
        environment=first_result.environment,
        results=results,
        finished=True,
        seed=0,
        num_steps=NUM_STEPS,
        generator="transformers",
        num_learner_ranks=1,
        num_rollout_workers=1,
        win_rate=result.win_rate,
        win_rate_ci95=result.win_rate_ci95,
        draw_rate=result.draw_rate,
        expected_return=result.expected_return,
        expected_return_ci95=result.expected_return_ci95,
        invalid_rate=0.0,
        gap_closed=report.gap_closed,
        gap_closed_ci95=report.gap_closed_ci95,
        eval_num_games=10_000,
        eval_temperature=1.0,
        start=first_result.start,
        baselines=report.baselines,
        games_trained=NUM_STEPS * EPISODES_PER_STEP,
        games_played=NUM_STEPS * EPISODES_PER_STEP + 3584,
        episodes_lost=12,
        episodes_failed=5,
        wall_seconds_training=93.6,
        wall_seconds_total=148.2,
        weight_syncs=121,
        canary_failures=0,
        canary_max_error=4.8e-7,
        environment_restarts=0,
        learner_restarts=0,
        groups_rolled_back=0,
        max_staleness_seen=1,
        versions={"torch": "2.13.0", "transformers": "5.19.0", "ray": "2.60.0", "ludus": "0.1.0"},
    )


def build_environment_result(environment: str) -> EnvironmentResult:
    return EnvironmentResult(
        environment=f"openspiel_env (game = {environment})",
        start=build_result(0, 2000),
        report=EvalReport(
            policy=build_result(NUM_STEPS, 10_000),
            baselines={key: make_result(10_000, *rates) for key, rates in BASELINES.items()},
            temperature=1.0,
            gap_closed=0.9614,
            gap_closed_ci95=(0.9352, 0.9876),
        ),
    )


def build_chart() -> PolicyChart:
    """Return a chart in which the policy makes mistakes in a few close decisions."""
    rng = random.Random(5)
    cells = [
        make_blackjack_cell(panel, total, dealer, rng)
        for panel, totals in (("hard hands", range(4, 21)), ("soft hands", range(12, 22)))
        for total in totals
        for dealer in range(2, 12)
    ]
    return PolicyChart(environment="blackjack", answers=("HIT", "STAND"), cells=tuple(cells))


def make_blackjack_cell(panel: str, total: int, dealer: int, rng: random.Random) -> ChartCell:
    if panel == "hard hands":
        threshold = (
            11.5 if total < 12 else 12.5 if dealer in (4, 5, 6) else 16.5 if dealer > 6 else 12.6
        )
        margin = threshold - total if total != 12 or dealer not in (4, 5, 6) else -0.3
    else:
        margin = (18.4 if dealer > 8 else 17.6) - total
    hit_probability = 1 / (1 + math.exp(-2.2 * margin + rng.gauss(0, 0.8)))
    return ChartCell(
        panel=panel,
        row=str(total),
        column="A" if dealer == 11 else str(dealer),
        probabilities=(hit_probability, 1 - hit_probability),
        reference="HIT" if margin > 0 else "STAND",
    )
