"""Draws the next token of each sequence of a batch, by the inverse of its distribution.

    logits --repetition penalty--> --temperature--> log-probs --min_p, top_k, top_p-->
        cut-off log-probs --uniform number--> token

One random number decides a row, so a row's token does not depend on the rows beside it. The order
of the cuts is vLLM's: each sees what the one before it has left, as a distribution of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ludus.trainer.core.types import Sampling


def sample_tokens(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    uniforms: torch.Tensor,
    seen: Sequence[Sequence[int]] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] token ids and [N] their log-probs under the distribution that was drawn from.

    Args:
        logits: [N, V] float32.
        samplings: [N]
        uniforms: [N] float32 in [0, 1).
        seen: [N] the tokens before, prompt included; needed for repetition penalties alone.
    """
    logits = _penalised(logits, samplings, seen)
    temperature = torch.tensor([s.temperature for s in samplings], device=logits.device)[:, None]
    is_greedy = temperature[:, 0] == 0
    logprobs = torch.log_softmax(logits / torch.where(temperature == 0, 1.0, temperature), dim=-1)
    # Greedy rows take the likeliest token, and report it as it is without a cut.
    cut = [row for row, one in enumerate(samplings) if one.excludes_tokens and one.temperature > 0]
    if cut:
        logprobs[cut] = _cut_off(logprobs[cut], [samplings[row] for row in cut])
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


def _penalised(
    logits: torch.Tensor, samplings: Sequence[Sampling], seen: Sequence[Sequence[int]]
) -> torch.Tensor:
    """[N, V] the logits, those of tokens that were seen moved away (arXiv 1909.05858, 4.1)."""
    rows = [row for row, one in enumerate(samplings) if one.repetition_penalty != 1]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        ids = torch.tensor(sorted(set(seen[row])), dtype=torch.int64, device=logits.device)
        penalty, before = samplings[row].repetition_penalty, logits[row, ids]
        logits[row, ids] = torch.where(before > 0, before / penalty, before * penalty)
    return logits


def _cut_off(logprobs: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """[N, V] log-probs among the tokens that each row's cuts leave; -inf elsewhere."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=logprobs.device)[:, None]

    ordered, token_ids = logprobs.exp().sort(dim=-1, descending=True)
    kept = ordered >= column([s.min_p for s in samplings]) * ordered[:, :1]
    place = torch.arange(ordered.shape[1], device=logprobs.device)[None]
    kept &= place < column([s.top_k or ordered.shape[1] for s in samplings])
    held = torch.where(kept, ordered, 0.0)
    held /= held.sum(dim=-1, keepdim=True)
    # A token stays while those before it hold less: the likeliest always does.
    kept &= held.cumsum(dim=-1) - held < column([s.top_p for s in samplings])
    dropped = torch.zeros_like(kept).scatter(1, token_ids, ~kept)
    return torch.log_softmax(logprobs.masked_fill(dropped, -torch.inf), dim=-1)
