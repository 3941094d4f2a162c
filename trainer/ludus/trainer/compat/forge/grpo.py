"""The tutorial's advantages, its loss on logits for `RLTrainer(loss=...)`, and its log-probs.

Shapes: B = samples, S = request and response, R = response, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ludus.proto.errors import ConfigError
from ludus.trainer.algorithms.advantages import group_advantages
from ludus.trainer.algorithms.losses import kl, token_logprobs
from ludus.trainer.compat.forge.controller.actor import ForgeActor, endpoint


def compute_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probs [B, R] of the last R tokens, `token_ids` [B, R].

    Args:
        logits: [B, S, V], predictions for whole sequences.
    """
    num_tokens = token_ids.shape[1]
    predictions = logits[:, -num_tokens - 1 : -1].float()
    if temperature != 1:
        predictions = predictions / temperature
    return token_logprobs(predictions, token_ids)


def simple_grpo_loss(
    logits: Tensor,
    response: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    padding_mask: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """Return the mean over samples of the mean over their tokens of beta * k3 - r * A.

    r = exp(logprob - stop_gradient(logprob)) equals 1 and has the gradient of the log-prob. There
    is no clipping and no correction for samples of older weights (arXiv 2402.03300, with one update
    per batch).
    """
    logprobs = compute_logprobs(logits, response)
    policy_gain = (logprobs - logprobs.detach()).exp() * advantages
    token_losses = beta * kl(logprobs, ref_logprobs, "k3") - policy_gain
    num_tokens = padding_mask.sum(1).clamp(min=1)
    return (torch.where(padding_mask, token_losses, 0.0).sum(1) / num_tokens).mean()


@dataclass
class ComputeAdvantages(ForgeActor):
    """An actor that computes A_i = (r_i - mean) / (std + 1e-4), or 0 if all rewards are equal.

    The standard deviation has the divisor n - 1.

    A custom class with a `compute` method can replace it in a run; see
    `setup_forge_training(compute_advantages=...)`.
    """

    @endpoint
    def compute(self, group: Sequence[Any]) -> list[float]:
        """Return an advantage for each episode of the group, from its `reward`."""
        rewards: list[Any] = [getattr(episode, "reward", None) for episode in group]
        if not rewards or not all(map(_is_finite, rewards)):
            raise ConfigError(
                f"each episode of a group must have a finite reward, got {rewards!r:.100}"
            )
        reward_row = torch.tensor([[float(reward) for reward in rewards]], dtype=torch.float64)
        advantages: list[float] = group_advantages(reward_row, "mean", "group")[0].tolist()
        return advantages


def _is_finite(reward: Any) -> bool:
    try:
        return math.isfinite(reward)
    except TypeError:
        return False
