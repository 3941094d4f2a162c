from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.proto.config import CispoLoss, ClipLoss, GspoLoss
from ludus.trainer.algorithms.losses import (
    aggregate,
    is_clipped,
    kl,
    loss_denominator,
    token_losses,
)
from tests.algorithms.conftest import make_inputs

if TYPE_CHECKING:
    from conftest import RaggedBatch

LOGPROB = st.floats(-50, 0, width=32)


def compute_loss_and_gradient(
    ratio: float, advantage: float, dual_clip: float | None = None
) -> tuple[float, float]:
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    loss = token_losses(
        make_inputs(logprob, torch.zeros_like(logprob), advantages),
        ClipLoss(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip),
    ).losses
    loss.sum().backward()
    return loss.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # Inside the range: the gradient of -rA is -rA.
        (1.25, 2.0, -2.5, -2.5),  # Inside the range: clip_high is wider than clip_low.
        (1.5, 2.0, -2.56, 0.0),  # Positive advantage, too likely: clipped at 1 + clip_high.
        (0.5, 2.0, -1.0, -1.0),  # Positive advantage, less likely: not clipped.
        (0.5, -2.0, 1.6, 0.0),  # Negative advantage, too unlikely: clipped at 1 - clip_low.
        (1.5, -2.0, 3.0, 3.0),  # Negative advantage, more likely: not clipped.
    ],
)
def test_clipping_zeroes_gradients_only_beyond_the_clip_range(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    assert compute_loss_and_gradient(ratio, advantage) == pytest.approx((loss, gradient), abs=1e-12)
    is_clipped_token = is_clipped(torch.tensor(math.log(ratio)), torch.tensor(advantage), 0.2, 0.28)
    assert bool(is_clipped_token) is (gradient == 0.0)


@given(st.floats(0.01, 1000), st.floats(-5, 5))
def test_dual_clip_bounds_the_loss_only_for_negative_advantages(
    ratio: float, advantage: float
) -> None:
    plain_loss, _ = compute_loss_and_gradient(ratio, advantage)
    bounded_loss, gradient = compute_loss_and_gradient(ratio, advantage, dual_clip=3.0)
    if advantage < 0:
        assert bounded_loss == min(plain_loss, 3.0 * abs(advantage))
        assert gradient == 0.0 or ratio <= 3.0 + 1e-9
    else:
        assert bounded_loss == plain_loss


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("difference", [-1e4, 1e4])
def test_extreme_ratio_produces_finite_loss_and_gradient(
    advantage: float, difference: float
) -> None:
    for loss_function in (
        lambda inputs: token_losses(inputs, ClipLoss(dual_clip=None)),
        lambda inputs: token_losses(inputs, ClipLoss()),
        lambda inputs: token_losses(inputs, GspoLoss()),
        lambda inputs: token_losses(inputs, CispoLoss()),
    ):
        logprobs = torch.tensor([[difference]], requires_grad=True)
        inputs = make_inputs(logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]))
        loss = loss_function(inputs).losses
        loss.sum().backward()
        assert loss.isfinite().all() and logprobs.grad.isfinite().all()


def test_gspo_gradient_equals_the_gradient_of_the_sequence_loss(ragged_batch: RaggedBatch) -> None:
    advantages = torch.tensor([0.625, -0.375, -0.375, 0.125], dtype=torch.float64)
    mask = ragged_batch.mask

    token_logprobs = ragged_batch.logprobs.clone().requires_grad_()
    inputs = make_inputs(token_logprobs, ragged_batch.old_logprobs, advantages[:, None], mask)
    loss = token_losses(inputs, GspoLoss(clip_low=0.4, clip_high=0.4)).losses
    aggregate(loss, mask, "sequence_mean", 4).backward()

    logprobs = ragged_batch.logprobs.clone().requires_grad_()
    log_ratio = (logprobs - ragged_batch.old_logprobs).where(mask, 0.0).sum(-1) / mask.sum(-1)
    ratio = log_ratio.exp()
    (-torch.minimum(ratio * advantages, ratio.clamp(0.6, 1.4) * advantages)).mean().backward()
    torch.testing.assert_close(token_logprobs.grad[mask], logprobs.grad[mask])
    assert token_logprobs.grad[mask].all(), "a sequence ratio is outside the clip range"


def test_cispo_clips_weights_without_removing_gradients() -> None:
    logprobs = torch.tensor([[0.5, 2.0, 9.0]]).log().requires_grad_()
    inputs = make_inputs(logprobs, torch.zeros(1, 3), torch.tensor([[2.0]]))
    token_losses(inputs, CispoLoss(clip_low=1.0, clip_high=4.0)).losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, -4.0, -10.0]]))


@given(LOGPROB, LOGPROB)
def test_k2_and_k3_are_nonnegative_and_zero_for_equal_logprobs(logprob: float, ref: float) -> None:
    logprobs, ref_logprobs = torch.tensor(logprob), torch.tensor(ref)
    for estimator in ("k2", "k3"):
        assert kl(logprobs, ref_logprobs, estimator) >= 0
        assert kl(logprobs, logprobs, estimator) == 0


def test_expected_k1_and_k3_under_the_policy_equal_the_kl_divergence() -> None:
    logprobs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    ref = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    expected = (logprobs.exp() * (logprobs - ref)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((logprobs.exp() * kl(logprobs, ref, estimator)).sum(), expected)


@pytest.mark.parametrize(
    ("difference", "gradient"),
    [(1.0, 1 - math.e), (-15.0, 1.0), (5.0, 1 - math.exp(5)), (21.0, 0.0), (-21.0, 1.0)],
)
def test_gradient_of_k3_is_zero_only_above_the_clamp(difference: float, gradient: float) -> None:
    logprobs = torch.tensor(-30.0, dtype=torch.float64, requires_grad=True)
    kl(logprobs, logprobs.detach() + difference, "k3").backward()
    assert logprobs.grad.item() == pytest.approx(gradient, rel=1e-6)


def test_padding_rows_are_excluded_from_the_denominator(ragged_batch: RaggedBatch) -> None:
    padded_mask = torch.cat([ragged_batch.mask, torch.zeros(3, 4).bool()])
    for aggregation, expected in (("token_mean", 10), ("sequence_mean", 4), ("constant", 32)):
        assert loss_denominator(padded_mask.sum(-1), aggregation, max_tokens=8) == expected
    loss = torch.ones(7, 4)
    assert aggregate(loss, padded_mask, "sequence_mean", 4).item() == 1.0


def test_zero_denominator_is_refused(ragged_batch: RaggedBatch) -> None:
    with pytest.raises(ValueError, match="got 0; skip"):
        aggregate(torch.ones(4, 4), ragged_batch.mask, "token_mean", 0)
