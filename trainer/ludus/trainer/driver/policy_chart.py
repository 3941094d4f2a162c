"""The chart of a policy's action probabilities in the situations of an environment."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ludus.env import PolicyChartPrompt
from ludus.proto.runs import ChartCell, PolicyChart
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.models.chat import ChatTokenizer


def make_chart_requests(
    prompts: Sequence[PolicyChartPrompt], chat: ChatTokenizer
) -> list[ScoringRequest]:
    """Return one request for each prompt and each of its answers, prompt by prompt."""
    return [
        ScoringRequest(chat.first_prompt(prompt.messages), chat.encode_completion(answer))
        for prompt in prompts
        for answer in prompt.answers
    ]


def make_chart(
    environment: str, prompts: Sequence[PolicyChartPrompt], logprobs: Sequence[Sequence[float]]
) -> PolicyChart:
    """Return the chart of the probabilities of each prompt's answers.

    Args:
        logprobs: log-probs of the tokens for each of `make_chart_requests`.
    """
    answers = tuple(prompts[0].answers)
    totals = [sum(token_logprobs) for token_logprobs in logprobs]
    cells = []
    for index, prompt in enumerate(prompts):
        prompt_totals = totals[index * len(answers) : (index + 1) * len(answers)]
        weights = [math.exp(total - max(prompt_totals)) for total in prompt_totals]
        cells.append(
            ChartCell(
                panel=prompt.panel,
                row=prompt.row,
                column=prompt.column,
                probabilities=tuple(weight / sum(weights) for weight in weights),
                reference=prompt.reference,
            )
        )
    return PolicyChart(environment=environment, answers=answers, cells=tuple(cells))
