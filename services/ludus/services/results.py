"""The policies in a run's summary and their results, in display order."""

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
    """True for the trained policy after its training, False for all other policies."""


def format_policy_name(policy_name: str) -> str:
    """Return a policy's name with spaces: "basic strategy"."""
    return policy_name.replace("_", " ")


def list_policies(result: EnvironmentResult) -> list[NamedResult]:
    """Return the policy before and after training, then the fixed policies, worst first."""
    report = result.report
    policies = [NamedResult("policy after training", report.policy, is_trained=True)]
    if result.start is not None:
        policies.insert(0, NamedResult("policy before training", result.start))
    return policies + rank_policies(report.baselines)


def rank_policies(baselines: Mapping[str, PolicyResult]) -> list[NamedResult]:
    """Return the fixed policies by expected return, lowest first."""
    policies = [NamedResult(format_policy_name(name), result) for name, result in baselines.items()]
    return sorted(policies, key=lambda policy: policy.result.expected_return)
