"""Results of the policies in a run's summary, in display order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ludus.proto.runs import EnvironmentResult, PolicyResult


@dataclass(frozen=True, slots=True)
class NamedResult:
    """A policy's display name and its result."""

    name: str
    result: PolicyResult
    is_trained: bool = False
    """True only for the trained policy, evaluated after training."""


def readable_policy_name(policy_name: str) -> str:
    """Return a policy's name with spaces: "basic strategy"."""
    return policy_name.replace("_", " ")


def compare_policies(result: EnvironmentResult) -> list[NamedResult]:
    """List the policy before and after training, then the fixed policies from worst to best."""
    report = result.report
    results = [NamedResult("policy after training", report.policy, is_trained=True)]
    if result.start is not None:
        results.insert(0, NamedResult("policy before training", result.start))
    return results + rank_policies(report.baselines)


def rank_policies(baselines: Mapping[str, PolicyResult]) -> list[NamedResult]:
    """Sort fixed policies by expected return, lowest first."""
    by_return = sorted(baselines.items(), key=lambda item: item[1].expected_return)
    return [NamedResult(readable_policy_name(name), result) for name, result in by_return]
