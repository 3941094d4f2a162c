"""Tests of the drop-in replacement for Gymformer's `train_reward`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ludus.proto.errors import ConfigError
from ludus.trainer.compat.gymformer.trainer import train_reward
from ludus.trainer.reward_model.model import make_reward_model


@pytest.mark.slow
def test_readme_call_writes_and_returns_a_reward_model(
    gpt2_path: str, preferences_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = train_reward(
        model_name=gpt2_path,
        datasets_path=str(preferences_path),
        reward_model_path=str(tmp_path / "models/reward_model"),
        batch_size=32,
        epochs=3,
    )
    assert isinstance(model, torch.nn.Module)
    [score] = model.score(["Tell me about bread."], ["bread good"])
    assert isinstance(score, float)
    metrics = json.loads((tmp_path / "models/reward_model/metrics.json").read_text())
    assert len(metrics["epochs"]) == 3
    assert {"accuracy", "mrr", "loss"} <= metrics.keys()
    assert "epoch 3/3: loss" in capsys.readouterr().err
    # A second call replaces the model, for example in a notebook.
    assert train_reward(gpt2_path, preferences_path, tmp_path / "models/reward_model", epochs=1)


@pytest.mark.slow
def test_dry_run_checks_the_data_and_writes_nothing(
    gpt2_path: str, preferences_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_reward(gpt2_path, preferences_path, tmp_path / "rm", dry_run=True) is None
    assert "51 training comparisons, 13 held out" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"epochs: .*greater than or equal to 1, got 0"):
        train_reward(gpt2_path, preferences_path, tmp_path / "rm", epochs=0)
    with pytest.raises(ConfigError, match=r"datasets_path = \[{'chosen': 'a'}\] must be a path"):
        train_reward(gpt2_path, [{"chosen": "a"}], tmp_path / "rm")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "answers", "message"),
    [
        ("bread", "good", r"prompts and answers must be lists, got a string; pass \[text\]"),
        ([None], ["good"], "a prompt must be a text, a list of messages .* got None"),
        (["bread"], [5], "an answer must be a text, a list of messages .* got 5"),
        ([[{"role": "user"}]], ["good"], "a prompt must be a text, a list of messages"),
        ([""], [""], "the prompt and the answer are both empty"),
        (["\ud800"], ["good"], "the text contains half of a character"),
    ],
)
def test_invalid_prompts_completions_or_max_tokens_are_refused(
    model_path: str, prompts: Any, answers: Any, message: str
) -> None:
    model = make_reward_model(model_path, "chat", None)
    with pytest.raises(ConfigError, match=message):
        model.score(prompts, answers)
    with pytest.raises(ConfigError, match="max_tokens must be from 1 to"):
        make_reward_model(model_path, "chat", 0)
