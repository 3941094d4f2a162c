"""A reward model is trained from preferences: what it writes, and that a stop changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ludus.proto.config import RewardModelConfig
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.reward_models import RewardModelMetrics, RewardModelProgress
from ludus.trainer.core.stopping import RunStopped
from ludus.trainer.reward_model import RewardModel, load_reward_model, train_reward_model
from ludus.trainer.reward_model.folder import training_folder
from ludus.trainer.reward_model.training import check_training


def configured(model: str, data: Path, output: Path, **fields: Any) -> RewardModelConfig:
    settings = {"epochs": 2, "batch_size": 16, "learning_rate": 3e-3, **fields}
    return RewardModelConfig(model=model, data=data, output=output, **settings)


def weights_of(model: RewardModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(one: RewardModel, other: RewardModel) -> None:
    mine, theirs = weights_of(one), weights_of(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_folder_holds_the_model_that_is_returned_and_how_it_does(
    model_path: str, preferences: Path, tmp_path: Path
) -> None:
    config = configured(model_path, preferences, tmp_path / "rm")
    told: list[RewardModelProgress] = []
    model, metrics = train_reward_model(config, tell=told.append)
    assert_equal(model, load_reward_model(tmp_path / "rm"))
    assert json.loads((tmp_path / "rm/config.json").read_text())["id2label"] == {"0": "LABEL_0"}
    written = RewardModelMetrics.model_validate_json((tmp_path / "rm/metrics.json").read_text())
    assert written == metrics
    assert (metrics.num_train + metrics.num_test, metrics.num_answers) == (64, 4)
    assert [epoch.epoch for epoch in metrics.epochs] == [1, 2]
    last = metrics.epochs[-1].test
    assert last is not None
    assert (metrics.accuracy, metrics.mrr, metrics.loss) == (last.accuracy, last.mrr, last.loss)
    assert metrics.epochs[1].train_loss < metrics.epochs[0].train_loss
    assert [one.finished.epoch for one in told if one.finished] == [1, 2]
    assert not training_folder(tmp_path / "rm").exists()


@pytest.mark.parametrize(
    ("family", "stop_after"), [("model_path", 4), ("gpt2_path", 1), ("gpt2_path", 6)]
)
def test_a_training_that_is_stopped_and_continued_equals_one_that_is_not_to_the_bit(
    family: str,
    stop_after: int,
    preferences: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    path = request.getfixturevalue(family)
    whole, whole_metrics = train_reward_model(configured(path, preferences, tmp_path / "whole"))
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps == stop_after

    config = configured(path, preferences, tmp_path / "parts")
    with pytest.raises(RunStopped, match=f"after step {stop_after} of 8"):
        train_reward_model(config, should_stop=stop)
    assert not (tmp_path / "parts").exists()
    torch.manual_seed(5)  # what else the program draws is of no account
    parts, parts_metrics = train_reward_model(config, resume=tmp_path / "parts")
    assert_equal(whole, parts)
    timeless = [
        [epoch.model_dump(exclude={"elapsed_s"}) for epoch in metrics.epochs]
        for metrics in (whole_metrics, parts_metrics)
    ]
    assert timeless[0] == timeless[1]


def test_a_training_continues_as_it_was_begun_or_not_at_all(
    model_path: str, preferences: Path, tmp_path: Path
) -> None:
    config = configured(model_path, preferences, tmp_path / "rm")
    with pytest.raises(RunStopped):
        train_reward_model(config, should_stop=lambda: True)
    with pytest.raises(ConfigError, match=r"learning_rate was 0\.003 and is 0\.001"):
        other = config.model_copy(update={"learning_rate": 1e-3})
        train_reward_model(other, resume=tmp_path / "rm")
    lines = preferences.read_text().splitlines()[1:]
    shorter = tmp_path / "shorter" / preferences.name
    shorter.parent.mkdir()
    shorter.write_text("\n".join(lines))
    checkpoint = training_folder(tmp_path / "rm") / "checkpoint.pt"
    state = torch.load(checkpoint)
    torch.save({**state, "data": "others"}, checkpoint)
    with pytest.raises(ConfigError, match="not those that the training was begun with"):
        train_reward_model(config, resume=tmp_path / "rm")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(Exception, match="cannot be read"):
        train_reward_model(config, resume=tmp_path / "rm")
    with pytest.raises(NotFoundError, match="no checkpoint at"):
        train_reward_model(config, resume=tmp_path / "nowhere")


def test_the_head_alone_learns_where_the_backbone_is_frozen(
    model_path: str, preferences: Path, tmp_path: Path
) -> None:
    config = configured(model_path, preferences, tmp_path / "rm", freeze_backbone=True)
    frozen, _ = train_reward_model(config)
    begun = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
    before = dict(begun.base_model.named_parameters())
    after = dict(frozen.classifier.base_model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)
    whole, _ = train_reward_model(configured(model_path, preferences, tmp_path / "whole"))
    moved = dict(whole.classifier.base_model.named_parameters())
    assert not any(torch.equal(before[name], moved[name]) for name in before if "weight" in name)


def test_micro_batches_change_nothing_but_memory(
    model_path: str, preferences: Path, tmp_path: Path
) -> None:
    one, _ = train_reward_model(configured(model_path, preferences, tmp_path / "a", epochs=1))
    config = configured(
        model_path, preferences, tmp_path / "b", epochs=1, max_tokens_per_micro_batch=64
    )
    other, _ = train_reward_model(config)
    for name, value in weights_of(one).items():
        torch.testing.assert_close(weights_of(other)[name], value, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["model_path", "gpt2_path"])
def test_a_score_depends_neither_on_padding_nor_on_who_loads_the_model(
    family: str, preferences: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(family)
    config = configured(path, preferences, tmp_path / "rm", epochs=1)
    model, _ = train_reward_model(config)
    prompts = ["Tell me about bread."] * 4
    answers = ["calm", "good good good", "never late and always early", "music"]
    together = model.score(prompts, answers)
    alone = [model.score([p], [a])[0] for p, a in zip(prompts, answers, strict=True)]
    assert together == pytest.approx(alone, abs=1e-5)
    # As anybody else would load it, rows side by side:
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    rows = [model.texts.encode(p, a) for p, a in zip(prompts, answers, strict=True)]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    asked = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    with torch.no_grad():
        theirs = plain(**asked).logits.squeeze(-1).tolist()
    assert theirs == pytest.approx(together, abs=1e-5)


def test_equal_answers_have_equal_scores_whatever_stands_beside_them(
    model_path: str, preferences: Path, tmp_path: Path, example: ModuleType
) -> None:
    model, _ = train_reward_model(configured(model_path, preferences, tmp_path / "rm", epochs=1))
    rows = list(example.comparisons(30, seed=3))
    answers = [row[f"sample{number}"] for row in rows for number in range(4)] * 2
    scores = model.score(["Tell me."] * len(answers), answers, max_tokens_per_batch=100)
    half = len(answers) // 2
    assert scores[:half] == scores[half:]
    assert len(set(scores)) > half // 2


def test_the_best_epoch_is_kept_where_that_is_wanted(
    model_path: str, example: ModuleType, tmp_path: Path
) -> None:
    # Of answers chosen by chance nothing can be learned: by heart they are, which harms the rest.
    data = tmp_path / "shuffled.jsonl"
    rows = example.comparisons(64, seed=1, shuffled=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"epochs": 6, "learning_rate": 0.01, "warmup_steps": 0, "keep": "best"}
    config = configured(model_path, data, tmp_path / "rm", **settings)
    model, metrics = train_reward_model(config)
    losses = [epoch.test.loss for epoch in metrics.epochs if epoch.test]
    assert metrics.loss == min(losses) < losses[-1]
    assert metrics.kept_epoch == losses.index(min(losses)) + 1
    assert_equal(model, load_reward_model(tmp_path / "rm"))


def test_comparisons_of_one_prompt_are_on_one_side(
    model_path: str, tmp_path: Path, example: ModuleType
) -> None:
    rows = [
        {"prompt": f"Tell me about {number % 30}", "chosen": f"good {number}", "rejected": "late"}
        for number in range(120)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = configured(model_path, data, tmp_path / "rm", max_tokens=None)
    num_train, num_test = check_training(config)
    assert num_test == 24
    assert num_train % 4 == num_test % 4 == 0
    assert not (tmp_path / "rm").exists()


def test_what_is_there_is_not_replaced_unless_it_is_a_reward_model_and_that_is_wanted(
    model_path: str, preferences: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("precious")
    config = configured(model_path, preferences, tmp_path / "mine", epochs=1)
    with pytest.raises(ConfigError, match="no reward model's folder"):
        train_reward_model(config, overwrite=True)
    config = configured(model_path, preferences, tmp_path / "rm", epochs=1)
    train_reward_model(config)
    with pytest.raises(ConfigError, match="--overwrite"):
        train_reward_model(config)
    train_reward_model(config, overwrite=True)


def test_the_programs_own_random_numbers_are_left_alone(
    model_path: str, preferences: Path, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    train_reward_model(configured(model_path, preferences, tmp_path / "rm", epochs=1))
    assert torch.equal(torch.rand(2), expected)


def test_a_training_that_cannot_begin_leaves_nothing_behind(
    model_path: str, preferences: Path, tmp_path: Path
) -> None:
    config = configured(model_path, tmp_path / "missing.jsonl", tmp_path / "rm")
    with pytest.raises(NotFoundError, match="nothing there"):
        train_reward_model(config)
    with pytest.raises(NotFoundError, match="model = "):
        train_reward_model(configured(str(tmp_path), preferences, tmp_path / "rm"))
    with pytest.raises(ConfigError, match="64 positions"):
        train_reward_model(configured(model_path, preferences, tmp_path / "rm", max_tokens=1000))
    with pytest.raises(ConfigError, match="device = 'tpu'"):
        train_reward_model(configured(model_path, preferences, tmp_path / "rm", device="tpu"))
    assert list(tmp_path.iterdir()) == []


def test_only_a_reward_model_is_loaded_as_one(model_path: str) -> None:
    with pytest.raises(ConfigError, match="num_labels = 1, got LlamaForCausalLM"):
        load_reward_model(model_path)
