"""The loss of a reward model on human preferences.

Shapes: N = comparisons, K = completions in one comparison.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy


def listwise_loss(scores: Tensor, best: Tensor) -> Tensor:
    """Return the mean of -log softmax(scores)[best], for `scores` [N, K] and the index `best` [N].

    For K = 2 this is the Bradley-Terry loss, -log sigmoid(s_chosen - s_rejected) (arXiv
    2203.02155).
    """
    return cross_entropy(scores, best)
