"""The loss that one micro-batch adds to an optimizer step of a critic.

Shapes: N = sequences, T = token positions. Masks are bool [N, T], True = sampled by the policy.
What stands outside the mask is never read: it may be nan, and its gradient is exactly zero.
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
    """This part's share, a scalar, of the step's mean squared error (arXiv 1707.06347).

        0.5 * max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2)

    The clip holds a prediction that went further than `clip` from `old_values`, those when the
    optimizer step began (https://github.com/openai/baselines, `ppo2`); None does not clip.
    All are [N, T]. `denominator` is the sampled tokens of the whole optimizer step, whatever
    the aggregation of the policy loss.
    """
    inside = torch.where(mask, values, 0.0)
    target = torch.where(mask, returns, 0.0).detach()
    old = torch.where(mask, old_values, 0.0).detach() if clip is not None else inside
    error = squared_error(inside, old, target, clip)
    return aggregate(0.5 * error, mask, "token_mean", denominator)


def squared_error(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> Tensor:
    """max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2), of any shape."""
    error = (values - returns).square()
    if clip is None:
        return error
    held = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(error, (held - returns).square())
