"""How a reward model does on comparisons that it has not learned from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ludus.proto.reward_models import PreferenceScores
from ludus.trainer.algorithms.preference import listwise_loss
from ludus.trainer.reward_model.comparison_set import ComparisonSet
from ludus.trainer.reward_model.model import RewardModel

_COMPARISONS_AT_ONCE = 1024


def ranks(scores: Tensor, best: Tensor) -> Tensor:
    """int64 [N] the rank, from 1, of the preferred answer by `scores` [N, K]; a tie is a loss."""
    of_best = scores.gather(1, best[:, None])
    return (scores >= of_best).sum(1)


def judge(
    model: RewardModel, comparisons: ComparisonSet, rows: Sequence[int], max_tokens: int
) -> PreferenceScores | None:
    """The judgement over these comparisons; None where there are none.

    Args:
        max_tokens: padded tokens that go through the model at once.
    """
    if not rows:
        return None
    found: list[float] = []
    for start in range(0, len(rows), _COMPARISONS_AT_ONCE):
        part = comparisons.rows(rows[start : start + _COMPARISONS_AT_ONCE])
        found += model.score_tokens(part, max_tokens_per_batch=max_tokens)
    scores = torch.tensor(found, dtype=torch.float64).view(len(rows), -1)
    best = torch.from_numpy(comparisons.best[list(rows)])
    place = ranks(scores, best)
    return PreferenceScores(
        accuracy=float((place == 1).double().mean()),
        mrr=float((1 / place).double().mean()),
        loss=float(listwise_loss(scores, best)),
        score_mean=float(scores.mean()),
        score_std=float(scores.std()),
    )
