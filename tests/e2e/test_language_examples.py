"""The summarization example learns within a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.proto.metrics import TrainMetric
from tests.e2e.runs import EXAMPLE, start_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("shared_ray"),
]

EXAMPLES = EXAMPLE.parents[1]
ARTICLES_FILE = EXAMPLES / "summarization" / "articles.jsonl"
ARTICLES_OPTION = f'environment.options={{path = "{ARTICLES_FILE}", example_answers = "examples"}}'


def test_summarization_example_increases_the_mean_reward(tmp_path: Path) -> None:
    overrides = (ARTICLES_OPTION, "training.num_steps=10", "model.warm_start_games=1024")
    config = EXAMPLES / "summarization" / "tiny.toml"
    with start_run(tmp_path, *overrides, config=config) as run:
        run.finish()
    # If a batch is complete before its step starts, the step has no new episodes and no mean.
    rows = [row.values for row in run.rows if row.kind == "train"]
    rewards = [row[TrainMetric.REWARD_MEAN] for row in rows if TrainMetric.REWARD_MEAN in row]
    assert rewards[0] < 0.6, "the reward of random words is too high"
    assert rewards[-1] > rewards[0] + 0.2
