"""Log-probs and entropies from a model's logits.

Shapes: ... = any leading axes, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log softmax(logits / temperature) [...] at `targets` [...], for `logits` [..., V].

    The result is the target's logit minus logsumexp, in float32 or better. No [..., V] tensor of
    log-probs is kept.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return target_logits - logits.logsumexp(-1)


def entropy(logprobs: Tensor) -> Tensor:
    """Return -sum(p * log p) [...] in nats, for the log p [..., V] of a whole distribution.

    A token that cannot be sampled has log p = -inf and adds nothing.
    """
    finite = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
    return -(logprobs.exp() * finite).sum(-1)
