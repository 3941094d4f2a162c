from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.trainer.algorithms.advantages import mean, moments, variance, whiten

if TYPE_CHECKING:
    from conftest import RaggedBatch


def test_whitened_values_have_mean_zero_and_deviation_one(ragged_batch: RaggedBatch) -> None:
    values = torch.where(ragged_batch.mask, ragged_batch.ref_logprobs, torch.nan)
    whitened_values = whiten(values, ragged_batch.mask, moments(values, ragged_batch.mask))
    masked_values = values[ragged_batch.mask]
    expected = (masked_values - masked_values.mean()) / (masked_values.std() + 1e-8)
    torch.testing.assert_close(whitened_values[ragged_batch.mask], expected)
    assert (whitened_values[~ragged_batch.mask] == 0).all()


def test_moments_of_parts_sum_to_the_total_moments(ragged_batch: RaggedBatch) -> None:
    values, mask = ragged_batch.logprobs, ragged_batch.mask
    total = moments(values, mask)
    parts = [moments(values[rows], mask[rows]) for rows in ([0, 3], [2], [1])]
    torch.testing.assert_close(sum(parts), total)
    actual = torch.cat([whiten(values[r : r + 1], mask[r : r + 1], total) for r in range(4)])
    torch.testing.assert_close(actual, whiten(values, mask, total))


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), st.floats(-1e4, 1e4))
def test_mean_and_variance_equal_torch_results(values: list[float], shift: float) -> None:
    x = torch.tensor([values], dtype=torch.float64) + shift
    total = moments(x, torch.ones_like(x).bool())
    torch.testing.assert_close(mean(total), x.mean())
    torch.testing.assert_close(variance(total), x.var(), atol=1e-4, rtol=1e-6)


def test_values_without_variance_are_whitened_to_zero() -> None:
    equal_values, mask = torch.full((2, 3), 0.1), torch.ones(2, 3).bool()
    assert not whiten(equal_values.double(), mask, moments(equal_values.double(), mask)).any()
    empty_mask = torch.zeros(2, 3).bool()
    assert not whiten(equal_values, empty_mask, moments(equal_values, empty_mask)).any()
    single_mask = torch.tensor([[True, False, False]])
    assert not whiten(equal_values[:1], single_mask, moments(equal_values[:1], single_mask)).any()


def test_whitening_preserves_the_dtype() -> None:
    values, mask = torch.randn(2, 3), torch.ones(2, 3).bool()
    assert whiten(values, mask, moments(values, mask)).dtype == torch.float32
