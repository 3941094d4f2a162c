"""Comparison with reference numbers from published code or from calculations by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from ludus.proto.config import ClipLoss, GspoLoss, SequenceMask, SequenceTis, TokenTis
from ludus.trainer.algorithms.advantages import critic_targets, gae, group_advantages
from ludus.trainer.algorithms.losses import (
    aggregate,
    correction_weight,
    geometric_mask,
    kl,
    loss_denominator,
    sequence_log_ratio,
    token_losses,
)
from tests.algorithms.conftest import make_inputs

if TYPE_CHECKING:
    from conftest import RaggedBatch

TOLERANCE_4 = 5.1e-5
TOLERANCE_7 = 5.1e-8
"""Half a unit of the 4th or 7th decimal place."""


def f64(values: list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# NeMo-RL's reference numbers are for one sequence of three tokens with different advantages.
ADVANTAGES = f64([[1, -1, 2]])
OLD_LOGPROBS = f64([[-1, -1, -1]])
LOGPROBS = f64([[-1.69315, -1, -0.59453]])
ROLLOUT_LOGPROBS = f64([[-0.5, -1.5, -0.8]])
MASK = torch.ones(1, 3, dtype=torch.bool)
PLAIN_CLIP = ClipLoss(clip_low=0.2, clip_high=0.2, dual_clip=None)
WIDE_GSPO = GspoLoss(clip_low=0.2, clip_high=0.2)


def test_ppo_clip_loss_equals_reference() -> None:
    assert token_losses(
        make_inputs(LOGPROBS, OLD_LOGPROBS, ADVANTAGES), PLAIN_CLIP
    ).losses.mean().item() == pytest.approx(-0.6333, abs=TOLERANCE_4)


def test_gspo_ratio_and_loss_equal_reference() -> None:
    ratio = sequence_log_ratio(LOGPROBS, OLD_LOGPROBS, MASK).exp()
    loss = token_losses(make_inputs(LOGPROBS, OLD_LOGPROBS, ADVANTAGES), WIDE_GSPO).losses
    assert ratio.tolist() == [pytest.approx([0.9086] * 3, abs=TOLERANCE_4)]
    assert loss.mean().item() == pytest.approx(-0.6057, abs=TOLERANCE_4)


def test_loss_with_token_tis_equals_reference() -> None:
    loss = (
        correction_weight(OLD_LOGPROBS, ROLLOUT_LOGPROBS, MASK, TokenTis.model_construct(cap=0.8))
        * token_losses(make_inputs(LOGPROBS, OLD_LOGPROBS, ADVANTAGES), PLAIN_CLIP).losses
    )
    assert loss.mean().item() == pytest.approx(-0.4744, abs=TOLERANCE_4)


def test_gspo_loss_with_sequence_tis_equals_reference() -> None:
    weight = correction_weight(
        OLD_LOGPROBS, ROLLOUT_LOGPROBS, MASK, SequenceTis.model_construct(cap=0.8)
    )
    loss = weight * token_losses(make_inputs(LOGPROBS, OLD_LOGPROBS, ADVANTAGES), WIDE_GSPO).losses
    assert loss.mean().item() == pytest.approx(-0.4846, abs=TOLERANCE_4)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [-1, 14, 29]), ("k2", [0.5, 98, 420.5]), ("k3", [0.7183, 13, 28])],
)
def test_kl_estimates_equal_reference(estimator: str, expected: list[float]) -> None:
    estimate = kl(f64([-1, -1, -1]), f64([0, -15, -30]), estimator, input_clamp=torch.inf)
    assert estimate.tolist() == pytest.approx(expected, abs=TOLERANCE_4)


def test_clamped_k3_estimate_equals_reference() -> None:
    estimate = kl(f64([-1, -1, -1]), f64([0, -15, -30]), "k3", input_clamp=20)
    assert estimate.clamp(-10, 10).tolist() == pytest.approx([0.7183, 10, 10], abs=TOLERANCE_4)


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [(1, 1, [6, 5, 3]), (0.5, 1, [2.75, 3.5, 3]), (1, 0.5, [3.625, 4.25, 3])],
)
def test_critic_targets_equal_reference(gamma: float, lam: float, expected: list[float]) -> None:
    values, terminated, bootstrap_value = f64([[0.5, 1, 1.5]]), torch.tensor([True]), f64([99])
    advantages = gae(f64([[1, 2, 3]]), values, MASK, terminated, bootstrap_value, gamma, lam)
    assert critic_targets(advantages, values, MASK).tolist() == [pytest.approx(expected, abs=1e-12)]


def test_observation_tokens_do_not_change_critic_targets() -> None:
    """Compare with the targets of the same episode without observation tokens."""
    values = f64([[7, 0.5, 9, 9, 1, 9, 1.5]])
    mask = torch.tensor([[False, True, False, False, True, False, True]])
    rewards = f64([[0, 1, 0, 0, 2, 0, 3]])
    terminated, bootstrap_value = torch.tensor([True]), f64([99])
    for gamma, lam, expected in ((1, 1, [6, 5, 3]), (0.5, 1, [2.75, 3.5, 3])):
        advantages = gae(rewards, values, mask, terminated, bootstrap_value, gamma, lam)
        assert critic_targets(advantages, values, mask)[mask].tolist() == pytest.approx(expected)


def test_gae_bootstraps_a_truncated_episode() -> None:
    # The deltas are [1 + 1 - .5, 2 + 1.5 - 1, 3 + 10 - 1.5], and are summed from the end.
    values, not_terminated = f64([[0.5, 1, 1.5]]), torch.tensor([False])
    advantages = gae(f64([[1, 2, 3]]), values, MASK, not_terminated, f64([10]), 1, 1)
    assert advantages.tolist() == [pytest.approx([15.5, 14, 11.5])]
    assert critic_targets(advantages, values, MASK).tolist() == [pytest.approx([16, 15, 13])]


def test_sequence_mask_rejects_long_sequences() -> None:
    # The log-probs of 100 tokens differ by .012 each: exp(1.2) = 3.32 is above TRL's cap of 3.
    logprobs, zeros, mask = f64([[0.012] * 100]), f64([[0.0] * 100]), torch.ones(1, 100).bool()
    assert correction_weight(logprobs, zeros, mask, SequenceTis(cap=10)).item() == pytest.approx(
        3.3201169, abs=TOLERANCE_7
    )
    assert correction_weight(logprobs, zeros, mask, SequenceMask(cap=3)).item() == 0
    assert geometric_mask(logprobs, zeros, mask, 0.5, 2).item() is True


def test_reward_mean_and_std_equal_reference(ragged_batch: RaggedBatch) -> None:
    rewards = ragged_batch.rewards
    assert rewards.mean().item() == 0.375
    assert rewards.std().item() == pytest.approx(0.4787136, abs=TOLERANCE_7)
    assert rewards.std(correction=0).item() == pytest.approx(0.4145781, abs=TOLERANCE_7)


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("mean", "group", [1.3053097, -0.7831858, -0.7831858, 0.2610619]),
        ("mean", "batch", [1.3053097, -0.7831858, -0.7831858, 0.2610619]),
        ("mean", "none", [0.625, -0.375, -0.375, 0.125]),
        ("leave_one_out", "none", [0.8333333, -0.5, -0.5, 0.1666667]),
    ],
)
def test_group_advantages_equal_reference(
    ragged_batch: RaggedBatch, baseline: str, scale: str, expected: list[float]
) -> None:
    advantages = group_advantages(ragged_batch.rewards[None], baseline, scale)
    assert advantages.tolist() == [pytest.approx(expected, abs=TOLERANCE_7)]


@pytest.mark.parametrize(
    ("scale", "aggregation", "expected"),
    [
        ("none", "token_mean", -0.0832437),
        ("none", "sequence_mean", -0.0113098),
        ("none", "constant", -0.0260137),
        ("group", "token_mean", -0.1738541),
        ("group", "sequence_mean", -0.0236205),
        ("group", "constant", -0.0543294),
    ],
)
def test_clip_loss_of_ragged_batch_equals_reference(
    ragged_batch: RaggedBatch, scale: str, aggregation: str, expected: float
) -> None:
    advantages = group_advantages(ragged_batch.rewards[None], scale=scale).reshape(4, 1)
    loss = token_losses(
        make_inputs(ragged_batch.logprobs, ragged_batch.old_logprobs, advantages), PLAIN_CLIP
    ).losses
    assert _aggregate(loss, ragged_batch, aggregation) == pytest.approx(expected, abs=TOLERANCE_7)


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token_mean", 0.0348619), ("sequence_mean", 0.0425378)]
)
def test_k3_of_ragged_batch_equals_reference(
    ragged_batch: RaggedBatch, aggregation: str, expected: float
) -> None:
    estimate = kl(ragged_batch.logprobs, ragged_batch.ref_logprobs, "k3")
    assert _aggregate(estimate, ragged_batch, aggregation) == pytest.approx(
        expected, abs=TOLERANCE_7
    )


def test_token_tis_loss_of_ragged_batch_equals_reference(ragged_batch: RaggedBatch) -> None:
    advantages = group_advantages(ragged_batch.rewards[None]).reshape(4, 1)
    loss = token_losses(
        make_inputs(ragged_batch.logprobs, ragged_batch.old_logprobs, advantages), PLAIN_CLIP
    ).losses
    weight = correction_weight(
        ragged_batch.old_logprobs, ragged_batch.rollout_logprobs, ragged_batch.mask, TokenTis(cap=2)
    )
    assert _aggregate(weight * loss, ragged_batch, "token_mean") == pytest.approx(
        -0.0801720, abs=TOLERANCE_7
    )


def test_sequence_weights_of_ragged_batch_equal_reference(ragged_batch: RaggedBatch) -> None:
    weight = correction_weight(
        ragged_batch.old_logprobs,
        ragged_batch.rollout_logprobs,
        ragged_batch.mask,
        SequenceTis(cap=2),
    )
    assert weight[:, 0].tolist() == pytest.approx(
        [0.9512294, 1.0512711, 1, 1.0512711], abs=TOLERANCE_7
    )


def test_gspo_ratios_of_ragged_batch_equal_reference(ragged_batch: RaggedBatch) -> None:
    log_ratio = sequence_log_ratio(
        ragged_batch.logprobs, ragged_batch.old_logprobs, ragged_batch.mask
    )
    ratios = log_ratio[:, 0].exp()
    assert ratios.tolist() == pytest.approx([1.0778842, 0.9512294, 1, 1.3498588], abs=TOLERANCE_7)


@pytest.mark.parametrize(
    ("clip_low", "clip_high", "expected"), [(3e-4, 4e-4, -0.0001031), (0.2, 0.2, -0.0229916)]
)
def test_gspo_loss_of_ragged_batch_equals_reference(
    ragged_batch: RaggedBatch, clip_low: float, clip_high: float, expected: float
) -> None:
    advantages = group_advantages(ragged_batch.rewards[None]).reshape(4, 1)
    inputs = make_inputs(
        ragged_batch.logprobs, ragged_batch.old_logprobs, advantages, ragged_batch.mask
    )
    loss = token_losses(inputs, GspoLoss(clip_low=clip_low, clip_high=clip_high)).losses
    assert _aggregate(loss, ragged_batch, "sequence_mean") == pytest.approx(
        expected, abs=TOLERANCE_7
    )


def _aggregate(token_values: Tensor, ragged_batch: RaggedBatch, aggregation: str) -> float:
    denominator = loss_denominator(ragged_batch.mask.sum(-1), aggregation, max_tokens=8)
    return aggregate(token_values, ragged_batch.mask, aggregation, denominator).item()
