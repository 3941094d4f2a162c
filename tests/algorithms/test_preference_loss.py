from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from ludus.trainer.algorithms.preference import bradley_terry_loss, listwise_loss


def test_listwise_loss_of_two_completions_is_the_bradley_terry_loss() -> None:
    scores = torch.tensor([[0.7, 0.1], [-2.0, 0.4]])
    listwise = listwise_loss(scores, torch.tensor([0, 0]))
    torch.testing.assert_close(listwise, bradley_terry_loss(scores[:, 0], scores[:, 1]))


def test_listwise_loss_is_the_score_of_the_best_minus_logsumexp() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    expected = -(2.0 - math.log(math.e + math.e**2 + math.e**3))
    assert listwise_loss(scores, torch.tensor([1])).item() == pytest.approx(expected)


def test_margin_requires_a_larger_difference() -> None:
    chosen, rejected = torch.tensor([1.0, 0.5]), torch.tensor([0.2, 0.6])
    margin = torch.tensor([0.3, 0.1])
    torch.testing.assert_close(
        bradley_terry_loss(chosen, rejected, margin), bradley_terry_loss(chosen - margin, rejected)
    )


def test_centering_penalizes_only_the_sum_of_the_scores() -> None:
    chosen, rejected = torch.tensor([3.0]), torch.tensor([1.0])
    expected = -logsigmoid(torch.tensor(2.0)) + 0.01 * 16
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected, center_coef=0.01), expected)
    centred = bradley_terry_loss(chosen - 2, rejected - 2, center_coef=0.01)
    torch.testing.assert_close(centred, -logsigmoid(torch.tensor(2.0)))


def test_scores_far_apart_give_a_finite_loss() -> None:
    loss = bradley_terry_loss(torch.tensor([-1e4]), torch.tensor([1e4]))
    assert loss.item() == 2e4
