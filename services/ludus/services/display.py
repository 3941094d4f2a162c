"""The policies and episodes of a run as the terminal and the report show them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ludus.proto.runs import (
    LOG_FILE,
    EnvironmentResult,
    EvalReport,
    PolicyResult,
    Transcript,
    TranscriptTurn,
)
from ludus.services.numbers import format_compact


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


def format_num_games(result: PolicyResult) -> str:
    """Return the number of games with a result, and of all games if some are void."""
    if not result.num_void:
        return f"{result.num_games:,}"
    return f"{result.num_games:,} of {result.num_games + result.num_void:,}"


def describe_games(report: EvalReport, start: PolicyResult | None = None) -> Iterator[str]:
    """Yield lines about games that were not played, not counted, or not independent.

    Args:
        start: result of the policy before training, if the table contains it.
    """
    policy = report.policy
    num_played = policy.num_games + policy.num_void
    if report.num_games_requested is not None:
        yield (
            f"{num_played:,} of {report.num_games_requested:,} episodes were played, one for each "
            "task: at temperature 0, further episodes would be the same"
        )
    elif policy.num_tasks is not None and policy.num_tasks < policy.num_games:
        yield (
            f"{policy.num_games:,} episodes of {policy.num_tasks:,} tasks; the intervals are over "
            "tasks"
        )
    results = [policy, *report.baselines.values(), *([start] if start is not None else [])]
    if any(result.num_void for result in results):
        yield (
            "some episodes are void and not counted, because they were lost or failed several "
            f"times; see {LOG_FILE}"
        )


def describe_episode(transcript: Transcript) -> str:
    """Return one line that identifies the episode."""
    return (
        f"step {transcript.step} · {transcript.environment} · group {transcript.group}, "
        f"episode {transcript.episode} · seed {transcript.seed}"
    )


def describe_outcome(transcript: Transcript) -> str:
    """Return one line with the episode's status, return and reward terms."""
    phrases = [
        transcript.status.replace("_", " "),
        f"return {_format_optional(transcript.episode_return)}",
    ]
    if transcript.terms and list(transcript.terms) != ["environment"]:
        terms = ", ".join(
            f"{name} {_format_optional(amount)}" for name, amount in transcript.terms.items()
        )
        phrases.append(f"reward {_format_optional(transcript.reward)} of {terms}")
    return " · ".join(phrases)


def describe_consequence(turn: TranscriptTurn) -> str:
    """Return one line with a turn's action and reward, or '' if it had neither."""
    action = turn.action
    if isinstance(action, dict) and list(action) == ["text"]:
        action = action["text"]
    phrases = [] if action is None else [f"action {json.dumps(action, ensure_ascii=False)}"]
    if turn.reward:
        phrases.append(f"reward {format_compact(turn.reward)}")
    return ", ".join(phrases)


def _format_optional(amount: float | None) -> str:
    return "none" if amount is None else format_compact(amount)
