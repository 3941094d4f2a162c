"""Multiple passes over a batch, and critics with a separate learning rate or a separate model."""

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
from tests.learner.plain_step import take_plain_step
from tests.learner.tiny_policy import make_batch, make_learner, make_samples

NO_PENALTY = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.0)
HEAD_PPO = PpoConfig(geometric_mask=None)
MODEL_PPO = PpoConfig(geometric_mask=None, critic=ModelCritic())
PLAIN_GRPO = GrpoConfig(
    geometric_mask=None, correction=NoCorrection(), loss=ClipLoss(dual_clip=None)
)
PLAIN_PPO = PpoConfig(
    geometric_mask=None,
    correction=NoCorrection(),
    loss=ClipLoss(dual_clip=None),
    value_clip=None,
)


def flatten(module: torch.nn.Module) -> torch.Tensor:
    """Return all weights as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def get_critic(learner: Learner) -> torch.nn.Module:
    critic = learner.model.critic
    assert critic is not None
    return critic


def train(learner: Learner, num_steps: int = 1) -> torch.Tensor:
    """Train for `num_steps` steps, and return all weights as one vector."""
    for seed in range(num_steps):
        learner.train_step(make_batch(seed=seed), NO_PENALTY)
    return flatten(learner.model)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [GrpoConfig(geometric_mask=None), HEAD_PPO, MODEL_PPO])
def test_multiple_passes_train_more_tokens_with_the_same_old_policy(
    model_path: str, algorithm: GrpoConfig
) -> None:
    single_pass_metrics = make_learner(model_path, algorithm).train_step(make_batch(), NO_PENALTY)
    learner = make_learner(model_path, algorithm, update_epochs=3, num_minibatches=2)
    metrics = learner.train_step(make_batch(), NO_PENALTY)
    assert metrics.num_tokens_trained == 3 * single_pass_metrics.num_tokens_trained
    # Later passes leave the clip range, because all ratios compare with the initial policy.
    assert metrics.clip_ratio > 0
    assert single_pass_metrics.clip_ratio == 0


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [PLAIN_GRPO, PLAIN_PPO], ids=["grpo", "ppo"])
def test_training_step_equals_a_reference_computation(
    model_path: str, algorithm: GrpoConfig | PpoConfig
) -> None:
    """Compare a step of two passes with two updates each."""
    settings = {"update_epochs": 2, "num_minibatches": 2}
    learner = make_learner(model_path, algorithm, **settings)
    learner.train_step(make_batch(), NO_PENALTY)
    config = LearnerConfig.model_validate(settings)
    expected_weights = take_plain_step(
        model_path, make_samples(24), algorithm, config, NO_PENALTY.learning_rate
    )
    weights = dict(learner.model.policy.named_parameters())
    assert weights.keys() == expected_weights.keys()
    errors = torch.cat(
        [(weights[name] - expected_weights[name]).flatten() for name in weights]
    ).abs()
    # AdamW amplifies rounding errors of gradients near zero, so a few weights may differ.
    assert (errors < 1e-4).float().mean() > 0.99


@pytest.mark.slow
def test_one_pass_is_the_default(model_path: str) -> None:
    assert torch.equal(
        train(make_learner(model_path, HEAD_PPO, update_epochs=1), 2),
        train(make_learner(model_path, HEAD_PPO), 2),
    )


@pytest.mark.slow
def test_value_head_and_policy_have_separate_learning_rates(model_path: str) -> None:
    algorithm = PpoConfig(geometric_mask=None, critic=HeadCritic(learning_rate=1e-5))
    learner, default_learner = (
        make_learner(model_path, algorithm),
        make_learner(model_path, HEAD_PPO),
    )
    train(learner)
    train(default_learner)
    slow_head, fast_head = learner.model.policy.value_head, default_learner.model.policy.value_head
    assert slow_head is not None and fast_head is not None
    # The first step of AdamW has the size of the learning rate, for any gradient.
    assert fast_head.weight.abs().max().item() == pytest.approx(1e-2, rel=0.01)
    assert slow_head.weight.abs().max().item() == pytest.approx(1e-5, rel=0.01)
    assert torch.equal(
        flatten(learner.model.policy.language_model),
        flatten(default_learner.model.policy.language_model),
    )


@pytest.mark.slow
def test_schedule_scales_both_learning_rates(model_path: str) -> None:
    critic = ModelCritic(learning_rate=3e-2)
    learner = make_learner(model_path, PpoConfig(geometric_mask=None, critic=critic))
    start_model = copy.deepcopy(learner.model)
    learner.train_step(make_batch(), Coefficients(learning_rate=5e-3, entropy=0.0, kl=0.0))
    # The first step of AdamW has the size of the learning rate, for any gradient.
    policy_step = flatten(learner.model.policy) - flatten(start_model.policy)
    assert policy_step.abs().max().item() == pytest.approx(5e-3, rel=0.01)
    assert start_model.critic is not None
    critic_step = flatten(get_critic(learner)) - flatten(start_model.critic)
    assert critic_step.abs().max().item() == pytest.approx(1.5e-2, rel=0.01)


@pytest.mark.slow
def test_model_critic_starts_as_a_policy_copy_and_predicts_zero(model_path: str) -> None:
    learner = make_learner(model_path, MODEL_PPO)
    policy = dict(learner.model.policy.language_model.base_model.named_parameters())
    critic = dict(get_critic(learner).classifier.base_model.named_parameters())
    assert policy.keys() == critic.keys()
    assert all(torch.equal(policy[name], critic[name]) for name in policy)
    metrics = learner.train_step(make_batch(), NO_PENALTY)
    assert metrics.explained_variance == pytest.approx(0.0, abs=1e-6)
    assert metrics.value_loss is not None


@pytest.mark.slow
def test_training_a_model_critic_does_not_change_the_policy(model_path: str) -> None:
    def train_policy(value_coef: float) -> torch.Tensor:
        algorithm = PpoConfig(geometric_mask=None, critic=ModelCritic(), value_coef=value_coef)
        learner = make_learner(model_path, algorithm, max_grad_norm=1e9)
        learner.train_step(make_batch(), NO_PENALTY)
        return flatten(learner.model.policy)

    assert torch.equal(train_policy(0.5), train_policy(50.0))


@pytest.mark.slow
def test_model_critic_learns_the_returns(model_path: str) -> None:
    algorithm = PpoConfig(geometric_mask=None, value_clip=None, critic=ModelCritic())
    learner = make_learner(model_path, algorithm)
    coefficients = Coefficients(learning_rate=3e-3, entropy=0.0, kl=0.0)
    metrics = [learner.train_step(make_batch(num_samples=12), coefficients) for _ in range(40)]
    explained_variance = metrics[-1].explained_variance
    assert explained_variance is not None and explained_variance > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"max_tokens_per_micro_batch": 40}, {"packing": "pad"}])
def test_step_with_model_critic_does_not_depend_on_packing(
    model_path: str, config: dict[str, object]
) -> None:
    batch = make_batch(num_samples=24, num_prefix_tokens=6)
    results = []
    for options in ({}, config):
        learner = make_learner(model_path, MODEL_PPO, num_minibatches=2, update_epochs=2, **options)
        metrics = [learner.train_step(batch, NO_PENALTY) for _ in range(2)]
        results.append([(row.loss, row.value_loss, row.grad_norm) for row in metrics])
    for metric, expected_metric in zip(*results, strict=True):
        assert metric == pytest.approx(expected_metric, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [HEAD_PPO, MODEL_PPO, PpoConfig(geometric_mask=None, critic=HeadCritic(learning_rate=0.1))],
)
def test_resume_with_multiple_passes_and_a_critic_is_bit_exact(
    model_path: str, algorithm: PpoConfig, tmp_path: Path
) -> None:
    settings = {"update_epochs": 2, "num_minibatches": 2}
    learner = make_learner(model_path, algorithm, **settings)
    learner.train_step(make_batch(seed=1), NO_PENALTY)
    learner.save(tmp_path / "state")
    learner.train_step(make_batch(seed=2), NO_PENALTY)
    resumed_learner = make_learner(model_path, algorithm, **settings)
    resumed_learner.load(tmp_path / "state")
    resumed_learner.train_step(make_batch(seed=2), NO_PENALTY)
    assert torch.equal(flatten(resumed_learner.model), flatten(learner.model))


@pytest.mark.slow
def test_checkpoint_with_a_different_critic_kind_is_refused(
    model_path: str, tmp_path: Path
) -> None:
    make_learner(model_path, HEAD_PPO).save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="cannot be read"):
        make_learner(model_path, MODEL_PPO).load(tmp_path / "state")


@pytest.mark.slow
def test_exported_critic_can_initialize_another_run(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path, MODEL_PPO)
    learner.train_step(make_batch(), NO_PENALTY)
    assert learner.gather_weights().keys() == make_learner(model_path).gather_weights().keys()
    saved_files = learner.export_model(tmp_path)
    assert tmp_path / "critic/model.safetensors" in [file.path for file in saved_files]
    critic = ModelCritic(path=str(tmp_path / "critic"))
    second_learner = make_learner(model_path, PpoConfig(geometric_mask=None, critic=critic))
    assert torch.equal(flatten(get_critic(second_learner)), flatten(get_critic(learner)))


@pytest.mark.slow
def test_critic_from_a_reward_model_keeps_the_score_head(model_path: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
    RewardModel(classifier, load_tokenizer(model_path), format="chat").save(tmp_path / "rm")
    critic = ModelCritic(path=str(tmp_path / "rm"))
    learner = make_learner(model_path, PpoConfig(geometric_mask=None, critic=critic))
    assert torch.equal(get_critic(learner).classifier.score.weight, classifier.score.weight)


@pytest.mark.slow
def test_critic_with_a_different_vocabulary_is_refused(model_path: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
    tokenizer = make_tokenizer(["entirely different words"] * 20, 285)
    RewardModel(classifier, tokenizer, format="chat").save(tmp_path / "rm")
    critic = ModelCritic(path=str(tmp_path / "rm"))
    with pytest.raises(ConfigError, match="must have the vocabulary of the policy"):
        make_learner(model_path, PpoConfig(geometric_mask=None, critic=critic))
