from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.trainer.algorithms.ratios import (
    geometric_mask,
    icepop,
    sequence_mask,
    sequence_tis,
    token_tis,
)

if TYPE_CHECKING:
    from conftest import RaggedBatch


def test_no_weight_carries_a_gradient(ragged_batch: RaggedBatch) -> None:
    old = ragged_batch.old_logprobs.clone().requires_grad_()
    rollout = ragged_batch.rollout_logprobs.clone().requires_grad_()
    weights = [
        token_tis(old, rollout, 2.0),
        sequence_tis(old, rollout, ragged_batch.mask, 2.0),
        sequence_mask(old, rollout, ragged_batch.mask, 2.0),
        geometric_mask(old, rollout, ragged_batch.mask, 0.5, 2.0),
        icepop(old, rollout, 0.5, 5.0),
    ]
    assert not any(weight.requires_grad for weight in weights)


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=6), st.floats(0.5, 5))
def test_truncated_weights_are_finite_and_at_most_the_cap(diffs: list[float], cap: float) -> None:
    old, rollout = torch.tensor([diffs]), torch.zeros(1, len(diffs))
    mask = torch.ones(1, len(diffs)).bool()
    for weight in (token_tis(old, rollout, cap), sequence_tis(old, rollout, mask, cap)):
        assert (weight >= 0).all() and (weight <= torch.tensor(cap)).all()


def test_weights_are_one_where_sampler_and_learner_agree(ragged_batch: RaggedBatch) -> None:
    same = ragged_batch.old_logprobs
    ones = torch.ones(4, dtype=torch.float64)
    assert (token_tis(same, same, 2.0)[ragged_batch.mask] == 1).all()
    assert sequence_tis(same, same, ragged_batch.mask, 2.0).equal(ones)
    assert sequence_mask(same, same, ragged_batch.mask, 2.0).equal(ones)
    assert geometric_mask(same, same, ragged_batch.mask, 0.99, 1.01).all()


def test_the_geometric_mask_does_not_depend_on_length_and_the_sequence_mask_does() -> None:
    per_token_difference = 0.012
    for num_tokens, kept in ((10, True), (100, False)):
        old = torch.full((1, num_tokens), per_token_difference)
        rollout, mask = torch.zeros(1, num_tokens), torch.ones(1, num_tokens).bool()
        assert bool(sequence_mask(old, rollout, mask, cap=3.0)) is kept
        assert bool(geometric_mask(old, rollout, mask, 0.5, 2.0))


def test_the_geometric_mask_drops_rows_on_both_sides() -> None:
    log_ratio = torch.tensor([0.4, 0.6, 1.0, 1.9, 2.1]).log()[:, None].expand(5, 3)
    kept = geometric_mask(log_ratio, torch.zeros(5, 3), torch.ones(5, 3).bool(), 0.5, 2.0)
    assert kept.tolist() == [False, True, True, True, False]


def test_icepop_zeroes_single_tokens_outside_the_range() -> None:
    ratio = torch.tensor([[0.4, 0.6, 1.0, 4.9, 5.1]])
    weight = icepop(ratio.log(), torch.zeros(1, 5), 0.5, 5.0)
    torch.testing.assert_close(weight, torch.tensor([[0.0, 0.6, 1.0, 4.9, 0.0]]))
