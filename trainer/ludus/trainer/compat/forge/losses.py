"""The tutorial's loss on logits, for `RLTrainer(loss=...)`, and its log-probs.

Shapes: B = samples, S = request and response, R = response, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.trainer.algorithms.logits import token_logprobs
from ludus.trainer.algorithms.losses import kl


def compute_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probs [B, R] of the last R tokens, `token_ids` [B, R].

    Args:
        logits: [B, S, V], for the whole sequences.
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

    r = exp(lp - sg[lp]) equals 1 and has the gradient of lp. There is no clipping and no correction
    for samples of older weights (arXiv 2402.03300, with one update per batch).
    """
    logprobs = compute_logprobs(logits, response)
    gain = (logprobs - logprobs.detach()).exp() * advantages
    per_token = beta * kl(logprobs, ref_logprobs, "k3") - gain
    per_sample = torch.where(padding_mask, per_token, 0.0).sum(1) / padding_mask.sum(1).clamp(min=1)
    return per_sample.mean()
