"""Policy and value losses and their gradients, compared with loops over tokens."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ludus.trainer.algorithms.losses import (
    LossInputs,
    loss_denominator,
    policy_gradient_loss,
    value_loss,
)
from tests.numerics.loss_cases import LOSS_TYPES, LossCase, compute_loss_by_formula, make_case

NUM_CASES = 200
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}
"""Largest difference, relative to the largest number of the expected tensor if that exceeds 1."""


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = max(1.0, float(expected.abs().max()))
    assert float((actual.double() - expected.double()).abs().max()) <= tolerance * scale


def compute_share(case: LossCase, logprobs: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of some rows, as a share of the loss of all rows."""
    terms = policy_gradient_loss(
        LossInputs(
            logprobs=logprobs[ids],
            old_logprobs=case.old_logprobs[ids],
            rollout_logprobs=case.rollout_logprobs[ids],
            ref_logprobs=case.ref_logprobs[ids],
            entropies=torch.zeros_like(logprobs[ids]),
            advantages=case.advantages[ids],
            mask=case.mask[ids],
        ),
        case.config,
        denominator=loss_denominator(
            torch.tensor(case.lengths), case.config.aggregation, case.max_tokens
        ),
        entropy_coef=0.0,
        kl_coef=case.kl_coef,
    )
    return terms.loss


def compute_in_one_share(case: LossCase, logprobs: Tensor) -> Tensor:
    """Return the loss of all rows at once."""
    return compute_share(case, logprobs, torch.arange(len(case.lengths)))


def compute_in_shares(case: LossCase, logprobs: Tensor, generator: random.Random) -> Tensor:
    """Return the sum of the losses of one to four micro-batches, some of them empty."""
    rows = list(range(len(case.lengths)))
    generator.shuffle(rows)
    num_shares = generator.randint(1, 4)
    return torch.stack(
        [
            compute_share(case, logprobs, torch.tensor(rows[share::num_shares], dtype=torch.int64))
            for share in range(num_shares)
        ]
    ).sum()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["float32", "float64"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_policy_loss_equals_the_formula(loss_type: str, dtype: torch.dtype) -> None:
    for seed in range(NUM_CASES):
        case = make_case(seed, loss_type, dtype)
        logprobs = case.logprobs.clone().requires_grad_()
        loss = compute_in_shares(case, logprobs, random.Random(seed))
        loss.backward()
        expected_logprobs = case.logprobs.clone().requires_grad_()
        expected_loss = compute_loss_by_formula(case, expected_logprobs)
        expected_loss.backward()
        assert logprobs.grad is not None and expected_logprobs.grad is not None
        assert_near(loss.detach(), expected_loss.detach(), TOLERANCES[dtype])
        assert_near(logprobs.grad, expected_logprobs.grad.nan_to_num(), TOLERANCES[dtype])


def compute_clipped_error(
    value: Tensor, old_value: Tensor, target: Tensor, clip: float | None
) -> Tensor:
    """Return the larger squared error of the value and of the clipped value."""
    error = (value - target) ** 2
    if clip is None or abs(float((value - old_value).detach())) <= clip:
        return error
    bound = float(old_value) + (clip if value > old_value else -clip)
    clipped_error = (bound - float(target)) ** 2
    return (
        error if clipped_error <= float(error.detach()) else torch.full_like(error, clipped_error)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["float32", "float64"])
def test_value_loss_equals_the_formula(dtype: torch.dtype) -> None:
    for seed in range(NUM_CASES):
        case, generator = make_case(seed, "dapo", dtype), random.Random(seed)
        clip = generator.choice([None, 0.1, 0.2])
        old_values, returns = case.old_logprobs, case.ref_logprobs
        values = case.logprobs.clone().requires_grad_()
        rows = torch.arange(len(case.lengths))
        num_tokens = sum(case.lengths)
        shares = [
            value_loss(values[ids], old_values[ids], returns[ids], case.mask[ids], clip, num_tokens)
            for ids in rows.tensor_split(3)
        ]
        loss = torch.stack(shares).sum()
        loss.backward()
        expected_values = case.logprobs.clone().requires_grad_()
        errors = [
            compute_clipped_error(
                expected_values[row, t], old_values[row, t], returns[row, t], clip
            )
            for row, length in enumerate(case.lengths)
            for t in range(length)
        ]
        expected_loss = 0.5 * torch.stack(errors).sum() / num_tokens
        assert_near(loss.detach(), expected_loss.detach(), TOLERANCES[dtype])
        if expected_loss.requires_grad:
            expected_loss.backward()
        assert values.grad is not None
        gradient = expected_values.grad
        expected_gradient = torch.zeros_like(values) if gradient is None else gradient
        assert_near(values.grad, expected_gradient.nan_to_num(), TOLERANCES[dtype])
