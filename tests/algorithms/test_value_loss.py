from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ludus.trainer.algorithms.losses import value_loss


def make_row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def compute_loss_and_gradient(value: float, old_value: float, target: float) -> tuple[float, float]:
    values = make_row(value).requires_grad_()
    mask = torch.tensor([[True]])
    loss = value_loss(values, make_row(old_value), make_row(target), mask, clip=0.2, denominator=1)
    loss.backward()
    assert values.grad is not None
    return loss.item(), values.grad.item()


@pytest.mark.parametrize(
    ("value", "old_value", "target", "loss", "gradient"),
    [
        (1.1, 1.0, 2.0, 0.5 * 0.9**2, -0.9),  # Small change: not clipped.
        (1.5, 1.0, 2.0, 0.5 * 0.8**2, 0.0),  # Large change towards the target: clipped at 1.2.
        (0.5, 1.0, 2.0, 0.5 * 1.5**2, -1.5),  # Change away from the target: not clipped.
        (2.5, 1.0, 2.0, 0.5 * 0.8**2, 0.0),  # Change past the target: also clipped.
    ],
)
def test_loss_uses_the_larger_of_clipped_and_unclipped_error(
    value: float, old_value: float, target: float, loss: float, gradient: float
) -> None:
    assert compute_loss_and_gradient(value, old_value, target) == pytest.approx((loss, gradient))


def test_unclipped_loss_is_half_the_mean_squared_error() -> None:
    values, targets = make_row(1, 2, 4), make_row(0, 0, 0)
    mask = torch.ones(1, 3).bool()
    loss = value_loss(values, values, targets, mask, clip=None, denominator=3)
    assert loss.item() == 0.5 * (1 + 4 + 16) / 3


def test_values_outside_the_mask_may_be_nan_and_have_no_gradient() -> None:
    values = make_row(1.0, torch.nan, 2.0).requires_grad_()
    targets = make_row(0.5, torch.nan, 0.5)
    mask = torch.tensor([[True, False, True]])
    value_loss(values, targets, targets, mask, clip=0.2, denominator=2).backward()
    assert values.grad is not None
    assert values.grad[0, 1] == 0 and values.grad.isfinite().all()


def test_losses_of_parts_sum_to_the_total_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old_values, targets = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.6
    num_tokens = int(mask.sum())

    def compute_loss(rows: slice) -> Tensor:
        return value_loss(
            values[rows], old_values[rows], targets[rows], mask[rows], 0.2, num_tokens
        )

    total = compute_loss(slice(None))
    torch.testing.assert_close(compute_loss(slice(0, 1)) + compute_loss(slice(1, 6)), total)
    expected = torch.maximum(
        (values - targets) ** 2,
        (old_values + (values - old_values).clamp(-0.2, 0.2) - targets) ** 2,
    )
    torch.testing.assert_close(total, 0.5 * expected[mask].mean())


def test_targets_and_old_values_have_no_gradient() -> None:
    values, old_values, targets = (make_row(1.0, 2.0).requires_grad_() for _ in range(3))
    value_loss(values, old_values, targets, torch.ones(1, 2).bool(), 0.2, 2).backward()
    assert old_values.grad is None and targets.grad is None
