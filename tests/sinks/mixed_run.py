"""Synthetic metrics rows of a run with two environments."""

from __future__ import annotations

from ludus.proto.config import LanguageModelRun
from ludus.proto.metrics import EvalMetric, TrainMetric
from ludus.proto.runs import MetricsRow, Phase, WorkerWeightsRow

EPISODES_PER_STEP = 100


def make_run_config(**metrics: object) -> LanguageModelRun:
    return LanguageModelRun.model_validate(
        {
            "name": "mixed",
            "environments": {
                "blackjack": {
                    "options": {"game": "blackjack"},
                    "policies": "openspiel_env.policies:fixed_policies",
                    "baselines": ["random"],
                },
                "tic_tac_toe": {"options": {"game": "tic_tac_toe", "opponent": "first"}},
            },
            "metrics": metrics,
        }
    )


def make_phase_row(phase: Phase, step: int = 0) -> MetricsRow:
    return MetricsRow(kind="phase", step=step, phase=phase, elapsed_s=0, num_games_trained=0)


def make_step_rows(step: int) -> list[MetricsRow]:
    """Return the rows of a step with 40 blackjack and 60 tic-tac-toe episodes."""
    run_values = {
        TrainMetric.LOSS: 1 / step,
        TrainMetric.NUM_EPISODES: 100,
        TrainMetric.NUM_TOKENS_TRAINED: 1000,
        TrainMetric.TRAIN_S: 0.5,
        TrainMetric.STEP_S: 0.75,
    }
    return [
        _make_row("train", step, run_values),
        _make_row(
            "environment", step, _make_environment_values(40, num_wins=10, num_draws=5), "blackjack"
        ),
        _make_row(
            "environment",
            step,
            _make_environment_values(60, num_wins=60, num_draws=0),
            "tic_tac_toe",
        ),
    ]


def make_eval_rows(step: int, win_rate: float) -> list[MetricsRow]:
    policy_values = {EvalMetric.NUM_GAMES: 50, EvalMetric.WIN_RATE: win_rate}
    baseline_values = {EvalMetric.NUM_GAMES: 50, EvalMetric.WIN_RATE: 0.28}
    return [
        _make_row("eval", step, policy_values, "blackjack"),
        _make_row("baseline", step, baseline_values, "blackjack", "random"),
        _make_row("eval", step, policy_values, "tic_tac_toe"),
    ]


def make_event_row(metric: TrainMetric, environment: str | None = None) -> MetricsRow:
    return _make_row("event", 3, {metric: 1}, environment)


def make_weights_row(version: int, hash_by_worker: dict[int, str]) -> MetricsRow:
    weights = tuple(
        WorkerWeightsRow(
            worker=worker, version=version, content_hash=content_hash, canary_error=1e-7
        )
        for worker, content_hash in hash_by_worker.items()
    )
    return MetricsRow(
        kind="weights",
        step=version,
        weights=weights,
        elapsed_s=0,
        num_games_trained=0,
        values={TrainMetric.SAMPLER_PAUSE_S: 0.25},
    )


def _make_environment_values(
    num_episodes: int, *, num_wins: int, num_draws: int
) -> dict[str, float]:
    return {
        TrainMetric.NUM_EPISODES: num_episodes,
        TrainMetric.NUM_WINS: num_wins,
        TrainMetric.NUM_DRAWS: num_draws,
        TrainMetric.NUM_LOSSES: num_episodes - num_wins - num_draws,
        TrainMetric.WIN_RATE: num_wins / num_episodes,
        TrainMetric.NUM_TOKENS_GENERATED: 7 * num_episodes,
        "reward_term.format": 0.5,
    }


def _make_row(
    kind: str,
    step: int,
    values: dict[str, float],
    environment: str | None = None,
    policy: str | None = None,
) -> MetricsRow:
    return MetricsRow.model_validate(
        {
            "kind": kind,
            "step": step,
            "environment": environment,
            "policy": policy,
            "elapsed_s": 2.0 * step,
            "num_games_trained": EPISODES_PER_STEP * step,
            "values": values,
        }
    )
