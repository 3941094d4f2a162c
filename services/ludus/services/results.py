"""What a run's summary says of each policy, in the order in which people read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ludus.proto.runs import EnvironmentResult, PolicyResult


@dataclass(frozen=True, slots=True)
class NamedResult:
    """A policy and how it did."""

    name: str
    result: PolicyResult
    is_trained: bool = False
    """True for the policy that the run trained, after training."""


def readable(policy_name: str) -> str:
    """A policy's name as people write it: "basic strategy"."""
    return policy_name.replace("_", " ")


def compared_policies(result: EnvironmentResult) -> list[NamedResult]:
    """The policy before and after training, then the fixed policies from worst to best."""
    report = result.report
    results = [NamedResult("policy after training", report.policy, is_trained=True)]
    if result.start is not None:
        results.insert(0, NamedResult("policy before training", result.start))
    return results + ranked(report.baselines)


def ranked(baselines: Mapping[str, PolicyResult]) -> list[NamedResult]:
    """Fixed policies from the lowest to the highest expected return."""
    by_return = sorted(baselines.items(), key=lambda item: item[1].expected_return)
    return [NamedResult(readable(name), result) for name, result in by_return]
