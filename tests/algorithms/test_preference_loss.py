from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from ludus.trainer.algorithms.preference import listwise_loss


def test_listwise_loss_of_two_completions_is_the_bradley_terry_loss() -> None:
    scores = torch.tensor([[0.7, 0.1], [-2.0, 0.4]])
    expected = -logsigmoid(scores[:, 0] - scores[:, 1]).mean()
    torch.testing.assert_close(listwise_loss(scores, torch.tensor([0, 0])), expected)


def test_listwise_loss_is_the_score_of_the_best_minus_logsumexp() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    expected = -(2.0 - math.log(math.e + math.e**2 + math.e**3))
    assert listwise_loss(scores, torch.tensor([1])).item() == pytest.approx(expected)


def test_scores_far_apart_give_a_finite_loss() -> None:
    assert listwise_loss(torch.tensor([[-1e4, 1e4]]), torch.tensor([0])).item() == 2e4
