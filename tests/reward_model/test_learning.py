"""Tests that a reward model learns a hidden rule and does not learn random preferences."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from ludus.proto.config import RewardModelRun
from ludus.trainer.reward_model import train_reward_model

pytestmark = pytest.mark.slow

NUM_COMPARISONS = 400


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_shuffled", "min_accuracy", "max_accuracy"),
    [(False, 0.5, 1.0), (True, 0.10, 0.40)],
    ids=["rule", "control"],
)
def test_reward_model_learns_a_hidden_rule(
    example: ModuleType, tmp_path: Path, is_shuffled: bool, min_accuracy: float, max_accuracy: float
) -> None:
    """Train on a few comparisons; `make learn-reward` uses 2,000 and three seeds."""
    example.write_model(tmp_path / "model", 0)
    rows = example.make_comparisons(NUM_COMPARISONS, seed=0, shuffled=is_shuffled)
    data_path = tmp_path / "preferences.jsonl"
    data_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RewardModelRun(
        model=str(tmp_path / "model"),
        data=data_path,
        output=tmp_path / "rm",
        test_size=0.25,
        epochs=8,
        learning_rate=3e-3,
    )
    _, metrics = train_reward_model(config)
    assert metrics.accuracy is not None
    assert min_accuracy <= metrics.accuracy <= max_accuracy


def test_odd_completions_follow_the_same_hidden_rule(
    example: ModuleType,
) -> None:
    rule = example.HiddenRule(3)
    vocabulary = {*example.WORDS, *example.TOPICS}
    answer_lengths, num_garbled = set(), 0
    for row in example.make_comparisons(200, seed=3, odd=1.0):
        topic = row["query"].removeprefix("Tell me about ").removesuffix(".")
        answers = [row[f"sample{index}"] for index in range(example.NUM_ANSWERS)]
        scores = [rule.score_answer(topic, answer) for answer in answers]
        assert max(scores) == scores[row["best"]]
        answer_lengths |= {len(answer.split()) for answer in answers}
        num_garbled += any(set(answer.split()) - vocabulary for answer in answers)
    assert answer_lengths >= set(range(1, example.MAX_WORDS + 1))
    assert 50 < num_garbled < 200, f"{num_garbled} of 200 rows have garbled answers"
