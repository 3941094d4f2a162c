from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.proto.config import IcePop, SequenceMask, SequenceTis, TokenTis
from ludus.trainer.algorithms.losses import correction_weight, geometric_mask

if TYPE_CHECKING:
    from conftest import RaggedBatch


def test_importance_weights_have_no_gradient(ragged_batch: RaggedBatch) -> None:
    old_logprobs = ragged_batch.old_logprobs.clone().requires_grad_()
    rollout_logprobs = ragged_batch.rollout_logprobs.clone().requires_grad_()
    weights = [
        correction_weight(old_logprobs, rollout_logprobs, ragged_batch.mask, correction)
        for correction in (TokenTis(), SequenceTis(), SequenceMask(), IcePop())
    ]
    weights.append(geometric_mask(old_logprobs, rollout_logprobs, ragged_batch.mask, 0.5, 2.0))
    assert not any(weight.requires_grad for weight in weights)


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=6), st.floats(0.5, 5))
def test_truncated_weights_are_finite_and_at_most_the_cap(shifts: list[float], cap: float) -> None:
    old_logprobs, rollout_logprobs = torch.tensor([shifts]), torch.zeros(1, len(shifts))
    mask = torch.ones(1, len(shifts)).bool()
    for kind in (TokenTis, SequenceTis):
        weight = correction_weight(
            old_logprobs, rollout_logprobs, mask, kind.model_construct(cap=cap)
        )
        assert (weight >= 0).all() and (weight <= torch.tensor(cap)).all()


def test_weights_are_one_if_rollout_and_learner_logprobs_are_equal(
    ragged_batch: RaggedBatch,
) -> None:
    logprobs = ragged_batch.old_logprobs
    ones = torch.ones(4, 1, dtype=torch.float64)
    mask = ragged_batch.mask
    assert (correction_weight(logprobs, logprobs, mask, TokenTis(cap=2))[mask] == 1).all()
    assert correction_weight(logprobs, logprobs, mask, SequenceTis(cap=2)).equal(ones)
    assert correction_weight(logprobs, logprobs, mask, SequenceMask(cap=2)).equal(ones)
    assert geometric_mask(logprobs, logprobs, ragged_batch.mask, 0.99, 1.01).all()


def test_sequence_mask_depends_on_length_but_geometric_mask_does_not() -> None:
    per_token_difference = 0.012
    for num_tokens, is_kept in ((10, True), (100, False)):
        old_logprobs = torch.full((1, num_tokens), per_token_difference)
        zeros, mask = torch.zeros(1, num_tokens), torch.ones(1, num_tokens).bool()
        assert bool(correction_weight(old_logprobs, zeros, mask, SequenceMask(cap=3))) is is_kept
        assert bool(geometric_mask(old_logprobs, zeros, mask, 0.5, 2.0))


def test_geometric_mask_drops_rows_below_and_above_the_range() -> None:
    log_ratio = torch.tensor([0.4, 0.6, 1.0, 1.9, 2.1]).log()[:, None].expand(5, 3)
    row_mask = geometric_mask(log_ratio, torch.zeros(5, 3), torch.ones(5, 3).bool(), 0.5, 2.0)
    assert row_mask.tolist() == [False, True, True, True, False]


def test_icepop_zeroes_only_tokens_outside_the_range() -> None:
    ratio = torch.tensor([[0.4, 0.6, 1.0, 4.9, 5.1]])
    mask = torch.ones(1, 5).bool()
    weight = correction_weight(ratio.log(), torch.zeros(1, 5), mask, IcePop(low=0.5, high=5))
    torch.testing.assert_close(weight, torch.tensor([[0.0, 0.6, 1.0, 4.9, 0.0]]))
