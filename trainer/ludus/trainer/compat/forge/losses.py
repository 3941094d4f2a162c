"""The tutorial's loss of logits, for `RLTrainer(loss=...)`, and the log-probs in it.

Shapes: B = samples, S = request and response, R = response, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.trainer.algorithms.logits import token_logprobs
from ludus.trainer.algorithms.policy_loss import kl


def compute_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs [B, R] of `token_ids` [B, R], the end of what `logits` [B, S, V] are of."""
    num_tokens = token_ids.shape[1]
    before = logits[:, -num_tokens - 1 : -1].float()
    return token_logprobs(before if temperature == 1 else before / temperature, token_ids)


def simple_grpo_loss(
    logits: Tensor,
    response: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    padding_mask: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """The mean over samples of the mean over their tokens of beta * k3 - r * A.

    r = exp(lp - sg[lp]) is 1 and has the gradient of lp: nothing is clipped, and nothing corrects
    for samples of older weights (arXiv 2402.03300, with one update per batch).
    """
    logprobs = compute_logprobs(logits, response)
    gain = (logprobs - logprobs.detach()).exp() * advantages
    per_token = beta * kl(logprobs, ref_logprobs, "k3") - gain
    per_sample = torch.where(padding_mask, per_token, 0.0).sum(1) / padding_mask.sum(1).clamp(min=1)
    return per_sample.mean()
