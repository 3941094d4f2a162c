"""Losses of a reward model on human preferences.

Shapes: N = comparisons, K = completions in one comparison.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center_coef: float = 0.0
) -> Tensor:
    """Return the mean of -log sigmoid(s_chosen - s_rejected - margin), for scores [N].

    Source: arXiv 2203.02155. Adds center_coef * (s_chosen + s_rejected)^2, which fixes the free
    constant of the scores near zero (arXiv 2312.09244).
    """
    loss = -logsigmoid(chosen - rejected - margin)
    return (loss + center_coef * (chosen + rejected).square()).mean()


def listwise_loss(scores: Tensor, best: Tensor) -> Tensor:
    """Return the mean of -log softmax(scores)[best], for `scores` [N, K] and the index `best` [N].

    For K = 2 this is the Bradley-Terry loss.
    """
    return cross_entropy(scores, best)
