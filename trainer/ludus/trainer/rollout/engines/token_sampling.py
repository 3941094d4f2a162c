"""Sampling of the next token of each sequence in a batch, by inverse transform sampling.

    logits --repetition penalty--> --temperature--> log-probs --min_p, top_k, top_p-->
        cut-off log-probs --uniform number--> token

One random number determines a row's token, so the token does not depend on the other rows. The
cuts have the same order as in vLLM: each one applies to the renormalized distribution that the
previous cut left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ludus.trainer.core.types import Sampling


def sample_tokens(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    uniforms: torch.Tensor,
    context: Sequence[Sequence[int]] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N] token ids and [N] log-probs under the distribution they were drawn from.

    Args:
        logits: [N, V] float32.
        samplings: [N]
        uniforms: [N] float32 in [0, 1).
        context: [N] previous tokens with the prompt; used for repetition penalties only.
    """
    logits = _penalize(logits, samplings, context)
    temperature = torch.tensor([s.temperature for s in samplings], device=logits.device)[:, None]
    is_greedy = temperature[:, 0] == 0
    logprobs = torch.log_softmax(logits / torch.where(temperature == 0, 1.0, temperature), dim=-1)
    # Greedy rows take the most likely token; their log-prob is that of the uncut distribution.
    cut_rows = [row for row, s in enumerate(samplings) if s.excludes_tokens and s.temperature > 0]
    if cut_rows:
        logprobs[cut_rows] = _cut_off(logprobs[cut_rows], [samplings[row] for row in cut_rows])
    token_ids = _draw(logprobs.exp(), uniforms)
    if bool(is_greedy.any()):
        token_ids = torch.where(is_greedy, logprobs.argmax(dim=-1), token_ids)
    return token_ids, logprobs.gather(1, token_ids[:, None])[:, 0]


def _draw(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return [N] the first token whose cumulative probability exceeds the random number."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1]
    # The target must be below the total, or rounding could select an impossible last token.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms * total, below)
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def _penalize(
    logits: torch.Tensor, samplings: Sequence[Sampling], context: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return [N, V] logits with penalties for repeated tokens (arXiv 1909.05858, section 4.1)."""
    rows = [row for row, s in enumerate(samplings) if s.repetition_penalty != 1]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        ids = torch.tensor(sorted(set(context[row])), dtype=torch.int64, device=logits.device)
        penalty, repeated = samplings[row].repetition_penalty, logits[row, ids]
        logits[row, ids] = torch.where(repeated > 0, repeated / penalty, repeated * penalty)
    return logits


def _cut_off(logprobs: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return [N, V] log-probs over the tokens that each row's cuts keep; -inf for the others."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=logprobs.device)[:, None]

    ordered, token_ids = logprobs.exp().sort(dim=-1, descending=True)
    is_kept = ordered >= column([s.min_p for s in samplings]) * ordered[:, :1]
    rank = torch.arange(ordered.shape[1], device=logprobs.device)[None]
    is_kept &= rank < column([s.top_k or ordered.shape[1] for s in samplings])
    shares = torch.where(is_kept, ordered, 0.0)
    shares /= shares.sum(dim=-1, keepdim=True)
    # A token is kept if the more likely tokens have less than top_p together.
    is_kept &= shares.cumsum(dim=-1) - shares < column([s.top_p for s in samplings])
    is_dropped = torch.zeros_like(is_kept).scatter(1, token_ids, ~is_kept)
    return torch.log_softmax(logprobs.masked_fill(is_dropped, -torch.inf), dim=-1)
