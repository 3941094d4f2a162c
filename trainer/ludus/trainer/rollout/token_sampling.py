"""Draws the next token of each sequence of a batch, by the inverse of its distribution.

    logits --temperature--> log-probs --top_p--> cut-off log-probs --uniform number--> token

One random number decides a row, so a row's token does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ludus.trainer.types import Sampling


def sample_tokens(
    logits: torch.Tensor, samplings: Sequence[Sampling], uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] token ids and [N] their log-probs under the distribution that was drawn from.

    Args:
        logits: [N, V] float32.
        samplings: [N]
        uniforms: [N] float32 in [0, 1).
    """
    temperature = torch.tensor([s.temperature for s in samplings], device=logits.device)[:, None]
    is_greedy = temperature[:, 0] == 0
    logprobs = torch.log_softmax(logits / torch.where(temperature == 0, 1.0, temperature), dim=-1)
    if any(s.top_p < 1 and s.temperature > 0 for s in samplings):
        # Greedy rows take the likeliest token, and report it as it is without a cut.
        top_p = [s.top_p if s.temperature > 0 else 1.0 for s in samplings]
        logprobs = _cut_off(logprobs, torch.tensor(top_p, device=logits.device)[:, None])
    token_ids = _draw(logprobs.exp(), uniforms)
    if bool(is_greedy.any()):
        token_ids = torch.where(is_greedy, logprobs.argmax(dim=-1), token_ids)
    return token_ids, logprobs.gather(1, token_ids[:, None])[:, 0]


def _draw(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[N] the first token at which the cumulated probability is above the random number."""
    cumulated = probabilities.cumsum(dim=-1)
    total = cumulated[:, -1]
    # Strictly below the total, or a rounded product could lie past the last possible token.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms * total, below)
    return torch.searchsorted(cumulated, target[:, None], right=True)[:, 0]


def _cut_off(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[N, V] log-probs among the likeliest tokens that hold `top_p` [N, 1]; -inf elsewhere."""
    ordered, token_ids = logprobs.exp().sort(dim=-1, descending=True)
    # A token stays while those before it hold less: the likeliest always does.
    before = ordered.cumsum(dim=-1) - ordered
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter(1, token_ids, before >= top_p)
    return torch.log_softmax(logprobs.masked_fill(dropped, -torch.inf), dim=-1)
