"""Mean and variance over an optimizer step, the same however its rows are spread.

Each part (a micro-batch, a rank) counts what it holds; the counts add up, and every part then
whitens by the whole:

    parts of a rank -- moments --> [3] -- sum --> [3] -- all_reduce --> [3] -- whiten --> parts

Shapes: N = sequences, T = token positions. Masks are bool [N, T]; what stands outside one is
never read and may be nan.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STD_EPS = 1e-8


@torch.no_grad()
def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Count, sum, and sum of squares [3] of the `values` [N, T] in `mask`, in float64.

    They add up over parts, and sharing them costs one all_reduce of three numbers.
    """
    inside = torch.where(mask, values, 0.0).double()
    return torch.stack([mask.sum().double(), inside.sum(), inside.square().sum()])


def mean(total: Tensor) -> Tensor:
    """The mean, from the summed `moments` [3]."""
    return total[1] / total[0].clamp(min=1)


def variance(total: Tensor) -> Tensor:
    """The variance with n - 1, from the summed `moments` [3]; 0 for fewer than two values.

    A critic explains 1 - variance(returns - values) / variance(returns).
    """
    squares = total[2] - total[0] * mean(total).square()
    return squares.clamp(min=0) / (total[0] - 1).clamp(min=1)


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, total: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-8) [N, T] by the summed `moments` [3], zero outside `mask`.

    Advantages in PPO (https://github.com/vwxyzjn/cleanrl, `ppo.py`) and REINFORCE++
    (arXiv 2501.03262).
    """
    std = variance(total).sqrt() + _STD_EPS
    return torch.where(mask, (values - mean(total)) / std, 0.0)
