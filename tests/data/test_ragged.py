"""A RaggedArray behaves like a list of arrays and is pickled as two buffers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from ludus.trainer.core.ragged import RaggedArray

ROWS = [[1, 2, 3], [], [4]]


def test_ragged_array_behaves_like_a_list_of_rows() -> None:
    ragged_array = RaggedArray.from_rows(ROWS, np.int64)
    assert [row.tolist() for row in ragged_array] == ROWS
    assert ragged_array[-1].tolist() == [4]
    assert ragged_array.lengths.tolist() == [3, 0, 1]
    assert ragged_array.values.dtype == np.int64
    for index in (3, -4):
        with pytest.raises(IndexError):
            ragged_array[index]


def test_rows_can_be_concatenated_in_any_order_with_repeats() -> None:
    ragged_array = RaggedArray.from_rows(ROWS, np.float32)
    assert ragged_array.concatenate_rows([2, 0, 2]).tolist() == [4, 1, 2, 3, 4]
    assert ragged_array.concatenate_rows([]).dtype == np.float32


def test_ragged_array_may_be_empty() -> None:
    empty_array = RaggedArray.from_rows([], np.bool_)
    assert len(empty_array) == 0
    assert list(empty_array) == []
    assert empty_array.lengths.tolist() == []


def test_thousand_rows_are_pickled_as_two_buffers() -> None:
    buffers: list[pickle.PickleBuffer] = []
    ragged_array = RaggedArray.from_rows([[1]] * 1000, np.int64)
    payload = pickle.dumps(ragged_array, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 2
    received_array = pickle.loads(payload, buffers=buffers)
    assert [row.tolist() for row in received_array] == [[1]] * 1000
