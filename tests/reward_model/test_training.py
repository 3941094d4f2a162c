"""Tests of reward model training: output files, resumption and scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ludus.proto.config import RewardModelRun
from ludus.proto.errors import CheckpointError, ConfigError, NotFoundError
from ludus.proto.reward_models import RewardModelMetrics, RewardModelProgress
from ludus.proto.runs import Resume
from ludus.trainer.core.stopping import RunStopped, StopRequest
from ludus.trainer.reward_model import RewardModel, load_reward_model, train_reward_model
from ludus.trainer.reward_model.comparisons import ComparisonSet, split_comparisons
from ludus.trainer.reward_model.training import check_training


def make_config(model: str, data_path: Path, output: Path, **fields: Any) -> RewardModelRun:
    settings = {"epochs": 2, "batch_size": 16, "learning_rate": 3e-3, **fields}
    return RewardModelRun(model=model, data=data_path, output=output, **settings)


@contextmanager
def stopping_after(stop_step: int) -> Iterator[StopRequest]:
    """Yield a stop request that is set after optimizer step `stop_step`."""
    request, num_steps = StopRequest(), 0

    def count_step(*_: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == stop_step:
            request.set()

    hook = register_optimizer_step_post_hook(count_step)
    try:
        yield request
    finally:
        hook.remove()


def copy_weights(model: RewardModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_weights_equal(model: RewardModel, expected_model: RewardModel) -> None:
    actual_weights, expected_weights = copy_weights(model), copy_weights(expected_model)
    assert actual_weights.keys() == expected_weights.keys()
    for name, tensor in actual_weights.items():
        assert torch.equal(tensor, expected_weights[name]), name


@pytest.mark.slow
def test_output_folder_contains_the_returned_model_and_metrics(
    model_path: str, preferences_path: Path, tmp_path: Path
) -> None:
    config = make_config(model_path, preferences_path, tmp_path / "rm")
    progress_records: list[RewardModelProgress] = []
    model, metrics = train_reward_model(config, on_progress=progress_records.append)
    assert_weights_equal(model, load_reward_model(tmp_path / "rm"))
    assert json.loads((tmp_path / "rm/config.json").read_text())["id2label"] == {"0": "LABEL_0"}
    saved_metrics = RewardModelMetrics.model_validate_json(
        (tmp_path / "rm/metrics.json").read_text()
    )
    assert saved_metrics == metrics
    assert (metrics.num_train + metrics.num_test, metrics.num_answers) == (64, 4)
    assert [epoch.epoch for epoch in metrics.epochs] == [1, 2]
    last_evaluation = metrics.epochs[-1].test
    assert last_evaluation is not None
    assert (metrics.accuracy, metrics.mrr, metrics.loss) == (
        last_evaluation.accuracy,
        last_evaluation.mrr,
        last_evaluation.loss,
    )
    assert metrics.epochs[1].train_loss < metrics.epochs[0].train_loss
    assert [record.finished.epoch for record in progress_records if record.finished] == [1, 2]
    assert not config.folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path_fixture", "stop_step"), [("model_path", 4), ("gpt2_path", 1), ("gpt2_path", 6)]
)
def test_resumed_training_equals_an_uninterrupted_training(
    path_fixture: str,
    stop_step: int,
    preferences_path: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    path = request.getfixturevalue(path_fixture)
    config = make_config(path, preferences_path, tmp_path / "uninterrupted")
    expected_model, expected_metrics = train_reward_model(config)
    config = make_config(path, preferences_path, tmp_path / "resumed")
    with (
        stopping_after(stop_step) as stop_request,
        pytest.raises(RunStopped, match=f"after step {stop_step} of 8"),
    ):
        train_reward_model(config, stop_request=stop_request)
    assert not (tmp_path / "resumed").exists()
    torch.manual_seed(5)  # the global random state must have no effect
    resumed_model, resumed_metrics = train_reward_model(config, resume=Resume.ALWAYS)
    assert_weights_equal(resumed_model, expected_model)
    epoch_dumps = [
        [epoch.model_dump(exclude={"elapsed_s"}) for epoch in metrics.epochs]
        for metrics in (expected_metrics, resumed_metrics)
    ]
    assert epoch_dumps[0] == epoch_dumps[1]


@pytest.mark.slow
def test_resume_with_changed_configuration_or_data_is_refused(
    model_path: str, preferences_path: Path, tmp_path: Path
) -> None:
    data_path = tmp_path / "data.jsonl"
    data_path.write_text(preferences_path.read_text())
    config = make_config(model_path, data_path, tmp_path / "rm")
    with stopping_after(1) as stop_request, pytest.raises(RunStopped):
        train_reward_model(config, stop_request=stop_request)
    with pytest.raises(ConfigError, match=r"learning_rate was 0\.003 and is 0\.001"):
        changed_config = config.model_copy(update={"learning_rate": 1e-3})
        train_reward_model(changed_config, resume=Resume.ALWAYS)
    with pytest.raises(ConfigError, match="already contains a run"):
        train_reward_model(config)
    data_path.write_text("".join(preferences_path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(ConfigError, match="has changed since the training started"):
        train_reward_model(config, resume=Resume.ALWAYS)
    data_path.write_text(preferences_path.read_text())
    [agent_file] = config.folder.glob("checkpoints/*/learner/agent.pt")
    agent_file.write_bytes(agent_file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        train_reward_model(config, resume=Resume.ALWAYS)
    other_config = make_config(model_path, data_path, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        train_reward_model(other_config, resume=Resume.ALWAYS)
    train_reward_model(config, overwrite=True)


@pytest.mark.slow
def test_frozen_backbone_does_not_change(
    model_path: str, preferences_path: Path, tmp_path: Path
) -> None:
    config = make_config(model_path, preferences_path, tmp_path / "rm", freeze_backbone=True)
    frozen_model, _ = train_reward_model(config)
    initial_model = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
    initial_weights = dict(initial_model.base_model.named_parameters())
    frozen_weights = dict(frozen_model.classifier.base_model.named_parameters())
    assert all(torch.equal(initial_weights[name], frozen_weights[name]) for name in initial_weights)
    unfrozen_model, _ = train_reward_model(
        make_config(model_path, preferences_path, tmp_path / "unfrozen")
    )
    trained_weights = dict(unfrozen_model.classifier.base_model.named_parameters())
    assert not any(
        torch.equal(initial_weights[name], trained_weights[name])
        for name in initial_weights
        if "weight" in name
    )


@pytest.mark.slow
def test_trained_weights_do_not_depend_on_micro_batch_size(
    model_path: str, preferences_path: Path, tmp_path: Path
) -> None:
    expected_model, _ = train_reward_model(
        make_config(model_path, preferences_path, tmp_path / "a", epochs=1)
    )
    config = make_config(
        model_path, preferences_path, tmp_path / "b", epochs=1, max_tokens_per_micro_batch=64
    )
    model, _ = train_reward_model(config)
    for name, tensor in copy_weights(expected_model).items():
        torch.testing.assert_close(copy_weights(model)[name], tensor, atol=2e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("path_fixture", ["model_path", "gpt2_path"])
def test_scores_do_not_depend_on_padding_or_loading_library(
    path_fixture: str, preferences_path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(path_fixture)
    config = make_config(path, preferences_path, tmp_path / "rm", epochs=1)
    model, _ = train_reward_model(config)
    prompts = ["Tell me about bread."] * 4
    answers = ["calm", "good good good", "never late and always early", "music"]
    batch_scores = model.score(prompts, answers)
    single_scores = [
        model.score([prompt], [answer])[0] for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert batch_scores == pytest.approx(single_scores, abs=1e-5)
    # Score the same rows as one padded batch with transformers only.
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    rows = [model.encoder.encode(*texts) for texts in zip(prompts, answers, strict=True)]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    inputs = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    with torch.no_grad():
        expected_scores = classifier(**inputs).logits.squeeze(-1).tolist()
    assert batch_scores == pytest.approx(expected_scores, abs=1e-5)


@pytest.mark.slow
def test_equal_completions_have_equal_scores_in_all_batches(
    model_path: str, preferences_path: Path, tmp_path: Path, example: ModuleType
) -> None:
    model, _ = train_reward_model(
        make_config(model_path, preferences_path, tmp_path / "rm", epochs=1)
    )
    rows = list(example.make_comparisons(30, seed=3))
    answers = [row[f"sample{number}"] for row in rows for number in range(4)] * 2
    scores = model.score(["Tell me."] * len(answers), answers, max_tokens_per_batch=100)
    half_length = len(answers) // 2
    assert scores[:half_length] == scores[half_length:]
    assert len(set(scores)) > half_length // 2


@pytest.mark.slow
def test_keep_best_saves_the_epoch_with_the_lowest_test_loss(
    model_path: str, example: ModuleType, tmp_path: Path
) -> None:
    # Random preferences can only be memorized, which increases the held-out loss.
    data_path = tmp_path / "shuffled.jsonl"
    rows = example.make_comparisons(64, seed=1, shuffled=True)
    data_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"epochs": 6, "learning_rate": 0.01, "warmup_steps": 0, "keep": "best"}
    config = make_config(model_path, data_path, tmp_path / "rm", **settings)
    model, metrics = train_reward_model(config)
    losses = [epoch.test.loss for epoch in metrics.epochs if epoch.test]
    assert metrics.loss == min(losses) < losses[-1]
    assert metrics.kept_epoch == losses.index(min(losses)) + 1
    assert_weights_equal(model, load_reward_model(tmp_path / "rm"))


@pytest.mark.slow
def test_comparisons_of_one_prompt_are_in_the_same_split(
    model_path: str, tmp_path: Path, example: ModuleType
) -> None:
    rows = [
        {"prompt": f"Tell me about {number % 30}", "chosen": f"good {number}", "rejected": "late"}
        for number in range(120)
    ]
    data_path = tmp_path / "data.jsonl"
    data_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(model_path, data_path, tmp_path / "rm", max_tokens=None)
    num_train, num_test = check_training(config)
    assert num_test == 24
    assert num_train % 4 == num_test % 4 == 0
    assert not (tmp_path / "rm").exists()


@pytest.mark.slow
def test_overwrite_is_required_and_replaces_only_reward_model_folders(
    model_path: str, preferences_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("precious")
    config = make_config(model_path, preferences_path, tmp_path / "mine", epochs=1)
    with pytest.raises(ConfigError, match="is not the folder of a reward model"):
        train_reward_model(config, overwrite=True)
    config = make_config(model_path, preferences_path, tmp_path / "rm", epochs=1)
    train_reward_model(config)
    with pytest.raises(ConfigError, match="overwrite=True"):
        train_reward_model(config)
    train_reward_model(config, overwrite=True)


@pytest.mark.slow
def test_training_does_not_change_the_global_random_state(
    model_path: str, preferences_path: Path, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    expected_numbers = torch.rand(2)
    torch.manual_seed(3)
    train_reward_model(make_config(model_path, preferences_path, tmp_path / "rm", epochs=1))
    assert torch.equal(torch.rand(2), expected_numbers)


@pytest.mark.slow
def test_failed_training_start_leaves_no_files(
    model_path: str, preferences_path: Path, tmp_path: Path
) -> None:
    config = make_config(model_path, tmp_path / "missing.jsonl", tmp_path / "rm")
    with pytest.raises(NotFoundError, match="does not exist"):
        train_reward_model(config)
    with pytest.raises(NotFoundError, match="model = "):
        train_reward_model(make_config(str(tmp_path), preferences_path, tmp_path / "rm"))
    with pytest.raises(ConfigError, match="64 positions"):
        train_reward_model(
            make_config(model_path, preferences_path, tmp_path / "rm", max_tokens=1000)
        )
    with pytest.raises(ConfigError, match="device = 'tpu'"):
        train_reward_model(make_config(model_path, preferences_path, tmp_path / "rm", device="tpu"))
    assert list(tmp_path.iterdir()) == []


def test_only_reward_models_can_be_loaded(model_path: str) -> None:
    with pytest.raises(ConfigError, match="num_labels = 1, got LlamaForCausalLM"):
        load_reward_model(model_path)


def test_split_holds_out_a_prompt_although_every_prompt_is_larger_than_the_test_set() -> None:
    num_prompts, num_rows_per_prompt = 20, 10
    num_rows = num_prompts * num_rows_per_prompt
    comparisons = ComparisonSet(
        tokens=np.zeros(2 * num_rows, dtype=np.int32),
        offsets=np.arange(2 * num_rows + 1),
        best_indices=np.zeros(num_rows, dtype=np.int64),
        prompt_numbers=np.arange(num_rows) // num_rows_per_prompt,
        num_left_out=0,
    )
    train_rows, test_rows = split_comparisons(comparisons, test_size=0.02, seed=0)
    assert len(test_rows) == num_rows_per_prompt
    assert len({row // num_rows_per_prompt for row in test_rows}) == 1
    assert sorted(train_rows + test_rows) == list(range(num_rows))
