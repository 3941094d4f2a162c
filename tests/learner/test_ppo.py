"""PPO: advantages, training and checkpoints of the critic, and the KL penalty in the reward."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ludus.proto.config import AlgorithmConfig, GrpoConfig, HeadCritic, PpoConfig, ReinforceConfig
from ludus.proto.errors import CheckpointError
from ludus.trainer.core.types import Coefficients, TrainingSample
from ludus.trainer.data.batch import collate
from ludus.trainer.learner.algorithm import Algorithm
from ludus.trainer.learner.learner import Learner
from ludus.trainer.learner.micro_batches import (
    MicroBatchConfig,
    make_micro_batches,
    pack_one_micro_batch,
)
from ludus.trainer.learner.model import PolicyOutput
from ludus.trainer.learner.packing import RowCosts
from tests.learner.tiny_policy import make_batch, make_learner, make_samples

NO_PENALTY = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.0)
KL_PENALTY = Coefficients(learning_rate=1e-2, entropy=0.0, kl=0.1)
PPO = PpoConfig(geometric_mask=None)
COSTS = RowCosts(per_token=1.0, per_pair=0.0)


def flatten(learner: Learner) -> torch.Tensor:
    """Return all weights, including those of the value head, as one vector."""
    return torch.cat([weight.detach().flatten() for weight in learner.model.policy.parameters()])


def make_two_turn_sample(terminated: bool) -> TrainingSample:
    """Return a sample of two turns, with rewards 1 and 2 at the last sampled token of each turn."""
    return TrainingSample(
        token_ids=[5, 6, 7, 8, 9, 10],
        loss_mask=[False, True, False, True, True, False],
        rollout_logprobs=[0.0] * 6,
        advantages=[0.0] * 6,
        rewards=[0.0, 1.0, 0.0, 0.0, 2.0, 0.0],
        terminated=terminated,
    )


def test_advantages_skip_unsampled_tokens_and_bootstrap_if_truncated() -> None:
    samples = pack_one_micro_batch(
        [make_two_turn_sample(terminated=True), make_two_turn_sample(terminated=False)]
    )
    start_output = PolicyOutput(
        logprobs=torch.zeros(3),
        entropies=None,
        values=torch.tensor([0.5, 1.0, 1.5]),
        last_values=torch.tensor([4.0, 4.0]),
    )
    algorithm = Algorithm(PpoConfig(gamma=0.5, lam=0.5), max_tokens=64)
    targets = algorithm.make_targets(samples, start_output, None, kl_coef=0.0)
    # Computed by hand from the last token: delta = r + 0.5 V' - V, A = delta + 0.25 A'.
    terminated_advantages, truncated_advantages = (
        [1.0 - 0.5 + 0.25 * next_advantage + 0.5 * 1.0 for next_advantage in (-0.125, 0.375)],
        [2.0 - 1.5, 2.5],
    )
    expected_advantages = torch.tensor(
        [
            [terminated_advantages[0], -0.125, truncated_advantages[0]],
            [terminated_advantages[1], 0.375, truncated_advantages[1]],
        ]
    )
    assert torch.allclose(targets.advantages, expected_advantages)
    assert targets.critic is not None
    assert torch.allclose(
        targets.critic.returns, expected_advantages + torch.tensor([0.5, 1.0, 1.5])
    )


@pytest.mark.slow
def test_all_passes_over_a_batch_use_the_same_targets(model_path: str) -> None:
    batch = collate([make_two_turn_sample(terminated=True)])
    single_pass_learner, triple_pass_learner = (
        make_learner(model_path, PPO, update_epochs=num_epochs) for num_epochs in (1, 3)
    )
    single_metrics, triple_metrics = (
        single_pass_learner.train_step(batch, NO_PENALTY),
        triple_pass_learner.train_step(batch, NO_PENALTY),
    )
    assert triple_metrics.num_tokens_trained == 3 * single_metrics.num_tokens_trained
    assert triple_metrics.num_tokens_in_batch == 3 * single_metrics.num_tokens_in_batch
    assert triple_metrics.explained_variance == single_metrics.explained_variance
    for _ in range(2):
        single_pass_learner.train_step(batch, NO_PENALTY)
    assert triple_metrics.clip_ratio > 0, "no ratio was clipped in later passes"
    assert not torch.allclose(flatten(single_pass_learner), flatten(triple_pass_learner)), (
        "three passes gave the same weights as three steps with new targets"
    )


@pytest.mark.slow
def test_value_head_has_a_separate_learning_rate(model_path: str) -> None:
    batch = collate([make_two_turn_sample(terminated=True)])
    learners = {
        learning_rate: make_learner(
            model_path,
            PpoConfig(geometric_mask=None, critic=HeadCritic(learning_rate=learning_rate)),
        )
        for learning_rate in (None, 1e-2, 1e-4)
    }
    start_weight = learners[None].model.policy.value_head.weight.detach().clone()
    distances = {}
    for learning_rate, learner in learners.items():
        learner.train_step(batch, NO_PENALTY)
        distances[learning_rate] = (
            (learner.model.policy.value_head.weight.detach() - start_weight).abs().max().item()
        )
    assert distances[None] == distances[1e-2] == pytest.approx(100 * distances[1e-4], rel=1e-3)
    assert torch.equal(
        learners[None].model.policy.language_model.lm_head.weight,
        learners[1e-4].model.policy.language_model.lm_head.weight,
    )


@pytest.mark.slow
def test_critic_learns_the_returns(model_path: str) -> None:
    learner = make_learner(model_path, PpoConfig(geometric_mask=None, value_clip=None))
    # The first token determines the reward of a sequence.
    batch = collate(
        [
            replace(
                make_two_turn_sample(terminated=True),
                token_ids=[first_token, 6, 7, 8, last_token, 10],
            )
            if first_token == 5
            else replace(
                make_two_turn_sample(True),
                token_ids=[first_token, 6, 7, 8, last_token, 10],
                rewards=[0.0] * 6,
            )
            for first_token in (5, 15)
            for last_token in range(30, 38)
        ]
    )
    coefficients = Coefficients(learning_rate=3e-3, entropy=0.0, kl=0.0)
    metrics = [learner.train_step(batch, coefficients) for _ in range(25)]
    first_metrics, last_metrics = metrics[0], metrics[-1]
    assert first_metrics.value_loss is not None and last_metrics.value_loss is not None
    assert first_metrics.explained_variance == pytest.approx(0.0, abs=1e-6), (
        "the untrained critic did not predict 0"
    )
    assert last_metrics.explained_variance is not None and last_metrics.explained_variance > 0.8
    assert last_metrics.value_loss < first_metrics.value_loss / 5


@pytest.mark.slow
def test_critic_metrics_are_none_without_a_critic(model_path: str) -> None:
    metrics = make_learner(model_path).train_step(make_batch(), NO_PENALTY)
    assert metrics.value_loss is None
    assert metrics.explained_variance is None


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"max_tokens_per_micro_batch": 40}, {"packing": "pad"}])
def test_step_with_critic_does_not_depend_on_packing(
    model_path: str, config: dict[str, object]
) -> None:
    batch = make_batch(num_samples=24, num_prefix_tokens=6)
    results = []
    for options in ({}, config):
        learner = make_learner(model_path, PPO, num_minibatches=2, **options)
        metrics = [learner.train_step(batch, NO_PENALTY) for _ in range(2)]
        results.append([(row.loss, row.value_loss, row.grad_norm) for row in metrics])
    assert np.array(results[0]) == pytest.approx(np.array(results[1]), rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_resume_with_critic_is_bit_exact(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path, PPO)
    learner.train_step(make_batch(seed=1), NO_PENALTY)
    learner.save(tmp_path / "state")
    learner.train_step(make_batch(seed=2), NO_PENALTY)
    resumed_learner = make_learner(model_path, PPO)
    resumed_learner.load(tmp_path / "state")
    resumed_learner.train_step(make_batch(seed=2), NO_PENALTY)
    assert torch.equal(flatten(resumed_learner), flatten(learner))


@pytest.mark.slow
def test_checkpoint_without_a_required_critic_is_refused(model_path: str, tmp_path: Path) -> None:
    make_learner(model_path).save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="value_head"):
        make_learner(model_path, PPO).load(tmp_path / "state")


@pytest.mark.slow
def test_value_head_is_exported_but_not_published(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path, PPO)
    learner.train_step(make_batch(), NO_PENALTY)
    assert learner.gather_weights().keys() == make_learner(model_path).gather_weights().keys()
    learner.export_model(tmp_path)
    head_weights = load_file(tmp_path / "value_head.safetensors")
    assert head_weights.keys() == {"weight", "bias"}
    assert head_weights["weight"].abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        GrpoConfig(kl_coef=0.1, kl_placement="reward", kl_estimator="k1", geometric_mask=None),
        ReinforceConfig(kl_coef=0.1, kl_placement="reward", kl_estimator="k1", geometric_mask=None),
        PpoConfig(kl_coef=0.1, kl_placement="reward", kl_estimator="k1", geometric_mask=None),
    ],
)
def test_kl_penalty_in_the_reward_changes_the_policy(
    model_path: str, algorithm: AlgorithmConfig
) -> None:
    """Train on samples without rewards, so that only the KL penalty changes the policy."""
    learner = make_learner(model_path, algorithm)
    unpenalized_coefficients = replace(KL_PENALTY, kl=0.0)
    learner.train_step(make_batch(num_samples=24), unpenalized_coefficients)
    samples_without_rewards = [
        replace(
            sample, advantages=[0.0] * len(sample.token_ids), rewards=[0.0] * len(sample.token_ids)
        )
        for sample in make_samples(24)
    ]
    batch = collate(samples_without_rewards)
    start_weights = flatten(learner)
    metrics = learner.train_step(batch, KL_PENALTY)
    assert metrics.reference_kl > 1e-4
    assert not torch.equal(flatten(learner), start_weights)


@pytest.mark.slow
def test_whitened_advantages_have_mean_zero_and_standard_deviation_one(model_path: str) -> None:
    learner = make_learner(model_path, PPO)
    config = MicroBatchConfig(64, COSTS, packs_trees=False)
    micro_batches = make_micro_batches(make_batch(num_samples=24), np.arange(24), config)
    assert len(micro_batches) > 1
    algorithm = Algorithm(PPO, max_tokens=64)
    with torch.no_grad():
        raw_targets = [
            algorithm.make_targets(
                micro_batch, learner.model(micro_batch.rows, 1.0), None, kl_coef=0.0
            )
            for micro_batch in micro_batches
        ]
    [targets] = algorithm.whiten_targets([raw_targets], [micro_batches])
    advantages = torch.cat(
        [
            target.advantages[micro_batch.mask]
            for target, micro_batch in zip(targets, micro_batches, strict=True)
        ]
    )
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert advantages.std().item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("config_class", [GrpoConfig, ReinforceConfig, PpoConfig])
def test_earlier_sequences_of_an_episode_get_the_kl_penalties_of_later_ones(
    config_class: type[AlgorithmConfig], gamma: float
) -> None:
    settings = {"kl_coef": 0.1, "kl_placement": "reward", "kl_estimator": "k1"}
    if config_class is GrpoConfig:
        gamma = 1.0
    else:
        settings |= {"gamma": gamma}
    lam = 0.5 if config_class is PpoConfig else 1.0
    if config_class is PpoConfig:
        settings |= {"lam": lam}
    algorithm = Algorithm(config_class(geometric_mask=None, **settings), max_tokens=64)
    # Two episodes, of three sequences and of one sequence.
    samples = [
        TrainingSample(
            token_ids=[5, 6 + index, *range(7, 7 + length)],
            loss_mask=[False, False, *[True] * length],
            rollout_logprobs=[0.0] * (2 + length),
            advantages=[0.0] * (2 + length),
            rewards=[0.0] * (2 + length),
            terminated=True,
            adds_next_return=index < 2,
        )
        for index, length in enumerate([3, 1, 2, 4])
    ]
    penalties = [[0.3, -0.2, 0.5], [0.7], [-0.4, 0.1], [0.2, 0.6, -0.1, 0.9]]
    batch, config = collate(samples), MicroBatchConfig(8, COSTS, packs_trees=False)
    minibatches = [make_micro_batches(batch, np.array(ids), config) for ids in ([0, 1], [2, 3])]
    targets = []
    for micro_batch in (batch for minibatch in minibatches for batch in minibatch):
        logprobs = torch.zeros(int(micro_batch.target_of_token.max()) + 1)
        for row, sample in enumerate(micro_batch.sample_ids.tolist()):
            indices = micro_batch.target_of_token[row][micro_batch.mask[row]]
            logprobs[indices] = -10 * torch.tensor(penalties[sample])
        zeros = torch.zeros(len(logprobs))
        initial_output = PolicyOutput(logprobs, None, zeros, zeros[: len(micro_batch.mask)])
        reference_output = PolicyOutput(zeros, None, None, None)
        targets.append(algorithm.make_targets(micro_batch, initial_output, reference_output, 0.1))
    sizes = [len(minibatch) for minibatch in minibatches]
    split_targets = [targets[: sizes[0]], targets[sizes[0] :]]
    new_targets = algorithm.add_later_penalties(split_targets, minibatches, batch.adds_next_return)
    for target, micro_batch in zip(chain(*new_targets), chain(*minibatches), strict=True):
        for row, sample in enumerate(micro_batch.sample_ids.tolist()):
            later = [penalty for later in range(sample + 1, 3) for penalty in penalties[later]]
            rewards = list(penalties[sample])
            rewards[-1] += sum(gamma ** (k + 1) * penalty for k, penalty in enumerate(later))
            expected = [
                sum((gamma * lam) ** k * reward for k, reward in enumerate(rewards[start:]))
                for start in range(len(rewards))
            ]
            assert target.advantages[row][micro_batch.mask[row]].tolist() == pytest.approx(expected)
            if target.critic is not None:
                returns = target.critic.returns[row][micro_batch.mask[row]]
                assert returns.tolist() == pytest.approx(expected)
