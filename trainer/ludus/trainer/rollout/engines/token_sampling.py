"""Sampling of tokens from logits, by inverse transform sampling.

    logits --legal answers--> --repetition penalty--> --temperature--> probabilities
        --min_p, top_k, top_p--> cut-off probabilities --uniform number--> token

As in vLLM, each cut applies to the renormalized distribution that remains after the previous cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ludus.trainer.core.types import Sampling


def sample_tokens(
    logits: Tensor,
    samplings: Sequence[Sampling],
    uniforms: Tensor,
    contexts: Sequence[Sequence[int]] = (),
) -> tuple[Tensor, Tensor]:
    """Return [N] token ids and [N] log-probs under the distribution they were drawn from.

    Args:
        logits: [N, V] float32.
        samplings: [N]
        uniforms: [N] float32 in [0, 1).
        contexts: [N] tokens of the prompt and the completion so far, for repetition penalties.
    """
    logits = _penalize_repetition(logits, samplings, contexts)
    temperatures = [sampling.temperature for sampling in samplings]
    if any(temperature not in (0, 1) for temperature in temperatures):
        divisors = [temperature or 1.0 for temperature in temperatures]
        logits = logits / logits.new_tensor(divisors)[:, None]
    probabilities = torch.softmax(logits, dim=-1)
    # Greedy rows use the most likely token, with its log-prob in the uncut distribution.
    cut_rows = [
        row
        for row, sampling in enumerate(samplings)
        if sampling.excludes_tokens and sampling.temperature > 0
    ]
    if cut_rows:
        cut_samplings = [samplings[row] for row in cut_rows]
        probabilities[cut_rows] = _cut_tokens(probabilities[cut_rows], cut_samplings)
    token_ids = _draw_tokens(probabilities, uniforms)
    greedy_rows = [row for row, temperature in enumerate(temperatures) if temperature == 0]
    if greedy_rows:
        token_ids[greedy_rows] = probabilities[greedy_rows].argmax(dim=-1)
    return token_ids, probabilities.gather(1, token_ids[:, None])[:, 0].log()


def _draw_tokens(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return [N] the first token whose cumulative probability exceeds the random number."""
    cumulative_probabilities = probabilities.cumsum(dim=-1)
    total_probability = cumulative_probabilities[:, -1]
    # The target must be below the total. Otherwise rounding could select an impossible token.
    max_target = torch.nextafter(total_probability, torch.zeros_like(total_probability))
    targets = torch.minimum(uniforms * total_probability, max_target)
    return torch.searchsorted(cumulative_probabilities, targets[:, None], right=True)[:, 0]


def _penalize_repetition(
    logits: Tensor, samplings: Sequence[Sampling], contexts: Sequence[Sequence[int]]
) -> Tensor:
    """Return [N, V] logits with penalties for repeated tokens (arXiv 1909.05858, section 4.1)."""
    rows = [row for row, sampling in enumerate(samplings) if sampling.repetition_penalty != 1]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        tokens = torch.tensor(sorted(set(contexts[row])), dtype=torch.int64, device=logits.device)
        penalty, repeated_logits = samplings[row].repetition_penalty, logits[row, tokens]
        logits[row, tokens] = torch.where(
            repeated_logits > 0, repeated_logits / penalty, repeated_logits * penalty
        )
    return logits


def _cut_tokens(probabilities: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return [N, V] probabilities after each row's cuts; 0 for tokens that were cut off."""

    def make_column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=probabilities.device)[:, None]

    vocabulary_size = probabilities.shape[1]
    min_p = make_column([sampling.min_p for sampling in samplings])
    top_k = make_column([sampling.top_k or vocabulary_size for sampling in samplings])
    top_p = make_column([sampling.top_p for sampling in samplings])
    sorted_probabilities, token_ids = probabilities.sort(dim=-1, descending=True)
    is_kept = sorted_probabilities >= min_p * sorted_probabilities[:, :1]
    is_kept &= torch.arange(vocabulary_size, device=probabilities.device) < top_k
    kept_probabilities = torch.where(is_kept, sorted_probabilities, 0.0)
    kept_probabilities /= kept_probabilities.sum(dim=-1, keepdim=True)
    # A token is kept if the probabilities of the more likely tokens sum to less than top_p.
    is_kept &= kept_probabilities.cumsum(dim=-1) - kept_probabilities < top_p
    kept_probabilities = torch.where(is_kept, kept_probabilities, 0.0)
    kept_probabilities /= kept_probabilities.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(1, token_ids, kept_probabilities)
