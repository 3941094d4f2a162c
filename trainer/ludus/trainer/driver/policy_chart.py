"""The chart of a policy's action probabilities in the situations of an environment."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

import torch

from ludus.env import PolicyChartPrompt
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.proto.runs import ChartCell, PolicyChart
from ludus.trainer.core.functions import import_callable
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.models.chat import ChatTokenizer

ScoreFunction = Callable[[Sequence[ScoringRequest]], Awaitable[list[list[float]]]]
"""Function of requests that returns the log-probs of each completion's tokens."""


async def make_policy_chart(
    run: LanguageModelRun, tokenizer: ChatTokenizer, score: ScoreFunction
) -> PolicyChart | None:
    """Return the chart of the first environment that defines chart prompts; None without one.

    The probabilities are those of sampling any of the answers, restricted as in the run.
    """
    chart_prompts = load_chart_prompts(run)
    if chart_prompts is None:
        return None
    name, prompts = chart_prompts
    answers = tuple(prompts[0].answers)
    is_restricted = run.rollout.constrain == "legal_answers"
    answer_ids = [
        tokenizer.encode_completion(answer, add_prefix=is_restricted) for answer in answers
    ]
    requests = []
    for prompt in prompts:
        prompt_ids = tokenizer.encode_first_prompt(prompt.messages)
        requests += [ScoringRequest(prompt_ids, completion_ids) for completion_ids in answer_ids]
    scores = iter(await score(requests))
    cells = []
    for prompt in prompts:
        rows = [next(scores) for _ in answers]
        logprobs = restrict_logprobs(answer_ids, rows) if is_restricted else list(map(sum, rows))
        weights = [math.exp(logprob - max(logprobs)) for logprob in logprobs]
        cells.append(
            ChartCell(
                panel=prompt.panel,
                row=prompt.row,
                column=prompt.column,
                probabilities=tuple(weight / sum(weights) for weight in weights),
                reference=prompt.reference,
            )
        )
    return PolicyChart(environment=name, answers=answers, cells=tuple(cells))


def restrict_logprobs(
    answer_ids: Sequence[Sequence[int]], rows: Sequence[Sequence[float]]
) -> list[float]:
    """Return the log-prob of each answer if only the tokens of the answers can be sampled.

    Args:
        answer_ids: tokens of each answer.
        rows: log-probs of these tokens without the restriction.
    """
    logprobs: defaultdict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for token_ids, row in zip(answer_ids, rows, strict=True):
        for position, (token_id, logprob) in enumerate(zip(token_ids, row, strict=True)):
            logprobs[tuple(token_ids[:position])][token_id] = logprob
    norms = {
        prefix: float(
            torch.logsumexp(torch.tensor([*next_tokens.values()], dtype=torch.float64), dim=0)
        )
        for prefix, next_tokens in logprobs.items()
    }
    return [
        sum(row) - sum(norms[tuple(token_ids[:position])] for position in range(len(token_ids)))
        for token_ids, row in zip(answer_ids, rows, strict=True)
    ]


def load_chart_prompts(run: LanguageModelRun) -> tuple[str, Sequence[PolicyChartPrompt]] | None:
    """Return the first environment that defines prompts for the policy chart, and its prompts."""
    for name, environment in run.environments.items():
        path = environment.policy_chart
        if path is None:
            continue
        function = import_callable(path, "environment.policy_chart")
        try:
            prompts = list(function())
            has_same_answers = all(prompt.answers == prompts[0].answers for prompt in prompts)
        except Exception as error:  # third-party code may raise anything
            raise ConfigError(
                f"environment.policy_chart = '{path}' raised {type(error).__name__}: {error}; it "
                "must be a function without arguments that returns a list of PolicyChartPrompt"
            ) from error
        if not prompts or not has_same_answers:
            raise ConfigError(
                f"environment.policy_chart = '{path}' returned {len(prompts)} prompts; it must "
                "return at least one, and all of them must have the same answers"
            )
        return name, prompts
    return None
