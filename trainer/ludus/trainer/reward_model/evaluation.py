"""Evaluation of a reward model on held-out comparisons."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ludus.proto.reward_models import PreferenceScores
from ludus.trainer.reward_model.comparison_set import ComparisonSet
from ludus.trainer.reward_model.model import RewardModel

_NUM_COMPARISONS_AT_ONCE = 1024


def rank_best(scores: Tensor, best: Tensor) -> Tensor:
    """Return the rank of the preferred answer by `scores` [N, K], int64 [N], from 1.

    A tie counts as the worse rank.
    """
    best_scores = scores.gather(1, best[:, None])
    return (scores >= best_scores).sum(1)


def evaluate_comparisons(
    model: RewardModel, comparisons: ComparisonSet, rows: Sequence[int], max_tokens: int
) -> PreferenceScores | None:
    """Return the results on these comparisons; None if there are none.

    Args:
        max_tokens: maximum number of padded tokens in a micro-batch.
    """
    if not rows:
        return None
    all_scores: list[float] = []
    for start in range(0, len(rows), _NUM_COMPARISONS_AT_ONCE):
        part = comparisons.rows(rows[start : start + _NUM_COMPARISONS_AT_ONCE])
        all_scores += model.score_tokens(part, max_tokens_per_batch=max_tokens)
    scores = torch.tensor(all_scores, dtype=torch.float64).view(len(rows), -1)
    best_indices = torch.from_numpy(comparisons.best[list(rows)])
    ranks = rank_best(scores, best_indices)
    return PreferenceScores(
        accuracy=float((ranks == 1).double().mean()),
        mrr=float((1 / ranks).double().mean()),
        loss=float(cross_entropy(scores, best_indices)),
        score_mean=float(scores.mean()),
        score_std=float(scores.std()),
    )
