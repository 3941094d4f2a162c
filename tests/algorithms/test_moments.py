from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.trainer.algorithms.moments import mean, moments, variance, whiten

if TYPE_CHECKING:
    from conftest import RaggedBatch


def test_whitened_values_have_mean_zero_and_deviation_one(ragged: RaggedBatch) -> None:
    values = torch.where(ragged.mask, ragged.ref_logprobs, torch.nan)
    white = whiten(values, ragged.mask, moments(values, ragged.mask))
    inside = values[ragged.mask]
    expected = (inside - inside.mean()) / (inside.std() + 1e-8)
    torch.testing.assert_close(white[ragged.mask], expected)
    assert (white[~ragged.mask] == 0).all()


def test_the_moments_of_parts_add_up_to_those_of_the_whole(ragged: RaggedBatch) -> None:
    values, mask = ragged.logprobs, ragged.mask
    whole = moments(values, mask)
    parts = [moments(values[rows], mask[rows]) for rows in ([0, 3], [2], [1])]
    torch.testing.assert_close(sum(parts), whole)
    by_part = torch.cat([whiten(values[r : r + 1], mask[r : r + 1], whole) for r in range(4)])
    torch.testing.assert_close(by_part, whiten(values, mask, whole))


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), st.floats(-1e4, 1e4))
def test_mean_and_variance_are_those_of_all_values(values: list[float], shift: float) -> None:
    x = torch.tensor([values], dtype=torch.float64) + shift
    total = moments(x, torch.ones_like(x).bool())
    torch.testing.assert_close(mean(total), x.mean())
    torch.testing.assert_close(variance(total), x.var(), atol=1e-4, rtol=1e-6)


def test_equal_values_and_none_at_all_are_whitened_to_zero() -> None:
    equal, mask = torch.full((2, 3), 0.1), torch.ones(2, 3).bool()
    assert not whiten(equal.double(), mask, moments(equal.double(), mask)).any()
    nobody = torch.zeros(2, 3).bool()
    assert not whiten(equal, nobody, moments(equal, nobody)).any()
    one = torch.tensor([[True, False, False]])
    assert not whiten(equal[:1], one, moments(equal[:1], one)).any()


def test_the_type_of_the_values_is_kept() -> None:
    values, mask = torch.randn(2, 3), torch.ones(2, 3).bool()
    assert whiten(values, mask, moments(values, mask)).dtype == torch.float32
