"""What is remembered of sessions that are gone is bounded, in bytes as well as in number."""

from __future__ import annotations

import numpy as np
import pytest

from ludus.env.encoding import EncodedResult
from ludus.env.sessions import tombstones as tombstones_module
from ludus.env.sessions.tombstones import Ended, SessionEnd, Tombstones
from ludus.proto.errors import SessionLostError

CLOSED = Ended(SessionEnd.CLOSED, "it was closed")


def answer_of(num_bytes: int) -> EncodedResult:
    tensors = {"picture": np.zeros(num_bytes, np.uint8)}
    return EncodedResult(3, b"{}", b"", b"", None, True, False, tensors, None)


def test_the_oldest_answers_are_dropped_where_all_take_too_much_and_reasons_stay(monkeypatch):
    monkeypatch.setattr(tombstones_module, "MAX_REMEMBERED_BYTES", 1000)
    tombstones = Tombstones()
    for name in ("a", "b", "c"):
        tombstones.remember(name, CLOSED, answer_of(300))
    for name in ("b", "c"):
        assert tombstones.recall(name, 3).step_index == 3
    with pytest.raises(SessionLostError, match="it was closed"):
        tombstones.recall("a", 3)
    assert tombstones.ended("a") is CLOSED


def test_what_is_forgotten_makes_room(monkeypatch):
    monkeypatch.setattr(tombstones_module, "MAX_REMEMBERED_BYTES", 1000)
    monkeypatch.setattr(tombstones_module, "MAX_REMEMBERED_SESSIONS", 2)
    tombstones = Tombstones()
    for number in range(10):
        tombstones.remember(str(number), CLOSED, answer_of(300))
        assert tombstones.recall(str(number), 3).step_index == 3
    assert tombstones.recall("8", 3).step_index == 3
    assert len(tombstones) == 2


def test_an_answer_that_is_too_large_alone_is_not_kept(monkeypatch):
    monkeypatch.setattr(tombstones_module, "MAX_REMEMBERED_BYTES", 1000)
    tombstones = Tombstones()
    tombstones.remember("a", CLOSED, answer_of(2000))
    with pytest.raises(SessionLostError, match="it was closed"):
        tombstones.recall("a", 3)
    tombstones.remember("b", CLOSED, answer_of(300))
    assert tombstones.recall("b", 3).step_index == 3
