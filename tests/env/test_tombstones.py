"""Size and number limits for the records of ended sessions."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ludus.env.encoding import EncodedResult, encode_transition
from ludus.env.sessions import tombstones as tombstones_module
from ludus.env.sessions.tombstones import SessionEnd, SessionTombstone, Tombstones
from ludus.env.types import Observation, Transition
from ludus.proto.errors import SessionLostError

TOMBSTONE = SessionTombstone(SessionEnd.CLOSED, "it was closed")


def make_result(num_bytes: int) -> EncodedResult:
    tensors = {"picture": np.zeros(num_bytes, np.uint8)}
    return EncodedResult(3, b"{}", b"", b"", None, True, False, tensors, None)


def test_oldest_results_are_dropped_and_reasons_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones_module, "MAX_REMEMBERED_BYTES", 1000)
    tombstones = Tombstones()
    for session_id in ("a", "b", "c"):
        tombstones.remember(session_id, TOMBSTONE, make_result(300))
    for session_id in ("b", "c"):
        assert tombstones.recall(session_id, 3).step_index == 3
    with pytest.raises(SessionLostError, match="it was closed"):
        tombstones.recall("a", 3)
    assert tombstones.find("a") is TOMBSTONE


def test_forgotten_sessions_free_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones_module, "MAX_REMEMBERED_BYTES", 1000)
    monkeypatch.setattr(tombstones_module, "MAX_REMEMBERED_SESSIONS", 2)
    tombstones = Tombstones()
    for index in range(10):
        tombstones.remember(str(index), TOMBSTONE, make_result(300))
        assert tombstones.recall(str(index), 3).step_index == 3
    assert tombstones.recall("8", 3).step_index == 3
    assert len(tombstones) == 2


def test_too_large_result_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones_module, "MAX_REMEMBERED_BYTES", 1000)
    tombstones = Tombstones()
    tombstones.remember("a", TOMBSTONE, make_result(2000))
    with pytest.raises(SessionLostError, match="it was closed"):
        tombstones.recall("a", 3)
    tombstones.remember("b", TOMBSTONE, make_result(300))
    assert tombstones.recall("b", 3).step_index == 3


class _Renderer:
    def render(self, observation, *, first):
        return [{"role": "user", "content": "16 vs 10"}]

    def legal_answers(self, observation):
        return ["HIT", "STAND"]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="this test needs /proc/self/statm"
)
def test_memory_of_a_kept_result_is_close_to_the_encoded_size() -> None:
    transition = Transition(Observation(), info={"seen": "x" * 200})
    initial_bytes = read_resident_bytes()
    results = [encode_transition(transition, _Renderer(), index) for index in range(10_000)]
    bytes_per_result = (read_resident_bytes() - initial_bytes) / len(results)
    # Python objects add overhead. Keeping orjson's oversized buffers would take 20 times the size.
    assert bytes_per_result < 4 * results[0].num_bytes


def read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
