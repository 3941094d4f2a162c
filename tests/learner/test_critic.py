"""Several passes over a batch, a critic with its own learning rate, and one with its own model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ludus.proto.config import (
    ClipLoss,
    GrpoConfig,
    HeadCritic,
    LearnerConfig,
    ModelCritic,
    NoCorrection,
    PpoConfig,
)
from ludus.proto.errors import CheckpointError, ConfigError
from ludus.trainer.core.types import Coefficients
from ludus.trainer.learner.learner import Learner
from ludus.trainer.models.load import load_tokenizer
from ludus.trainer.models.tiny import make_tokenizer
from ludus.trainer.reward_model import RewardModel
from tests.learner.plain_step import plain_step
from tests.learner.tiny_policy import make_batch, make_learner, make_samples

STEP = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.0)
HEAD = PpoConfig(geometric_mask=None)
MODEL = PpoConfig(geometric_mask=None, critic=ModelCritic())
PLAIN_GRPO = GrpoConfig(
    geometric_mask=None, correction=NoCorrection(), loss=ClipLoss(dual_clip=None)
)
PLAIN_PPO = PpoConfig(
    geometric_mask=None,
    correction=NoCorrection(),
    loss=ClipLoss(dual_clip=None),
    value_clip=None,
)


def vector(module: torch.nn.Module) -> torch.Tensor:
    """Return all weights as one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def get_critic(learner: Learner) -> torch.nn.Module:
    critic = learner.model.critic
    assert critic is not None
    return critic


def train(learner: Learner, num_steps: int = 1) -> torch.Tensor:
    """Train for some steps; return all weights."""
    for seed in range(num_steps):
        learner.train_step(make_batch(seed=seed), STEP)
    return vector(learner.model)


@pytest.mark.parametrize("algorithm", [GrpoConfig(geometric_mask=None), HEAD, MODEL])
def test_more_passes_are_more_updates_with_the_same_old_policy(
    model_path: str, algorithm: GrpoConfig
) -> None:
    single = make_learner(model_path, algorithm).train_step(make_batch(), STEP)
    learner = make_learner(model_path, algorithm, update_epochs=3, num_minibatches=2)
    metrics = learner.train_step(make_batch(), STEP)
    assert metrics.num_tokens_trained == 3 * single.num_tokens_trained
    # The policy moves out of the clip range, because the ratio starts at the same policy.
    assert metrics.clip_ratio > 0
    assert single.clip_ratio == 0


@pytest.mark.parametrize("algorithm", [PLAIN_GRPO, PLAIN_PPO], ids=["grpo", "ppo"])
def test_step_equals_a_plain_computation(
    model_path: str, algorithm: GrpoConfig | PpoConfig
) -> None:
    """Each of two passes has two updates, whose ratios start at the policy before the step."""
    settings = {"update_epochs": 2, "num_minibatches": 2}
    learner = make_learner(model_path, algorithm, **settings)
    learner.train_step(make_batch(), STEP)
    config = LearnerConfig.model_validate(settings)
    expected = plain_step(model_path, make_samples(24), algorithm, config, STEP.learning_rate)
    weights = dict(learner.model.policy.named_parameters())
    assert weights.keys() == expected.keys()
    errors = torch.cat([(weights[name] - expected[name]).flatten() for name in weights]).abs()
    # AdamW turns the rounding of a gradient near zero into a step of full size, so a few
    # weights may differ.
    assert (errors < 1e-4).float().mean() > 0.99


def test_one_pass_is_the_default(model_path: str) -> None:
    assert torch.equal(
        train(make_learner(model_path, HEAD, update_epochs=1), 2),
        train(make_learner(model_path, HEAD), 2),
    )


def test_value_head_and_policy_have_separate_learning_rates(model_path: str) -> None:
    slow = PpoConfig(geometric_mask=None, critic=HeadCritic(learning_rate=1e-5))
    learner, plain = make_learner(model_path, slow), make_learner(model_path, HEAD)
    train(learner)
    train(plain)
    slow_head, fast_head = learner.model.policy.value_head, plain.model.policy.value_head
    assert slow_head is not None and fast_head is not None
    # The first step of AdamW is as long as its learning rate, whatever the gradient.
    assert fast_head.weight.abs().max().item() == pytest.approx(1e-2, rel=0.01)
    assert slow_head.weight.abs().max().item() == pytest.approx(1e-5, rel=0.01)
    assert torch.equal(
        vector(learner.model.policy.language_model), vector(plain.model.policy.language_model)
    )


def test_a_schedule_scales_both_learning_rates(model_path: str) -> None:
    critic = ModelCritic(learning_rate=3e-2)
    learner = make_learner(model_path, PpoConfig(geometric_mask=None, critic=critic))
    start = copy.deepcopy(learner.model)
    learner.train_step(make_batch(), Coefficients(learning_rate=5e-3, entropy=0.0, kl=0.0))
    # The first step of AdamW is as long as its learning rate, whatever the gradient.
    policy_step = vector(learner.model.policy) - vector(start.policy)
    assert policy_step.abs().max().item() == pytest.approx(5e-3, rel=0.01)
    assert start.critic is not None
    critic_step = vector(get_critic(learner)) - vector(start.critic)
    assert critic_step.abs().max().item() == pytest.approx(1.5e-2, rel=0.01)


def test_model_critic_starts_as_a_copy_of_the_policy_that_predicts_zero(model_path: str) -> None:
    learner = make_learner(model_path, MODEL)
    policy = dict(learner.model.policy.language_model.base_model.named_parameters())
    critic = dict(get_critic(learner).classifier.base_model.named_parameters())
    assert policy.keys() == critic.keys()
    assert all(torch.equal(policy[name], critic[name]) for name in policy)
    metrics = learner.train_step(make_batch(), STEP)
    assert metrics.explained_variance == pytest.approx(0.0, abs=1e-6)
    assert metrics.value_loss is not None


def test_training_a_model_critic_does_not_change_the_policy(model_path: str) -> None:
    def policy_after(value_coef: float) -> torch.Tensor:
        algorithm = PpoConfig(geometric_mask=None, critic=ModelCritic(), value_coef=value_coef)
        learner = make_learner(model_path, algorithm, max_grad_norm=1e9)
        learner.train_step(make_batch(), STEP)
        return vector(learner.model.policy)

    assert torch.equal(policy_after(0.5), policy_after(50.0))


@pytest.mark.slow
def test_model_critic_learns_the_returns(model_path: str) -> None:
    algorithm = PpoConfig(geometric_mask=None, value_clip=None, critic=ModelCritic())
    learner = make_learner(model_path, algorithm)
    slow = Coefficients(learning_rate=3e-3, entropy=0.0, kl=0.0)
    metrics = [learner.train_step(make_batch(num_samples=12), slow) for _ in range(40)]
    explained = metrics[-1].explained_variance
    assert explained is not None and explained > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"max_tokens_per_micro_batch": 40}, {"packing": "pad"}])
def test_step_with_model_critic_does_not_depend_on_packing(
    model_path: str, config: dict[str, object]
) -> None:
    batch = make_batch(num_samples=24, prefix_tokens=6)
    results = []
    for options in ({}, config):
        learner = make_learner(model_path, MODEL, num_minibatches=2, update_epochs=2, **options)
        metrics = [learner.train_step(batch, STEP) for _ in range(2)]
        results.append([(m.loss, m.value_loss, m.grad_norm) for m in metrics])
    for first, second in zip(*results, strict=True):
        assert first == pytest.approx(second, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "algorithm", [HEAD, MODEL, PpoConfig(geometric_mask=None, critic=HeadCritic(learning_rate=0.1))]
)
def test_resume_with_passes_and_critic_is_bit_exact(
    model_path: str, algorithm: PpoConfig, tmp_path: Path
) -> None:
    settings = {"update_epochs": 2, "num_minibatches": 2}
    uninterrupted = make_learner(model_path, algorithm, **settings)
    uninterrupted.train_step(make_batch(seed=1), STEP)
    uninterrupted.save(tmp_path / "state")
    uninterrupted.train_step(make_batch(seed=2), STEP)
    resumed = make_learner(model_path, algorithm, **settings)
    resumed.load(tmp_path / "state")
    resumed.train_step(make_batch(seed=2), STEP)
    assert torch.equal(vector(resumed.model), vector(uninterrupted.model))


def test_checkpoint_of_another_kind_of_critic_is_refused(model_path: str, tmp_path: Path) -> None:
    make_learner(model_path, HEAD).save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="cannot be read"):
        make_learner(model_path, MODEL).load(tmp_path / "state")


def test_exported_critic_can_start_another_run(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path, MODEL)
    learner.train_step(make_batch(), STEP)
    assert learner.gather_weights().keys() == make_learner(model_path).gather_weights().keys()
    files = learner.export_model(tmp_path)
    assert tmp_path / "critic/model.safetensors" in [file.path for file in files]
    critic = ModelCritic(path=str(tmp_path / "critic"))
    second_learner = make_learner(model_path, PpoConfig(geometric_mask=None, critic=critic))
    assert torch.equal(vector(get_critic(second_learner)), vector(get_critic(learner)))


def test_critic_from_a_reward_model_keeps_its_head(model_path: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
    RewardModel(classifier, load_tokenizer(model_path), format="chat").save(tmp_path / "rm")
    critic = ModelCritic(path=str(tmp_path / "rm"))
    learner = make_learner(model_path, PpoConfig(geometric_mask=None, critic=critic))
    assert torch.equal(get_critic(learner).classifier.score.weight, classifier.score.weight)


def test_critic_with_other_tokens_is_refused(model_path: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
    tokenizer = make_tokenizer(["entirely different words"] * 20, 285)
    RewardModel(classifier, tokenizer, format="chat").save(tmp_path / "rm")
    critic = ModelCritic(path=str(tmp_path / "rm"))
    with pytest.raises(ConfigError, match="must have the vocabulary of the policy"):
        make_learner(model_path, PpoConfig(geometric_mask=None, critic=critic))
