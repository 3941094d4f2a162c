"""Training steps do not depend on micro-batches, and survive a restart."""

from __future__ import annotations

import resource
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

from ludus.proto.config import GrpoConfig
from ludus.proto.errors import CheckpointError, ConfigError, NotFoundError
from ludus.trainer.core.ragged import RaggedArray
from ludus.trainer.core.types import Batch, Coefficients, ScoringRequest
from ludus.trainer.learner.learner import Learner
from ludus.trainer.models.load import load_language_model, load_tokenizer
from ludus.trainer.models.tiny import save
from tests.learner.tiny_policy import make_batch, make_learner, make_policy_folder

PLAIN = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.0)
BONUS = Coefficients(learning_rate=1e-2, entropy=0.1, kl=0.0)
TETHERED = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.1)


def weights_after_step(learner: Learner, batch: Batch) -> torch.Tensor:
    """Take one training step; return all weights as one vector."""
    learner.train_step(batch, BONUS)
    return torch.cat([tensor.flatten() for tensor in learner.gather_weights().values()])


def with_advantages(batch: Batch, value: float) -> Batch:
    """Return the batch with the same advantage for all sampled tokens."""
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
        metrics = learner.train_step(batch, BONUS)
        results.append((metrics.loss, metrics.grad_norm))
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert results[0] == pytest.approx(results[2], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_minibatches", [1, 3])
def test_tree_packing_only_reduces_the_work(model_path: str, num_minibatches: int) -> None:
    batch = make_batch(num_samples=30, prefix_tokens=12)
    learners = [
        make_learner(model_path, packing=packing, num_minibatches=num_minibatches)
        for packing in ("tree", "pad")
    ]
    tree, pad = (learner.train_step(batch, BONUS) for learner in learners)
    assert tree.loss == pytest.approx(pad.loss, rel=1e-5)
    assert tree.grad_norm == pytest.approx(pad.grad_norm, rel=1e-5)
    assert tree.entropy == pytest.approx(pad.entropy, rel=1e-5)
    assert (
        tree.num_tokens_trained
        == pad.num_tokens_trained
        == int(batch.num_sampled_tokens[batch.sequence_of_sample].sum())
    )
    assert tree.num_tokens_forwarded < pad.num_tokens_forwarded < tree.num_tokens_in_batch


@pytest.mark.slow
def test_log_probs_of_unsampled_tokens_have_no_effect(model_path: str) -> None:
    """The log-probs of the engine at unsampled positions do not reach the loss."""
    batch = make_batch()
    noisy = replace(
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
    first, second = (weights_after_step(make_learner(model_path), b) for b in (batch, noisy))
    assert torch.equal(first, second)


@pytest.mark.slow
def test_counting_an_environment_token_as_sampled_changes_the_update(model_path: str) -> None:
    """The previous test would detect a leak: an error in the mask changes the update."""
    batch = make_batch()
    leaky_masks = [mask.copy() for mask in batch.loss_masks]
    for mask in leaky_masks:
        mask[2] = True
    leaky = replace(batch, loss_masks=RaggedArray.from_rows(leaky_masks, np.bool_))
    first, second = (weights_after_step(make_learner(model_path), b) for b in (batch, leaky))
    assert not torch.allclose(first, second, atol=1e-4)


def test_zero_advantages_do_not_change_the_weights(model_path: str) -> None:
    batch = with_advantages(make_batch(), 0.0)
    learner = make_learner(model_path)
    start = learner.gather_weights()
    metrics = learner.train_step(batch, PLAIN)
    assert metrics.grad_norm == 0
    assert all(
        torch.equal(start[name], tensor) for name, tensor in learner.gather_weights().items()
    )


@pytest.mark.slow
def test_ratios_of_all_minibatches_start_at_the_same_policy(
    model_path: str,
) -> None:
    single = make_learner(model_path).train_step(make_batch(), PLAIN)
    four = make_learner(model_path, num_minibatches=4).train_step(make_batch(), PLAIN)
    assert single.clip_ratio == 0, "the weights have not changed before the first minibatch"
    assert four.clip_ratio > 0, "the weights have changed before later minibatches"


@pytest.mark.slow
def test_reference_model_does_not_change(model_path: str) -> None:
    learner = make_learner(model_path, GrpoConfig(kl_coef=0.1, geometric_mask=None))
    first = learner.train_step(make_batch(), TETHERED)
    second = learner.train_step(make_batch(seed=1), TETHERED)
    assert first.reference_kl == pytest.approx(0, abs=1e-6)
    assert second.reference_kl > 1e-4


@pytest.mark.slow
def test_resume_is_bit_exact(model_path: str, tmp_path: Path) -> None:
    uninterrupted = make_learner(model_path)
    weights_after_step(uninterrupted, make_batch(seed=1))
    expected = weights_after_step(uninterrupted, make_batch(seed=2))

    first = make_learner(model_path)
    weights_after_step(first, make_batch(seed=1))
    first.save(tmp_path / "state")
    resumed = make_learner(model_path)
    resumed.load(tmp_path / "state")
    assert torch.equal(weights_after_step(resumed, make_batch(seed=2)), expected)


@pytest.mark.parametrize(
    "changed", [{"betas": (0.5, 0.6)}, {"eps": 1.0}, {"weight_decay": 0.9}], ids=str
)
def test_resumed_run_uses_the_current_optimizer_settings(
    model_path: str, tmp_path: Path, changed: dict[str, object]
) -> None:
    settings_at_start: dict[str, object] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    first = make_learner(model_path, **settings_at_start)
    first.train_step(make_batch(seed=1), BONUS)
    first.save(tmp_path / "state")
    weights = []
    for settings in (settings_at_start, settings_at_start | changed):
        learner = make_learner(model_path, **settings)
        learner.load(tmp_path / "state")
        weights.append(weights_after_step(learner, make_batch(seed=2)))
    assert torch.equal(weights[0], weights_after_step(first, make_batch(seed=2)))
    assert not torch.allclose(weights[0], weights[1], atol=1e-5)


def test_damaged_checkpoint_is_refused(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path)
    learner.save(tmp_path / "state")
    for part in (tmp_path / "state").glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="state"):
        learner.load(tmp_path / "state")


def test_exported_model_is_the_policy(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path)
    learner.train_step(make_batch(), BONUS)
    learner.export_model(tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in learner.gather_weights().items():
        assert torch.equal(exported[name], tensor)


def test_exported_model_and_tokenizer_work_in_transformers(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path)
    learner.train_step(make_batch(), BONUS)
    learner.export_model(tmp_path)
    tokenizer, original = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(model_path)
    assert tokenizer.chat_template == original.chat_template
    messages = [
        {"role": "user", "content": "hard 16 vs 10"},
        {"role": "assistant", "content": "HIT"},
    ]
    token_ids = tokenizer.apply_chat_template(messages)["input_ids"]
    assert token_ids == original.apply_chat_template(messages)["input_ids"]
    ids = torch.tensor([token_ids])
    logits = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
    expected = logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    canary = ScoringRequest(token_ids[:1], token_ids[1:])
    assert learner.score_completions([canary])[0] == pytest.approx(expected.tolist(), abs=1e-5)


@contextmanager
def limit_file_size(num_bytes: int) -> Iterator[None]:
    """Let this process fail to write larger files, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("num_bytes", [100, 2000, 20_000])
@pytest.mark.parametrize("part", ["save", "export_model"])
def test_checkpoint_on_a_full_disk_is_a_clear_error(
    model_path: str, tmp_path: Path, part: str, num_bytes: int
) -> None:
    learner = make_learner(model_path)
    write = getattr(learner, part)
    with (
        pytest.raises(CheckpointError, match=r"/part' cannot be written: .+ bytes are free there"),
        limit_file_size(num_bytes),
    ):
        write(tmp_path / "part")


@pytest.mark.parametrize("num_bytes", [100, 2000, 20_000])
def test_tiny_model_on_a_full_disk_is_a_clear_error_and_leaves_no_file(
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
def test_memory_savings_keep_parameter_names_and_update_direction(
    model_path: str, option: dict[str, object]
) -> None:
    plain, saving = make_learner(model_path), make_learner(model_path, **option)
    start = torch.cat([tensor.flatten() for tensor in plain.gather_weights().values()])
    moves = [weights_after_step(learner, make_batch()) - start for learner in (plain, saving)]
    assert plain.gather_weights().keys() == saving.gather_weights().keys()
    assert torch.cosine_similarity(*moves, dim=0) > 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
# The compiler reads gradients of non-leaf tensors, which causes a warning.
@pytest.mark.filterwarnings("default")
def test_compiled_layers_take_the_same_step(tmp_path: Path) -> None:
    # Each layer is compiled separately, which takes half a minute.
    path = make_policy_folder(tmp_path, num_layers=1)
    plain, compiled = make_learner(path), make_learner(path, compile=True)
    norms = [learner.train_step(make_batch(), BONUS).grad_norm for learner in (plain, compiled)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert plain.gather_weights().keys() == compiled.gather_weights().keys()


def test_completion_scores_are_log_softmax_of_the_model(model_path: str) -> None:
    canary = ScoringRequest([5, 9, 17, 33], [44, 12, 2])
    [logprobs] = make_learner(model_path).score_completions([canary])
    model = AutoModelForCausalLM.from_pretrained(model_path)
    ids = torch.tensor([canary.prompt_ids + canary.completion_ids])
    expected = model(ids).logits.log_softmax(-1)[0, 3:6].gather(1, ids[0, 4:, None])[:, 0]
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_missing_model_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        make_learner(str(tmp_path / "nowhere"))
