"""Passes over a batch, a critic that learns at its own rate, and one that is a model of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ludus.proto.config import GrpoConfig, HeadCritic, ModelCritic, NoCorrection, PpoConfig
from ludus.proto.errors import CheckpointError, ConfigError
from ludus.trainer.core.types import Coefficients
from ludus.trainer.learner.learner import Learner
from ludus.trainer.models.load import load_tokenizer
from ludus.trainer.models.tiny import make_tokenizer
from ludus.trainer.reward_model import RewardModel
from tests.learner.tiny_policy import make_batch, make_learner

STEP = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.0)
HEAD = PpoConfig(geometric_mask=None)
MODEL = PpoConfig(geometric_mask=None, critic=ModelCritic())


def vector(module: torch.nn.Module) -> torch.Tensor:
    """All weights as one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def critic_of(learner: Learner) -> torch.nn.Module:
    critic = learner._trained.critic
    assert critic is not None
    return critic


def trained(learner: Learner, num_steps: int = 1) -> torch.Tensor:
    """All weights after some steps."""
    for seed in range(num_steps):
        learner.train_step(make_batch(seed=seed), STEP)
    return vector(learner._trained)


@pytest.mark.parametrize("algorithm", [GrpoConfig(geometric_mask=None), HEAD, MODEL])
def test_a_pass_more_is_another_update_from_where_the_step_began(
    model_path: str, algorithm: GrpoConfig
) -> None:
    once = make_learner(model_path, algorithm).train_step(make_batch(), STEP)
    learner = make_learner(model_path, algorithm, update_epochs=3, num_minibatches=2)
    metrics = learner.train_step(make_batch(), STEP)
    assert metrics.num_tokens_trained == 3 * once.num_tokens_trained
    # Updates that move the policy leave the range of the clip: the ratio starts where it did.
    assert metrics.clip_ratio > 0
    assert once.clip_ratio == 0
    assert learner._optimizer.state[learner._optimizer.param_groups[0]["params"][0]]["step"] == 6


def test_the_ratio_starts_at_the_log_probs_before_the_first_pass(model_path: str) -> None:
    """Two passes in one step are a step, and another one that compares with where that began."""
    algorithm = GrpoConfig(geometric_mask=None, correction=NoCorrection())
    passes = make_learner(model_path, algorithm, update_epochs=2)
    passes.train_step(make_batch(), STEP)
    by_hand, begun = make_learner(model_path, algorithm), make_learner(model_path, algorithm)
    by_hand.train_step(make_batch(), STEP)
    everything = np.arange(24)
    micro_batches = by_hand._cut(make_batch(), everything)
    [targets] = by_hand._targets([micro_batches], STEP)
    aims = [
        replace(
            target, old_logprobs=part.of_samples(begun._policy(part.rows, 1.0).logprobs).detach()
        )
        for target, part in zip(targets, micro_batches, strict=True)
    ]
    denominators = by_hand._denominators(make_batch(), everything)
    by_hand._accumulate(micro_batches, aims, denominators, STEP)
    by_hand._apply_gradients()
    assert torch.equal(vector(passes._trained), vector(by_hand._trained))


def test_one_pass_is_what_it_was_to_the_bit(model_path: str) -> None:
    assert torch.equal(
        trained(make_learner(model_path, HEAD, update_epochs=1), 2),
        trained(make_learner(model_path, HEAD), 2),
    )


def test_a_head_learns_at_its_own_rate_and_the_policy_at_its_own(model_path: str) -> None:
    slow = PpoConfig(geometric_mask=None, critic=HeadCritic(learning_rate=1e-5))
    learner, plain = make_learner(model_path, slow), make_learner(model_path, HEAD)
    trained(learner)
    trained(plain)
    head, quick = learner._policy.value_head, plain._policy.value_head
    assert head is not None and quick is not None
    # AdamW's first step is as long as its rate, whatever the gradient.
    assert quick.weight.abs().max().item() == pytest.approx(1e-2, rel=0.01)
    assert head.weight.abs().max().item() == pytest.approx(1e-5, rel=0.01)
    assert torch.equal(vector(learner._policy.language_model), vector(plain._policy.language_model))


def test_a_schedule_moves_both_rates_alike(model_path: str) -> None:
    critic = ModelCritic(learning_rate=3e-2)
    learner = make_learner(model_path, PpoConfig(geometric_mask=None, critic=critic))
    learner.train_step(make_batch(), Coefficients(learning_rate=5e-3, entropy=0.0, kl=0.0))
    rates = [group["lr"] for group in learner._optimizer.param_groups]
    assert rates == pytest.approx([5e-3, 1.5e-2])  # half of each peak


def test_a_model_critic_begins_as_a_copy_of_the_policy_that_says_nothing(model_path: str) -> None:
    learner = make_learner(model_path, MODEL)
    mine = dict(learner._policy.language_model.base_model.named_parameters())
    theirs = dict(critic_of(learner).classifier.base_model.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    metrics = learner.train_step(make_batch(), STEP)
    assert metrics.explained_variance == pytest.approx(0.0, abs=1e-6)
    assert metrics.value_loss is not None


def test_what_a_model_critic_learns_moves_no_weight_of_the_policy(model_path: str) -> None:
    def policy_after(value_coef: float) -> torch.Tensor:
        algorithm = PpoConfig(geometric_mask=None, critic=ModelCritic(), value_coef=value_coef)
        learner = make_learner(model_path, algorithm, max_grad_norm=1e9)
        learner.train_step(make_batch(), STEP)
        return vector(learner._policy)

    assert torch.equal(policy_after(0.5), policy_after(50.0))


@pytest.mark.slow
def test_a_model_critic_learns_what_the_samples_earn(model_path: str) -> None:
    algorithm = PpoConfig(geometric_mask=None, value_clip=None, critic=ModelCritic())
    learner = make_learner(model_path, algorithm)
    slow = Coefficients(learning_rate=3e-3, entropy=0.0, kl=0.0)
    metrics = [learner.train_step(make_batch(num_samples=12), slow) for _ in range(40)]
    explained = metrics[-1].explained_variance
    assert explained is not None and explained > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"max_tokens_per_micro_batch": 40}, {"packing": "pad"}])
def test_a_step_with_a_model_critic_depends_on_no_cut_and_no_packing(
    model_path: str, config: dict[str, object]
) -> None:
    batch = make_batch(num_samples=24, prefix_tokens=6)
    results = []
    for options in ({}, config):
        learner = make_learner(model_path, MODEL, num_minibatches=2, update_epochs=2, **options)
        metrics = [learner.train_step(batch, STEP) for _ in range(2)]
        results.append([(m.loss, m.value_loss, m.grad_norm) for m in metrics])
    for one, other in zip(*results, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "algorithm", [HEAD, MODEL, PpoConfig(geometric_mask=None, critic=HeadCritic(learning_rate=0.1))]
)
def test_stop_and_resume_with_passes_and_a_critic_is_exact_to_the_bit(
    model_path: str, algorithm: PpoConfig, tmp_path: Path
) -> None:
    settings = {"update_epochs": 2, "num_minibatches": 2}
    straight = make_learner(model_path, algorithm, **settings)
    straight.train_step(make_batch(seed=1), STEP)
    straight.save(tmp_path / "state")
    straight.train_step(make_batch(seed=2), STEP)
    resumed = make_learner(model_path, algorithm, **settings)
    resumed.load(tmp_path / "state")
    resumed.train_step(make_batch(seed=2), STEP)
    assert torch.equal(vector(resumed._trained), vector(straight._trained))


def test_a_checkpoint_of_another_kind_of_critic_is_refused(model_path: str, tmp_path: Path) -> None:
    make_learner(model_path, HEAD).save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="cannot be read"):
        make_learner(model_path, MODEL).load(tmp_path / "state")


def test_the_critic_lies_beside_the_exported_model_and_another_run_begins_with_it(
    model_path: str, tmp_path: Path
) -> None:
    learner = make_learner(model_path, MODEL)
    learner.train_step(make_batch(), STEP)
    assert learner.full_state().keys() == make_learner(model_path).full_state().keys()
    written = learner.export_model(tmp_path)
    assert tmp_path / "critic/model.safetensors" in [file.path for file in written]
    critic = ModelCritic(path=str(tmp_path / "critic"))
    another = make_learner(model_path, PpoConfig(geometric_mask=None, critic=critic))
    assert torch.equal(vector(critic_of(another)), vector(critic_of(learner)))


def test_a_reward_model_begins_a_critic_with_its_head(model_path: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
    RewardModel(classifier, load_tokenizer(model_path), format="chat").save(tmp_path / "rm")
    critic = ModelCritic(path=str(tmp_path / "rm"))
    learner = make_learner(model_path, PpoConfig(geometric_mask=None, critic=critic))
    assert torch.equal(critic_of(learner).classifier.score.weight, classifier.score.weight)


def test_a_critic_with_other_tokens_is_refused(model_path: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
    tokenizer = make_tokenizer(["quite other words than those"] * 20, 285)
    RewardModel(classifier, tokenizer, format="chat").save(tmp_path / "rm")
    critic = ModelCritic(path=str(tmp_path / "rm"))
    with pytest.raises(ConfigError, match="expected the tokens of the policy"):
        make_learner(model_path, PpoConfig(geometric_mask=None, critic=critic))
