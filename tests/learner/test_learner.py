"""Training steps, checkpoints, exports and scores of the learner."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import GENERATION_CONFIG_NAME

from ludus.proto.config import GrpoConfig, LoraConfig
from ludus.proto.errors import CheckpointError, ConfigError, NotFoundError
from ludus.trainer.core.ragged import RaggedArray
from ludus.trainer.core.types import Batch, Coefficients, ScoringRequest
from ludus.trainer.learner.learner import Learner
from ludus.trainer.models.load import load_end_token_ids, load_language_model, load_tokenizer
from ludus.trainer.models.tiny import save
from tests.learner.tiny_policy import make_batch, make_learner, make_policy_folder

NO_PENALTY = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.0)
ENTROPY_BONUS = Coefficients(learning_rate=1e-2, entropy=0.1, kl=0.0)
KL_PENALTY = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.1)


def train_one_step(learner: Learner, batch: Batch) -> torch.Tensor:
    """Take one training step, and return all weights as one vector."""
    learner.train_step(batch, ENTROPY_BONUS)
    return torch.cat([tensor.flatten() for tensor in learner.gather_weights().values()])


def set_advantages(batch: Batch, value: float) -> Batch:
    """Return a copy of the batch in which every sampled token has the advantage `value`."""
    masks = [batch.loss_masks[row] for row in batch.sequence_of_sample]
    advantages = RaggedArray.from_rows((np.where(mask, value, 0.0) for mask in masks), np.float32)
    return replace(batch, advantages=advantages)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_loss_and_update_do_not_depend_on_the_micro_batch_split(
    model_path: str, aggregation: str
) -> None:
    algorithm = GrpoConfig.model_validate({"aggregation": aggregation, "geometric_mask": None})
    batch = make_batch()
    results = []
    for max_tokens in (16, 64, 4096):
        learner = make_learner(model_path, algorithm, max_tokens_per_micro_batch=max_tokens)
        metrics = learner.train_step(batch, ENTROPY_BONUS)
        results.append((metrics.loss, metrics.grad_norm))
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert results[0] == pytest.approx(results[2], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_minibatches", [1, 3])
def test_tree_packing_reduces_work_without_changing_results(
    model_path: str, num_minibatches: int
) -> None:
    batch = make_batch(num_samples=30, num_prefix_tokens=12)
    learners = [
        make_learner(model_path, packing=packing, num_minibatches=num_minibatches)
        for packing in ("tree", "pad")
    ]
    tree_metrics, pad_metrics = (learner.train_step(batch, ENTROPY_BONUS) for learner in learners)
    assert tree_metrics.loss == pytest.approx(pad_metrics.loss, rel=1e-5)
    assert tree_metrics.grad_norm == pytest.approx(pad_metrics.grad_norm, rel=1e-5)
    assert tree_metrics.entropy == pytest.approx(pad_metrics.entropy, rel=1e-5)
    assert (
        tree_metrics.num_tokens_trained
        == pad_metrics.num_tokens_trained
        == int(batch.num_sampled_tokens[batch.sequence_of_sample].sum())
    )
    assert (
        tree_metrics.num_tokens_forwarded
        < pad_metrics.num_tokens_forwarded
        < tree_metrics.num_tokens_in_batch
    )


@pytest.mark.slow
def test_log_probs_of_unsampled_tokens_have_no_effect(model_path: str) -> None:
    """Change the engine's log-probs at unsampled positions only."""
    batch = make_batch()
    noisy_batch = replace(
        batch,
        rollout_logprobs=RaggedArray.from_rows(
            (
                np.where(batch.loss_masks[row], logprobs, -7.0)
                for row, logprobs in zip(
                    batch.sequence_of_sample, batch.rollout_logprobs, strict=True
                )
            ),
            np.float32,
        ),
    )
    weights, noisy_weights = (
        train_one_step(make_learner(model_path), variant) for variant in (batch, noisy_batch)
    )
    assert torch.equal(weights, noisy_weights)


@pytest.mark.slow
def test_counting_an_environment_token_as_sampled_changes_the_update(model_path: str) -> None:
    """Verify that the previous test would detect a wrong mask."""
    batch = make_batch()
    leaky_masks = [mask.copy() for mask in batch.loss_masks]
    for mask in leaky_masks:
        mask[2] = True
    leaky_batch = replace(batch, loss_masks=RaggedArray.from_rows(leaky_masks, np.bool_))
    weights, changed_weights = (
        train_one_step(make_learner(model_path), variant) for variant in (batch, leaky_batch)
    )
    assert not torch.allclose(weights, changed_weights, atol=1e-4)


@pytest.mark.slow
def test_zero_advantages_do_not_change_the_weights(model_path: str) -> None:
    batch = set_advantages(make_batch(), 0.0)
    learner = make_learner(model_path)
    start_weights = learner.gather_weights()
    metrics = learner.train_step(batch, NO_PENALTY)
    assert metrics.grad_norm == 0
    assert all(
        torch.equal(start_weights[name], tensor)
        for name, tensor in learner.gather_weights().items()
    )


@pytest.mark.slow
def test_all_minibatch_ratios_use_the_policy_before_the_step(
    model_path: str,
) -> None:
    whole_metrics = make_learner(model_path).train_step(make_batch(), NO_PENALTY)
    split_metrics = make_learner(model_path, num_minibatches=4).train_step(make_batch(), NO_PENALTY)
    assert whole_metrics.clip_ratio == 0, "ratios were clipped before the first update"
    assert split_metrics.clip_ratio > 0, "no ratio was clipped after the first update"


@pytest.mark.slow
def test_reference_model_does_not_change(model_path: str) -> None:
    learner = make_learner(model_path, GrpoConfig(kl_coef=0.1, geometric_mask=None))
    first_metrics = learner.train_step(make_batch(), KL_PENALTY)
    second_metrics = learner.train_step(make_batch(seed=1), KL_PENALTY)
    assert first_metrics.reference_kl == pytest.approx(0, abs=1e-6)
    assert second_metrics.reference_kl > 1e-4


@pytest.mark.slow
def test_resume_is_bit_exact(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path)
    train_one_step(learner, make_batch(seed=1))
    expected_weights = train_one_step(learner, make_batch(seed=2))

    first_learner = make_learner(model_path)
    train_one_step(first_learner, make_batch(seed=1))
    first_learner.save(tmp_path / "state")
    resumed_learner = make_learner(model_path)
    resumed_learner.load(tmp_path / "state")
    assert torch.equal(train_one_step(resumed_learner, make_batch(seed=2)), expected_weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed_settings", [{"betas": (0.5, 0.6)}, {"eps": 1.0}, {"weight_decay": 0.9}], ids=str
)
def test_resumed_run_uses_the_current_optimizer_settings(
    model_path: str, tmp_path: Path, changed_settings: dict[str, object]
) -> None:
    initial_settings: dict[str, object] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    first_learner = make_learner(model_path, **initial_settings)
    first_learner.train_step(make_batch(seed=1), ENTROPY_BONUS)
    first_learner.save(tmp_path / "state")
    weights = []
    for settings in (initial_settings, initial_settings | changed_settings):
        learner = make_learner(model_path, **settings)
        learner.load(tmp_path / "state")
        weights.append(train_one_step(learner, make_batch(seed=2)))
    assert torch.equal(weights[0], train_one_step(first_learner, make_batch(seed=2)))
    assert not torch.allclose(weights[0], weights[1], atol=1e-5)


@pytest.mark.slow
def test_damaged_checkpoint_is_refused(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path)
    learner.save(tmp_path / "state")
    for shard_path in (tmp_path / "state").glob("*.distcp"):
        shard_path.write_bytes(shard_path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="state"):
        learner.load(tmp_path / "state")


@pytest.mark.slow
def test_exported_model_equals_the_policy(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path)
    learner.train_step(make_batch(), ENTROPY_BONUS)
    learner.export_model(tmp_path)
    exported_weights = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in learner.gather_weights().items():
        assert torch.equal(exported_weights[name], tensor)


@pytest.mark.slow
def test_exported_model_and_tokenizer_work_in_transformers(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path)
    learner.train_step(make_batch(), ENTROPY_BONUS)
    learner.export_model(tmp_path)
    tokenizer, source_tokenizer = (
        AutoTokenizer.from_pretrained(tmp_path),
        load_tokenizer(model_path),
    )
    assert tokenizer.chat_template == source_tokenizer.chat_template
    messages = [
        {"role": "user", "content": "hard 16 vs 10"},
        {"role": "assistant", "content": "HIT"},
    ]
    token_ids = tokenizer.apply_chat_template(messages)["input_ids"]
    assert token_ids == source_tokenizer.apply_chat_template(messages)["input_ids"]
    tokens = torch.tensor([token_ids])
    logits = AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits
    logprobs = logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    canary = ScoringRequest(token_ids[:1], token_ids[1:])
    assert learner.score_completions([canary])[0] == pytest.approx(logprobs.tolist(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_exported_model_has_the_generation_settings_of_the_original(
    model_path: str, tmp_path: Path, lora: LoraConfig | None
) -> None:
    source_path, exported_path = tmp_path / "source", tmp_path / "exported"
    shutil.copytree(model_path, source_path)
    # transformers accepts a temperature without sampling, as some models have it, but does not
    # save it.
    settings = {"eos_token_id": [2, 5, 6], "temperature": 0.5, "do_sample": False}
    (source_path / GENERATION_CONFIG_NAME).write_text(json.dumps(settings))
    make_learner(str(source_path), lora=lora).export_model(exported_path)
    assert load_end_token_ids(exported_path) == [2, 5, 6]
    exported_settings = json.loads((exported_path / GENERATION_CONFIG_NAME).read_text())
    assert settings.items() <= {"do_sample": False, **exported_settings}.items()


@contextmanager
def limit_file_size(num_bytes: int) -> Iterator[None]:
    """Limit the size of each file that this process writes, to simulate a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [100, 2000, 20_000])
@pytest.mark.parametrize("method", ["save", "export_model"])
def test_saving_on_a_full_disk_raises_a_clear_error(
    model_path: str, tmp_path: Path, method: str, num_bytes: int
) -> None:
    learner = make_learner(model_path)
    write_model = getattr(learner, method)
    with (
        pytest.raises(CheckpointError, match=r"/part' cannot be written: .+ bytes are free there"),
        limit_file_size(num_bytes),
    ):
        write_model(tmp_path / "part")


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [100, 2000, 20_000])
def test_saving_tiny_model_on_full_disk_raises_error_and_leaves_no_file(
    model_path: str, tmp_path: Path, num_bytes: int
) -> None:
    model = cast(LlamaForCausalLM, load_language_model(model_path))
    tokenizer = cast(PreTrainedTokenizerFast, load_tokenizer(model_path))
    with (
        pytest.raises(ConfigError, match=r"/model' cannot be written: .+ bytes are free there"),
        limit_file_size(num_bytes),
    ):
        save(model, tokenizer, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    save(model, tokenizer, tmp_path / "model")
    assert load_language_model(tmp_path / "model").num_parameters() == model.num_parameters()


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"activation_checkpointing": True}, {"dtype": "bfloat16"}])
def test_memory_saving_options_keep_parameter_names_and_update_direction(
    model_path: str, option: dict[str, object]
) -> None:
    plain_learner, memory_saving_learner = (
        make_learner(model_path),
        make_learner(model_path, **option),
    )
    start_weights = torch.cat(
        [tensor.flatten() for tensor in plain_learner.gather_weights().values()]
    )
    updates = [
        train_one_step(learner, make_batch()) - start_weights
        for learner in (plain_learner, memory_saving_learner)
    ]
    assert plain_learner.gather_weights().keys() == memory_saving_learner.gather_weights().keys()
    assert torch.cosine_similarity(*updates, dim=0) > 0.9


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
# The compiler reads gradients of non-leaf tensors, which causes a warning.
@pytest.mark.filterwarnings("default")
def test_compiled_layers_produce_the_same_gradient_norm(tmp_path: Path) -> None:
    # Each layer is compiled separately, which takes half a minute.
    path = make_policy_folder(tmp_path, num_layers=1)
    plain_learner, compiled_learner = make_learner(path), make_learner(path, compile=True)
    gradient_norms = [
        learner.train_step(make_batch(), ENTROPY_BONUS).grad_norm
        for learner in (plain_learner, compiled_learner)
    ]
    assert gradient_norms[0] == pytest.approx(gradient_norms[1], rel=1e-5)
    assert plain_learner.gather_weights().keys() == compiled_learner.gather_weights().keys()


@pytest.mark.slow
def test_completion_scores_equal_the_log_probs_of_the_model(model_path: str) -> None:
    """Test a prompt with two completions, another with the same beginning, and a request twice."""
    requests = [
        ScoringRequest([5, 9, 17, 33], [44, 12, 2]),
        ScoringRequest([5, 9, 17, 33], [44, 2]),
        ScoringRequest([5, 9, 7, 33], [12]),
        ScoringRequest([5, 9, 17, 33], [44, 12, 2]),
    ]
    all_scores = make_learner(model_path).score_completions(requests)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    for request, scores in zip(requests, all_scores, strict=True):
        tokens = torch.tensor([request.prompt_ids + request.completion_ids])
        logprobs = model(tokens).logits.log_softmax(-1)[0, 3:-1].gather(1, tokens[0, 4:, None])
        assert scores == pytest.approx(logprobs[:, 0].tolist(), abs=1e-5)


def test_missing_model_raises_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        make_learner(str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_rounding_error_is_far_below_the_effect_of_an_update(model_path: str) -> None:
    learner = make_learner(model_path)
    canary = [ScoringRequest([5, 9, 17, 33], [44, 12, 2]), ScoringRequest([5, 9], [7])]
    logprobs = learner.score_completions(canary)
    rounding_error = learner.measure_rounding(canary, logprobs)
    assert 0 < rounding_error < 1e-5
    assert learner.score_completions(canary) == logprobs, "the measurement changed the model"
    learner.train_step(make_batch(), ENTROPY_BONUS)
    assert learner.measure_rounding(canary, logprobs) > 100 * rounding_error
