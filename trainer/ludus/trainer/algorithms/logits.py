"""What the losses need from a model's logits.

Shapes: ... = any leading axes, V = vocabulary. Computed in float32 or better.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) [...] at `targets` [...], for `logits` [..., V].

    The chosen logit minus logsumexp: no [..., V] tensor of log-probabilities is kept.
    """
    logits = _at_least_float32(logits)
    if temperature != 1.0:
        logits = logits / temperature
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(-1)


def entropy(logits: Tensor) -> Tensor:
    """-sum(p * log p) [...] in nats of p = softmax(logits), for `logits` [..., V].

    A logit of -inf is a token that cannot be sampled: it adds nothing.
    """
    logprobs = _at_least_float32(logits).log_softmax(-1)
    finite_logprobs = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
    return -(logprobs.exp() * finite_logprobs).sum(-1)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
