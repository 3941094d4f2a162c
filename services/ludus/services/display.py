"""The policies and episodes of a run as the terminal and the report show them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ludus.proto.evaluations import EvaluatedEpisode, ModelEvaluation, ModelResult
from ludus.proto.runs import (
    LOG_FILE,
    EnvironmentResult,
    EvalReport,
    PolicyResult,
    Transcript,
    TranscriptTurn,
)
from ludus.services.numbers import (
    format_compact,
    format_percent,
    format_percent_interval,
)

if TYPE_CHECKING:
    from ludus.proto.config import EnvironmentConfig, NetworkEnvironmentConfig


@dataclass(frozen=True, slots=True)
class NamedResult:
    """A policy's display name and its result."""

    name: str
    result: PolicyResult
    is_trained: bool = False
    """True for the trained policy after its training, False for all other policies."""


def describe_environment(environment: EnvironmentConfig | NetworkEnvironmentConfig) -> str:
    """Return the package and the options of an environment, or the address of its server."""
    if environment.kind == "remote":
        from ludus.env.transports.address import parse_address  # imports gRPC

        return str(parse_address(environment.address))  # without credentials
    options = ", ".join(f"{name} = {value}" for name, value in environment.options.items())
    return f"{environment.package} ({options})" if options else environment.package


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


def format_num_episodes(result: PolicyResult) -> str:
    """Return the number of episodes with a result, and of all episodes if some are void."""
    if not result.num_void:
        return f"{result.num_games:,}"
    return f"{result.num_games:,} of {result.num_games + result.num_void:,}"


def describe_played_episodes(
    report: EvalReport, start: PolicyResult | None = None
) -> Iterator[str]:
    """Yield lines about episodes that were not played, not counted, or not independent.

    Args:
        start: result of the policy before training, if the table contains it.
    """
    policy = report.policy
    num_played = policy.num_games + policy.num_void
    if report.num_games_requested is not None:
        yield (
            f"{num_played:,} of {report.num_games_requested:,} episodes were played, "
            f"{_explain_limit(report.temperature, num_played, policy.num_tasks)}"
        )
    if policy.num_tasks is not None and policy.num_tasks < policy.num_games:
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


def _explain_limit(temperature: float, num_played: int, num_tasks: int | None) -> str:
    if temperature == 0 and num_played == num_tasks:
        return "one for each task: at temperature 0, further episodes would be the same"
    return "the most for this number of tasks (eval.max_games_per_task)"


def list_model_results(evaluation: ModelEvaluation) -> list[NamedResult]:
    """Return the models in their order, then the fixed policies, worst first."""
    models = [
        NamedResult(name, model.result, is_trained=True)
        for name, model in evaluation.models.items()
    ]
    return models + rank_policies(evaluation.baselines)


def describe_evaluation(evaluation: ModelEvaluation) -> str:
    """Return one line about the environment and the sampling of an evaluation."""
    options = ", ".join(f"{name} = {value}" for name, value in evaluation.options.items())
    environment = f"{evaluation.environment} ({options})" if options else evaluation.environment
    source = evaluation.endpoint or f"{evaluation.generator} engine"
    return (
        f"{environment} · {evaluation.num_episodes:,} episodes of each policy · "
        f"temperature {evaluation.temperature:g} · {source} · seed {evaluation.seed}"
    )


def describe_models(evaluation: ModelEvaluation) -> Iterator[str]:
    """Yield lines about episodes that were not played, cut off, not counted or not independent."""
    if evaluation.num_episodes < evaluation.num_episodes_requested:
        yield (
            f"{evaluation.num_episodes:,} of {evaluation.num_episodes_requested:,} episodes were "
            f"played, {_explain_limit(evaluation.temperature, 1, 1)}"
        )
    for name, model in evaluation.models.items():
        yield from (f"{name}: {note}" for note in _describe_model(model, evaluation))


def describe_success(result: PolicyResult) -> str:
    """Return the share of successes with its interval."""
    interval = format_percent_interval(result.win_rate_ci95)
    return f"{format_percent(result.win_rate)} ({interval})"


def list_evaluation_facts(evaluation: ModelEvaluation) -> list[tuple[str, str]]:
    """Return the names and values of an evaluation's settings."""
    last_seed = evaluation.first_seed + evaluation.num_episodes - 1
    return [
        ("Environment", evaluation.environment),
        ("Options", json.dumps(evaluation.options, ensure_ascii=False)),
        ("Completions from", evaluation.endpoint or f"{evaluation.generator} engine"),
        ("Temperature", f"{evaluation.temperature:g}"),
        ("Maximum tokens of a completion", f"{evaluation.max_completion_tokens:,}"),
        ("Seeds", f"{evaluation.first_seed} to {last_seed}"),
    ]


def describe_model_outcome(episode: EvaluatedEpisode) -> str:
    """Return one line with the model, the status and the return of an episode."""
    status = episode.status.replace("_", " ")
    return f"{episode.policy}: {status}, return {_format_optional(episode.episode_return)}"


def _describe_model(model: ModelResult, evaluation: ModelEvaluation) -> Iterator[str]:
    result = model.result
    num_episodes = result.num_games + result.num_void
    if not evaluation.is_finished and num_episodes < evaluation.num_episodes:
        yield f"stopped after {num_episodes:,} of {evaluation.num_episodes:,} episodes"
    if model.gap_closed is not None and evaluation.best_baseline is not None:
        interval = format_percent_interval(model.gap_closed_ci95)
        yield (
            f"gap closed from random to {format_policy_name(evaluation.best_baseline)}, the best "
            f"fixed policy: {format_percent(model.gap_closed)} ({interval}, 95%)"
        )
    if result.invalid_rate:
        yield f"{format_percent(result.invalid_rate)} of the episodes ended with an invalid action"
    for reason, count in model.truncations.items():
        yield f"{count:,} of {num_episodes:,} episodes were truncated: {reason}"
    for reason, count in model.failures.items():
        yield f"{count:,} of {num_episodes:,} episodes are void and not counted: {reason}"
    if result.num_tasks is not None and result.num_tasks < result.num_games:
        yield (
            f"{result.num_games:,} episodes of {result.num_tasks:,} tasks; the intervals are over "
            "tasks"
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
    if transcript.success is not None:
        phrases.append("success" if transcript.success else "no success")
    if transcript.terms and list(transcript.terms) != ["environment"]:
        terms = ", ".join(
            f"{name} {_format_optional(amount)}" for name, amount in transcript.terms.items()
        )
        phrases.append(f"reward {_format_optional(transcript.reward)} of {terms}")
    return " · ".join(phrases)


def format_return(transcript: Transcript) -> str:
    """Return the sum of an episode's rewards, or "none"."""
    return _format_optional(transcript.episode_return)


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
