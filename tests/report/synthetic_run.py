"""A run folder with values from formulas, in the form that a trainer writes."""

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
GAMES_PER_STEP = 512
BASELINES = {
    "random": (0.2814, 0.0396, -0.3976),
    "always_stand": (0.3849, 0.0491, -0.1811),
    "dealer_rule": (0.4087, 0.1012, -0.0814),
    "basic_strategy": (0.4331, 0.0927, -0.0411),
}


def build_run(
    run_dir: Path,
    *,
    name: str = "demo",
    finished: bool = True,
    environments: Sequence[str] = ("blackjack",),
) -> Path:
    """Write the folder of a finished run, or of a run that stopped at step 47 without a summary."""
    run_dir.mkdir(parents=True)
    num_steps = NUM_STEPS if finished else 47
    write_config(run_dir, name, environments)
    rows = "".join(row.model_dump_json() + "\n" for row in metrics_rows(num_steps, environments))
    (run_dir / METRICS_FILE).write_text(rows, encoding="utf-8")
    if finished:
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


def metrics_rows(num_steps: int, environments: Sequence[str] = ("blackjack",)) -> list[MetricsRow]:
    noise = random.Random(3)

    def evaluation_rows(step: int) -> list[MetricsRow]:
        return [row for name in environments for row in eval_rows(step, 2000, noise, name)]

    rows = [phase_row(Phase.PREPARE_MODEL), *evaluation_rows(0), phase_row(Phase.TRAIN)]
    for step in range(1, num_steps + 1):
        rows.append(train_row(step, noise))
        rows += [environment_row(step, noise, name) for name in environments]
        if step % 10 == 0 and step < NUM_STEPS:
            rows += evaluation_rows(step)
    return rows


def phase_row(phase: Phase) -> MetricsRow:
    return MetricsRow(kind="phase", step=0, phase=phase, elapsed_s=0, num_games_trained=0)


def compute_skill(step: int) -> float:
    """Return the skill at a step, from 0 (random policy) to almost 1 (optimal policy)."""
    return 0.97 / (1 + math.exp(-(step - 32) / 11)) - 0.05 * math.exp(-step / 20)


def build_result(step: int, num_games: int, shift: float = 0.0) -> PolicyResult:
    worst, best = BASELINES["random"], BASELINES["basic_strategy"]
    win, draw, value = (a + compute_skill(step) * (b - a) for a, b in zip(worst, best, strict=True))
    return make_result(num_games, win + shift, draw, value + 2 * shift)


def make_result(num_games: int, win: float, draw: float, value: float) -> PolicyResult:
    half_width = Z95 * 0.96 / math.sqrt(num_games)
    return PolicyResult(
        num_games=num_games,
        win_rate=round(win * num_games) / num_games,
        win_rate_ci95=wilson_interval(round(win * num_games), num_games),
        draw_rate=draw,
        expected_return=value,
        expected_return_ci95=(value - half_width, value + half_width),
    )


def eval_rows(
    step: int, num_games: int, noise: random.Random, environment: str
) -> list[MetricsRow]:
    """Return the rows of an evaluation: the trained policy and the fixed policies."""
    trained_result = build_result(step, num_games, noise.gauss(0, 0.006))
    return [
        eval_row("eval", step, environment, trained_result),
        *(
            eval_row("baseline", step, environment, make_result(num_games, *rates), name)
            for name, rates in BASELINES.items()
        ),
    ]


def eval_row(
    kind: RowKind, step: int, environment: str, result: PolicyResult, policy: str | None = None
) -> MetricsRow:
    return MetricsRow(
        kind=kind,
        step=step,
        environment=environment,
        policy=policy,
        elapsed_s=step * 0.78,
        num_games_trained=step * GAMES_PER_STEP,
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


def environment_row(step: int, noise: random.Random, environment: str) -> MetricsRow:
    result = build_result(step, GAMES_PER_STEP)
    return MetricsRow(
        kind="environment",
        step=step,
        environment=environment,
        elapsed_s=step * 0.78,
        num_games_trained=step * GAMES_PER_STEP,
        values={
            TrainMetric.REWARD_MEAN: result.expected_return + noise.gauss(0, 0.04),
            TrainMetric.WIN_RATE: result.win_rate,
            TrainMetric.NUM_EPISODES: GAMES_PER_STEP,
            TrainMetric.NUM_EPISODES_SCORED: GAMES_PER_STEP,
            TrainMetric.NUM_EPISODES_FINISHED: GAMES_PER_STEP,
            TrainMetric.NUM_EPISODES_INVALID: GAMES_PER_STEP // (4 + step),
            TrainMetric.NUM_EPISODES_TRUNCATED: 0,
            TrainMetric.NUM_TURNS_MEAN: 1.5 + compute_skill(step),
            TrainMetric.NUM_TOOL_CALLS: 0,
            TrainMetric.NUM_TOOL_CALLS_FAILED: 0,
            f"{REWARD_TERM_PREFIX}environment": result.expected_return,
        },
    )


def unlock_row(step: int, environment: str) -> MetricsRow:
    """Return the row for an environment that the curriculum opens."""
    return MetricsRow(
        kind="event",
        step=step,
        environment=environment,
        elapsed_s=step * 0.78,
        num_games_trained=step * GAMES_PER_STEP,
        values={TrainMetric.NUM_UNLOCKS: 1},
    )


def train_row(step: int, noise: random.Random) -> MetricsRow:
    result = build_result(step, GAMES_PER_STEP)
    return MetricsRow(
        kind="train",
        step=step,
        elapsed_s=step * 0.78,
        num_games_trained=step * GAMES_PER_STEP,
        values={
            TrainMetric.REWARD_MEAN: result.expected_return + noise.gauss(0, 0.04),
            TrainMetric.ENTROPY: 0.65 * math.exp(-step / 60) + abs(noise.gauss(0, 0.01)),
            TrainMetric.STALENESS_MEAN: noise.choice([0.0, 0.5, 1.0, 1.0]),
            TrainMetric.STALENESS_MAX: 1.0,
            TrainMetric.MISMATCH_KL: abs(noise.gauss(2e-8, 1e-8)),
            TrainMetric.GRAD_NORM: 0.4 + abs(noise.gauss(0, 0.3)),
            TrainMetric.TOKENS_PER_SECOND: 2600 + noise.gauss(0, 150),
            TrainMetric.EPISODES_PER_SECOND: 660 + noise.gauss(0, 30),
            TrainMetric.ZERO_VARIANCE_GROUP_RATIO: 0.3,
            TrainMetric.NUM_EPISODES_LOST: 0,
            TrainMetric.CANARY_ERROR: 1e-7,
            TrainMetric.MFU: 0.31 + noise.gauss(0, 0.01),
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
        games_trained=NUM_STEPS * GAMES_PER_STEP,
        games_played=NUM_STEPS * GAMES_PER_STEP + 3584,
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
    """Return a chart of hard and soft hands; the policy errs in a few close decisions."""
    noise = random.Random(5)
    cells = [
        blackjack_cell(panel, total, dealer, noise)
        for panel, totals in (("hard hands", range(4, 21)), ("soft hands", range(12, 22)))
        for total in totals
        for dealer in range(2, 12)
    ]
    return PolicyChart(environment="blackjack", answers=("HIT", "STAND"), cells=tuple(cells))


def blackjack_cell(panel: str, total: int, dealer: int, noise: random.Random) -> ChartCell:
    if panel == "hard hands":
        edge = 11.5 if total < 12 else 12.5 if dealer in (4, 5, 6) else 16.5 if dealer > 6 else 12.6
        margin = edge - total if total != 12 or dealer not in (4, 5, 6) else -0.3
    else:
        margin = (18.4 if dealer > 8 else 17.6) - total
    hit_probability = 1 / (1 + math.exp(-2.2 * margin + noise.gauss(0, 0.8)))
    return ChartCell(
        panel=panel,
        row=str(total),
        column="A" if dealer == 11 else str(dealer),
        probabilities=(hit_probability, 1 - hit_probability),
        reference="HIT" if margin > 0 else "STAND",
    )
