"""Tests of token sampling from logits and uniform random numbers."""

from __future__ import annotations

import random

import pytest
import torch

from ludus.trainer.core.answer_trie import AnswerTrie
from ludus.trainer.core.types import Sampling
from ludus.trainer.rollout.engines.restriction import restrict_logits
from ludus.trainer.rollout.engines.token_sampling import sample_tokens

LOGITS = torch.tensor([0.5, 0.3, 0.2, 1e-30]).log()


@pytest.mark.parametrize(
    ("uniform", "expected_token_id"),
    [(0.0, 0), (0.499, 0), (0.501, 1), (0.799, 1), (0.801, 2), (1 - 2**-24, 2)],
)
def test_uniform_number_selects_the_token_by_cumulative_probability(
    uniform: float, expected_token_id: int
) -> None:
    token_ids, logprobs = sample_tokens(LOGITS[None], [Sampling(1.0, 1)], torch.tensor([uniform]))
    assert token_ids.tolist() == [expected_token_id]
    assert logprobs[0].item() == pytest.approx(LOGITS[expected_token_id].item(), abs=1e-6)


@pytest.mark.parametrize("top_p", [0.1, 0.49, 0.51, 0.79, 0.95])
def test_only_tokens_within_top_p_are_sampled(top_p: float) -> None:
    num_kept = {0.1: 1, 0.49: 1, 0.51: 2, 0.79: 2, 0.95: 3}[top_p]
    uniforms = torch.linspace(0, 1 - 2**-24, 200)
    samplings = [Sampling(1.0, 1, top_p)] * 200
    token_ids, logprobs = sample_tokens(LOGITS.expand(200, 4), samplings, uniforms)
    assert set(token_ids.tolist()) == set(range(num_kept))
    probabilities = LOGITS.exp()[:num_kept] / LOGITS.exp()[:num_kept].sum()
    assert torch.allclose(logprobs.exp(), probabilities[token_ids], atol=1e-6)


def test_temperature_and_top_p_apply_per_row() -> None:
    samplings = [Sampling(0.0, 1), Sampling(0.0, 1, 0.2), Sampling(1.0, 1, 0.4), Sampling(2.0, 1)]
    token_ids, logprobs = sample_tokens(LOGITS.expand(4, 4), samplings, torch.full((4,), 0.7))
    assert token_ids.tolist() == [0, 0, 0, 1]
    weights = torch.tensor([0.5, 0.3, 0.2, 1e-30]).sqrt()
    expected_probabilities = [0.5, 0.5, 1.0, (weights / weights.sum())[1].item()]
    assert logprobs.exp().tolist() == pytest.approx(expected_probabilities, abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "kept_token_ids"),
    [
        (Sampling(1.0, 1, top_k=2), [0, 1]),
        (Sampling(1.0, 1, min_p=0.5), [0, 1]),
        (Sampling(1.0, 1, min_p=0.7), [0]),
        (Sampling(1.0, 1, top_p=0.7, top_k=2), [0, 1]),
        (Sampling(1.0, 1, top_p=0.6, top_k=2), [0]),
    ],
)
def test_top_k_min_p_and_top_p_apply_in_sequence(
    sampling: Sampling, kept_token_ids: list[int]
) -> None:
    uniforms = torch.linspace(0, 1 - 2**-24, 100)
    token_ids, logprobs = sample_tokens(LOGITS.expand(100, 4), [sampling] * 100, uniforms)
    assert sorted(set(token_ids.tolist())) == kept_token_ids
    probabilities = LOGITS.exp()[kept_token_ids] / LOGITS.exp()[kept_token_ids].sum()
    assert torch.allclose(logprobs.exp(), probabilities[token_ids], atol=1e-6)


def test_repetition_penalty_changes_logits_of_repeated_tokens() -> None:
    logits = torch.tensor([[1.0, -1.0, 0.5, 0.0]])
    expected_logprobs = torch.tensor([0.5, -2.0, 0.5, 0.0]).log_softmax(0)
    for uniform in (0.1, 0.5, 0.7, 0.9):
        token_ids, logprobs = sample_tokens(
            logits,
            [Sampling(1.0, 1, repetition_penalty=2.0)],
            torch.tensor([uniform]),
            [[0, 1, 0]],
        )
        assert logprobs[0].item() == pytest.approx(expected_logprobs[token_ids[0]].item(), abs=1e-6)
    greedy_ids, _ = sample_tokens(
        logits, [Sampling(0.0, 1, repetition_penalty=4.0)], torch.zeros(1), [[0]]
    )
    assert greedy_ids.tolist() == [2], "greedy sampling ignored the repetition penalty"


@pytest.mark.slow
def test_tokens_with_zero_probability_are_never_sampled() -> None:
    logits = torch.randn(64, 150_000, generator=torch.Generator().manual_seed(0))
    logits[:, -1000:] = -torch.inf
    uniforms = torch.full((64,), 1 - 2**-24)
    token_ids, logprobs = sample_tokens(logits, [Sampling(1.0, 1)] * 64, uniforms)
    assert int(token_ids.max()) < 149_000
    assert bool(torch.isfinite(logprobs).all())


def test_restricted_log_probs_equal_float64_to_six_digits() -> None:
    logits = torch.randn(300, 500, generator=torch.Generator().manual_seed(0))
    plain_logits, samplings = logits.double(), [Sampling(0.7, 6)] * 300
    generator = random.Random(0)
    allowed_ids = [sorted(generator.sample(range(500), 1 + row % 40)) for row in range(300)]
    restrictions = {
        row: (AnswerTrie([(token_id,) for token_id in allowed_ids[row]]), [])
        for row in range(0, 300, 2)
    }
    token_ids, logprobs = sample_tokens(
        restrict_logits(logits, restrictions), samplings, torch.rand(300)
    )
    for row, (token_id, logprob) in enumerate(zip(token_ids.tolist(), logprobs, strict=True)):
        choices = allowed_ids[row] if row in restrictions else list(range(500))
        expected = (plain_logits[row, choices] / 0.7).log_softmax(-1)[choices.index(token_id)]
        assert logprob.item() == pytest.approx(expected.item(), abs=1e-6)
