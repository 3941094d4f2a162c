"""Mean and variance over an optimizer step, independent of how its rows are split.

Each micro-batch computes its moments. Moments add up over micro-batches and ranks, and then
every micro-batch is whitened with the total:

    micro-batches -- moments --> [3] -- sum, all_reduce --> [3] -- whiten --> micro-batches

Shapes: N = sequences, T = token positions. Masks are bool [N, T]. Values outside the mask are not
used and may be NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STD_EPS = 1e-8


@torch.no_grad()
def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return count, sum, and sum of squares [3] of the `values` [N, T] in `mask`, in float64."""
    inside = torch.where(mask, values, 0.0).double()
    return torch.stack([mask.sum().double(), inside.sum(), inside.square().sum()])


def mean(total: Tensor) -> Tensor:
    """Return the mean, from the summed `moments` [3]."""
    return total[1] / total[0].clamp(min=1)


def variance(total: Tensor) -> Tensor:
    """Return the variance with n - 1, from the summed `moments` [3]; 0 if fewer than two values.

    A critic explains 1 - variance(returns - values) / variance(returns).
    """
    squares = total[2] - total[0] * mean(total).square()
    return squares.clamp(min=0) / (total[0] - 1).clamp(min=1)


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, total: Tensor) -> Tensor:
    """Return (x - mean) / (std + 1e-8) [N, T] by the summed `moments` [3], zero outside `mask`.

    Used for the advantages of PPO (https://github.com/vwxyzjn/cleanrl, `ppo.py`) and REINFORCE++
    (arXiv 2501.03262).
    """
    std = variance(total).sqrt() + _STD_EPS
    return torch.where(mask, (values - mean(total)) / std, 0.0)
