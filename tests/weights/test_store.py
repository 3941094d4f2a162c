"""Versions as chains of differences: whole, exactly once, no more than needed, never for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from ludus.proto.errors import StoreUnavailableError, WeightSyncError
from ludus.trainer.weights import VersionStore, retry_deadline
from tests.weights.states import (
    MemoryStorage,
    assert_same,
    make_state,
    manifest_of,
    publish,
    settings,
)


def pair(storage: MemoryStorage, **fields: float) -> tuple[VersionStore, VersionStore]:
    """The learner's store and a worker's."""
    return VersionStore(storage, settings(**fields)), VersionStore(storage, settings(**fields))


def test_every_version_arrives_bit_for_bit_however_it_travels() -> None:
    learner, worker = pair(MemoryStorage(), full_every=4)
    for version in range(11):
        fetched = worker.fetch(publish(learner, version))
        assert_same(fetched.state, make_state(version))


def test_a_version_is_complete_at_the_start_and_every_k() -> None:
    storage = MemoryStorage()
    learner, _ = pair(storage, full_every=4, keep_versions=20)
    for version in range(3, 10):
        publish(learner, version)
    complete = [int(name[1:9]) for name in storage.files if ".delta." not in name]
    assert complete == [3, 4, 8]


def test_an_up_to_date_worker_fetches_the_newest_difference_alone() -> None:
    storage = MemoryStorage()
    learner, worker = pair(storage, full_every=8)
    for version in range(5):
        worker.fetch(publish(learner, version))
    assert [int(name[1:9]) for name in storage.got] == [0, 1, 2, 3, 4]


def test_a_worker_that_joins_late_fetches_one_complete_version_and_what_came_since() -> None:
    storage = MemoryStorage()
    learner, _ = pair(storage, full_every=4)
    for version in range(12):
        newest = publish(learner, version)
        late = VersionStore(storage, settings(full_every=4))
        storage.got.clear()
        assert_same(late.fetch(newest).state, make_state(version))
        assert [int(name[1:9]) for name in storage.got] == list(
            range(version // 4 * 4, version + 1)
        )


def test_a_worker_that_missed_versions_fetches_all_since_its_own() -> None:
    storage = MemoryStorage()
    learner, worker = pair(storage, full_every=8, keep_versions=8)
    worker.fetch(publish(learner, 0))
    for version in range(1, 4):
        newest = publish(learner, version)
    storage.got.clear()
    assert_same(worker.fetch(newest).state, make_state(3))
    assert [int(name[1:9]) for name in storage.got] == [1, 2, 3]


def test_a_version_that_is_held_already_is_not_fetched_again() -> None:
    storage = MemoryStorage()
    learner, worker = pair(storage, full_every=2)
    newest = publish(learner, 0)
    worker.fetch(newest)
    again = worker.fetch(newest)
    assert_same(again.state, make_state(0))
    assert again.num_bytes == 0
    assert len(storage.got) == 1


def test_what_did_not_change_does_not_travel() -> None:
    storage = MemoryStorage()
    learner, worker = pair(storage, full_every=100)
    state = {f"layer{i}": torch.randn(100_000) for i in range(8)}
    first = worker.fetch(publish(learner, 0, state))
    state = {**state, "layer3": state["layer3"] + 1e-6}
    second = worker.fetch(publish(learner, 1, state))
    assert_same(second.state, state)
    assert second.num_bytes < first.num_bytes / 8


def test_what_the_optimizer_writes_after_publishing_is_not_in_the_difference_twice() -> None:
    """The learner's tensors are the parameters themselves, and the next step writes to them."""
    learner, worker = pair(MemoryStorage(), full_every=10)
    weights = torch.zeros(1000)
    for version in range(5):
        weights += torch.randn(1000)
        fetched = worker.fetch(publish(learner, version, {"w": weights}))
        assert torch.equal(fetched.state["w"], weights)


def test_other_tensors_than_before_travel_as_a_complete_version() -> None:
    storage = MemoryStorage()
    learner, worker = pair(storage, full_every=10)
    worker.fetch(publish(learner, 1))
    other = {**make_state(2), "more": torch.ones(2)}
    assert_same(worker.fetch(publish(learner, 2, other)).state, other)
    assert not [name for name in storage.files if ".delta." in name]


def test_a_run_that_continues_from_before_reaches_workers_that_are_ahead() -> None:
    storage = MemoryStorage()
    learner, worker = pair(storage, full_every=10)
    for version in range(4):
        worker.fetch(publish(learner, version))
    resumed = VersionStore(storage, settings(full_every=10))
    again = make_state(77)
    assert_same(worker.fetch(publish(resumed, 2, again)).state, again)
    assert_same(worker.fetch(publish(resumed, 3)).state, make_state(3))
    assert [int(name[1:9]) for name in storage.files] == [2, 3]


def test_retention_keeps_what_kept_versions_build_upon() -> None:
    storage = MemoryStorage()
    learner, _ = pair(storage, full_every=4, keep_versions=2)
    kept = []
    for version in range(10):
        publish(learner, version)
        kept.append(sorted(int(name[1:9]) for name in storage.files))
    assert kept[3] == [0, 1, 2, 3]
    assert kept[4] == [0, 1, 2, 3, 4]
    assert kept[5] == [4, 5]
    assert kept[9] == [8, 9]


def test_the_version_before_the_newest_can_still_be_fetched() -> None:
    learner, _ = pair(MemoryStorage(), full_every=4, keep_versions=2)
    published = [publish(learner, version) for version in range(9)]
    for version in (7, 8):
        late = VersionStore(learner._storage, settings(full_every=4))
        assert_same(late.fetch(published[version]).state, make_state(version))


def test_an_altered_difference_is_found_by_the_checksum_of_its_result() -> None:
    storage = MemoryStorage()
    learner, worker = pair(storage, full_every=8)
    worker.fetch(publish(learner, 0))
    newest = publish(learner, 1)
    name = newest.location[-1].location
    for position in range(200, len(storage.files[name]), 7):
        whole = storage.files[name].copy()
        storage.files[name][position] ^= 0x55
        with pytest.raises(WeightSyncError, match=r"version 1|safetensors"):
            worker.fetch(newest)
        storage.files[name] = whole
    assert_same(worker.fetch(newest).state, make_state(1))


def test_a_worker_whose_own_copy_went_bad_starts_over_from_the_complete_version() -> None:
    storage = MemoryStorage()
    learner, worker = pair(storage, full_every=8)
    held = worker.fetch(publish(learner, 0)).state
    held["matrix"][2, 3] += 1.0
    newest = publish(learner, 1)
    storage.got.clear()
    assert_same(worker.fetch(newest).state, make_state(1))
    assert [int(name[1:9]) for name in storage.got] == [1, 0, 1]


@pytest.mark.slow
def test_a_store_that_is_away_for_a_while_only_delays() -> None:
    storage = MemoryStorage()
    learner, worker = pair(storage, full_every=2)
    storage.failures = [StoreUnavailableError("no route")] * 4
    newest = publish(learner, 0)
    storage.failures = [StoreUnavailableError("no route")] * 4
    assert_same(worker.fetch(newest).state, make_state(0))


def test_a_store_that_stays_away_ends_in_an_error_that_says_what_and_how_long() -> None:
    storage = MemoryStorage()
    newest = publish(VersionStore(storage, settings()), 6)
    learner, worker = pair(storage, timeout_s=0.4)
    storage.failures = [StoreUnavailableError("no route")] * 10_000
    begun = time.monotonic()
    with pytest.raises(
        WeightSyncError,
        match=r"fetching weights version 6 from memory.*timeout_s = 0\.4.*no (route|answer)",
    ):
        worker.fetch(newest)
    with pytest.raises(WeightSyncError, match=r"publishing weights version 7 to memory"):
        publish(learner, 7)
    assert time.monotonic() - begun < 60.0


def test_a_store_that_never_answers_ends_in_an_error_as_well() -> None:
    class Hanging(MemoryStorage):
        def __init__(self) -> None:
            super().__init__()
            self.freed = threading.Event()

        def put(self, name: str, buffers: Sequence[np.ndarray]) -> str:
            self.freed.wait(240)
            return super().put(name, buffers)

    storage = Hanging()
    store = VersionStore(storage, settings(timeout_s=0.3))
    begun = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"publishing weights version 1.*no answer within"):
        publish(store, 1)
    assert time.monotonic() - begun < 60.0
    storage.freed.set()


def test_an_answer_that_comes_just_when_the_time_is_over_is_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(Future[str]):
        def result(self, timeout: float | None = None) -> str:
            answer = super().result()
            if timeout is not None:
                raise TimeoutError
            return answer

    monkeypatch.setattr(retry_deadline, "Future", Late)
    assert retry_deadline.answer_within(lambda: "here", 60.0) == "here"


def test_an_error_that_waiting_does_not_mend_is_told_at_once() -> None:
    storage = MemoryStorage()
    learner, _ = pair(storage, timeout_s=240.0)
    storage.failures = [WeightSyncError("access denied")]
    begun = time.monotonic()
    with pytest.raises(WeightSyncError, match="access denied"):
        publish(learner, 0)
    assert time.monotonic() - begun < 60.0


def test_weights_that_are_not_those_of_the_manifest_are_refused() -> None:
    learner, worker = pair(MemoryStorage())
    state = make_state(1)
    fewer = {name: tensor for name, tensor in state.items() if name != "matrix"}
    with pytest.raises(WeightSyncError, match="matrix"):
        worker.fetch(learner.publish(manifest_of(1, state), fewer))
    reshaped = {**state, "matrix": state["matrix"].reshape(7, 5)}
    with pytest.raises(WeightSyncError, match=r"'matrix' arrived altered.*\(7, 5\)"):
        worker.fetch(learner.publish(manifest_of(2, state), reshaped))


def test_the_content_hash_tells_versions_apart() -> None:
    hashes = [manifest_of(1, make_state(seed)).content_hash for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]
