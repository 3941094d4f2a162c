"""The check of a pickle accepts honest values and refuses those that take forever."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.trainer.core.pickle_limits import check_pickle

DEPTH = 64
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.text() | st.tuples(st.text(), st.integers())
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(KEYS, inner)
        | st.tuples(inner, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
)


class Pair:
    """An object that refers to two others."""

    def __init__(self, first: object, second: object) -> None:
        self.first, self.second = first, second


def make_tuples() -> object:
    value: object = 0
    for _ in range(DEPTH):
        value = (value, value)
    return value


def make_objects() -> object:
    value: object = 0
    for _ in range(DEPTH):
        value = Pair(value, value)
    return value


def make_late_objects() -> object:
    """Objects whose parts are added only after other objects refer to them."""
    pairs = [Pair(0, 0) for _ in range(DEPTH)]
    for pair, next_pair in pairwise(pairs):
        pair.first = pair.second = next_pair
    return (pairs, pairs[0])


@given(value=VALUES, protocol=st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_honest_values_are_accepted(value: object, protocol: int) -> None:
    check_pickle(pickle.dumps(value, protocol))


def test_values_with_many_repeated_parts_are_accepted() -> None:
    shape = (4096, 4096)
    check_pickle(pickle.dumps({f"layer.{number}": [shape, shape] for number in range(1000)}))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("make", [make_tuples, make_objects, make_late_objects])
def test_values_that_take_forever_are_refused(make: Any, protocol: int) -> None:
    with pytest.raises(ValueError, match="refer"):
        check_pickle(pickle.dumps(make(), protocol))


@pytest.mark.parametrize("content", [b"", b".", b"t.", b"(", b"h\x05.", b"\x80\x02}u.", b"text"])
def test_damaged_pickles_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"damaged|pickle"):
        check_pickle(content)
