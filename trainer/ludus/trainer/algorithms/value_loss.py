"""The loss that one micro-batch adds to an optimizer step of a critic.

Shapes: N = sequences, T = token positions. Masks are bool [N, T], True = sampled by the policy.
Values outside the mask are not used: they may be NaN, and their gradient is exactly zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.trainer.algorithms.aggregation import aggregate


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None,
    denominator: float,
) -> Tensor:
    """Return these rows' share of the step's mean squared error, a scalar (arXiv 1707.06347).

        0.5 * max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2)

    Args:
        values: [N, T] predictions of the critic.
        old_values: [N, T] predictions when the optimizer step began.
        returns: [N, T] targets.
        mask: bool [N, T].
        clip: maximum change of a prediction that lowers the loss (https://github.com/openai/
            baselines, `ppo2`); None does not clip.
        denominator: sampled tokens of the whole optimizer step, whatever the aggregation of the
            policy loss.
    """
    inside = torch.where(mask, values, 0.0)
    target = torch.where(mask, returns, 0.0).detach()
    clip_center = torch.where(mask, old_values, 0.0).detach() if clip is not None else inside
    error = squared_error(inside, clip_center, target, clip)
    return aggregate(0.5 * error, mask, "token_mean", denominator)


def squared_error(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> Tensor:
    """Return max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2), for any shape."""
    error = (values - returns).square()
    if clip is None:
        return error
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(error, (clipped - returns).square())
