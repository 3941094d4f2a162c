"""Tests of the chart of a policy's action probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from ludus.proto.config import load_run_config
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.driver.policy_chart import make_policy_chart, restrict_logprobs
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "blackjack" / "tiny.toml"


@pytest.mark.parametrize(
    ("constrain", "hit_probability"), [("none", 0.1 / (0.1 + 0.09)), ("legal_answers", 2 / 3)]
)
async def test_probabilities_are_those_of_the_sampled_distribution(
    constrain: str, hit_probability: float
) -> None:
    chat = ChatTokenizer(make_tokenizer(["hard 16 vs 10", "HIT", "STAND"] * 5, vocab_size=320))
    hit_ids = chat.encode_completion("HIT")

    async def score(requests: Sequence[ScoringRequest]) -> list[list[float]]:
        """Sample HIT with 0.2 and its end with 0.5, STAND with 0.1 and its end with 0.9."""
        hit, stand = [math.log(0.2), math.log(0.5)], [math.log(0.1), math.log(0.9)]
        return [hit if request.completion_ids == hit_ids else stand for request in requests]

    run = load_run_config(EXAMPLE, [f"rollout.constrain={constrain}"])
    chart = await make_policy_chart(run, chat, score)
    assert chart is not None
    assert chart.answers == ("HIT", "STAND")
    for cell in chart.cells:
        assert cell.probabilities == pytest.approx((hit_probability, 1 - hit_probability))


def test_answers_with_a_common_first_token_share_its_probability() -> None:
    answer_ids = [[1, 2], [1, 3], [4]]
    first, second = math.log(0.2), math.log(0.1)
    rows = [[first, math.log(0.01)], [first, math.log(0.03)], [second]]
    probabilities = list(map(math.exp, restrict_logprobs(answer_ids, rows)))
    assert probabilities == pytest.approx([2 / 3 * 1 / 4, 2 / 3 * 3 / 4, 1 / 3])


def test_very_unlikely_answers_have_probabilities() -> None:
    probabilities = list(map(math.exp, restrict_logprobs([[1], [2]], [[-900.0], [-900.0]])))
    assert probabilities == pytest.approx([0.5, 0.5])
