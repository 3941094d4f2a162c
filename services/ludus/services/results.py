"""What a run's summary says of each policy, in the order in which people read it."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.proto.runs import PolicyResult, Summary


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


def trained_policy(summary: Summary) -> PolicyResult:
    """The trained policy's own numbers."""
    return PolicyResult(
        num_games=summary.eval_num_games,
        win_rate=summary.win_rate,
        win_rate_ci95=summary.win_rate_ci95,
        draw_rate=summary.draw_rate,
        expected_return=summary.expected_return,
        expected_return_ci95=summary.expected_return_ci95,
        invalid_rate=summary.invalid_rate,
    )


def compared_policies(summary: Summary) -> list[NamedResult]:
    """The policy before and after training, then the fixed policies from worst to best."""
    results = [NamedResult("policy after training", trained_policy(summary), is_trained=True)]
    if summary.start is not None:
        results.insert(0, NamedResult("policy before training", summary.start))
    return results + ranked(summary.baselines)


def ranked(baselines: dict[str, PolicyResult]) -> list[NamedResult]:
    """Fixed policies from the lowest to the highest expected return."""
    by_return = sorted(baselines.items(), key=lambda item: item[1].expected_return)
    return [NamedResult(readable(name), result) for name, result in by_return]
