"""Versions as chains of differences: complete, minimal, and with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from ludus.proto.errors import StoreUnavailableError, WeightSyncError
from ludus.trainer.weights import store as store_module
from ludus.trainer.weights.store import VersionStore
from tests.weights.states import (
    MemoryStorage,
    assert_same,
    make_settings,
    make_state,
    make_version_manifest,
    publish,
)


def open_stores(storage: MemoryStorage, **fields: float) -> tuple[VersionStore, VersionStore]:
    """Return the stores of the learner and of a worker."""
    return VersionStore(storage, make_settings(**fields)), VersionStore(
        storage, make_settings(**fields)
    )


def test_every_fetched_version_equals_the_published_weights() -> None:
    learner, worker = open_stores(MemoryStorage(), full_every=4)
    for version in range(11):
        fetched_weights = worker.fetch(publish(learner, version))
        assert_same(fetched_weights.state, make_state(version))


def test_first_and_every_kth_version_are_complete() -> None:
    storage = MemoryStorage()
    learner, _ = open_stores(storage, full_every=4, keep_versions=20)
    for version in range(3, 10):
        publish(learner, version)
    complete_versions = [int(name[1:9]) for name in storage.files if ".delta." not in name]
    assert complete_versions == [3, 4, 8]


def test_up_to_date_worker_fetches_only_the_newest_difference() -> None:
    storage = MemoryStorage()
    learner, worker = open_stores(storage, full_every=8)
    for version in range(5):
        worker.fetch(publish(learner, version))
    assert [int(name[1:9]) for name in storage.read_names] == [0, 1, 2, 3, 4]


def test_late_worker_fetches_latest_complete_version_and_differences() -> None:
    storage = MemoryStorage()
    learner, _ = open_stores(storage, full_every=4)
    for version in range(12):
        weights = publish(learner, version)
        late_worker = VersionStore(storage, make_settings(full_every=4))
        storage.read_names.clear()
        assert_same(late_worker.fetch(weights).state, make_state(version))
        assert [int(name[1:9]) for name in storage.read_names] == list(
            range(version // 4 * 4, version + 1)
        )


def test_worker_fetches_differences_of_missed_versions() -> None:
    storage = MemoryStorage()
    learner, worker = open_stores(storage, full_every=8, keep_versions=8)
    worker.fetch(publish(learner, 0))
    for version in range(1, 4):
        weights = publish(learner, version)
    storage.read_names.clear()
    assert_same(worker.fetch(weights).state, make_state(3))
    assert [int(name[1:9]) for name in storage.read_names] == [1, 2, 3]


def test_same_version_is_not_fetched_twice() -> None:
    storage = MemoryStorage()
    learner, worker = open_stores(storage, full_every=2)
    weights = publish(learner, 0)
    worker.fetch(weights)
    second_fetch = worker.fetch(weights)
    assert_same(second_fetch.state, make_state(0))
    assert second_fetch.num_bytes == 0
    assert len(storage.read_names) == 1


def test_unchanged_tensors_are_not_fetched() -> None:
    storage = MemoryStorage()
    learner, worker = open_stores(storage, full_every=100)
    state = {f"layer{index}": torch.randn(100_000) for index in range(8)}
    first_fetch = worker.fetch(publish(learner, 0, state))
    state = {**state, "layer3": state["layer3"] + 1e-6}
    second_fetch = worker.fetch(publish(learner, 1, state))
    assert_same(second_fetch.state, state)
    assert second_fetch.num_bytes < first_fetch.num_bytes / 8


def test_later_optimizer_writes_do_not_affect_differences() -> None:
    """The published tensors are the parameters, which the next step writes to."""
    learner, worker = open_stores(MemoryStorage(), full_every=10)
    weights = torch.zeros(1000)
    for version in range(5):
        weights += torch.randn(1000)
        fetched_weights = worker.fetch(publish(learner, version, {"w": weights}))
        assert torch.equal(fetched_weights.state["w"], weights)


def test_changed_set_of_tensors_is_published_as_a_complete_version() -> None:
    storage = MemoryStorage()
    learner, worker = open_stores(storage, full_every=10)
    worker.fetch(publish(learner, 1))
    state = {**make_state(2), "more": torch.ones(2)}
    assert_same(worker.fetch(publish(learner, 2, state)).state, state)
    assert not [name for name in storage.files if ".delta." in name]


def test_resumed_run_updates_workers_that_have_later_versions() -> None:
    storage = MemoryStorage()
    learner, worker = open_stores(storage, full_every=10)
    for version in range(4):
        worker.fetch(publish(learner, version))
    resumed_learner = VersionStore(storage, make_settings(full_every=10))
    state = make_state(77)
    assert_same(worker.fetch(publish(resumed_learner, 2, state)).state, state)
    assert_same(worker.fetch(publish(resumed_learner, 3)).state, make_state(3))
    assert [int(name[1:9]) for name in storage.files] == [2, 3]


def test_retention_keeps_all_payloads_of_retained_versions() -> None:
    storage = MemoryStorage()
    learner, _ = open_stores(storage, full_every=4, keep_versions=2)
    stored_versions = []
    for version in range(10):
        publish(learner, version)
        stored_versions.append(sorted(int(name[1:9]) for name in storage.files))
    assert stored_versions[3] == [0, 1, 2, 3]
    assert stored_versions[4] == [0, 1, 2, 3, 4]
    assert stored_versions[5] == [4, 5]
    assert stored_versions[9] == [8, 9]


def test_previous_version_can_still_be_fetched() -> None:
    storage = MemoryStorage()
    learner, _ = open_stores(storage, full_every=4, keep_versions=2)
    versions = [publish(learner, version) for version in range(9)]
    for version in (7, 8):
        late_worker = VersionStore(storage, make_settings(full_every=4))
        assert_same(late_worker.fetch(versions[version]).state, make_state(version))


@pytest.mark.slow
def test_damaged_difference_is_detected() -> None:
    storage = MemoryStorage()
    learner, worker = open_stores(storage, full_every=8)
    worker.fetch(publish(learner, 0))
    weights = publish(learner, 1)
    name = weights.payloads[-1].location
    for position in range(200, len(storage.files[name]), 7):
        original_content = storage.files[name].copy()
        storage.files[name][position] ^= 0x55
        with pytest.raises(WeightSyncError, match=r"version 1|safetensors"):
            worker.fetch(weights)
        storage.files[name] = original_content
    assert_same(worker.fetch(weights).state, make_state(1))


def test_worker_with_damaged_weights_refetches_the_complete_version() -> None:
    storage = MemoryStorage()
    learner, worker = open_stores(storage, full_every=8)
    state = worker.fetch(publish(learner, 0)).state
    state["matrix"][2, 3] += 1.0
    weights = publish(learner, 1)
    storage.read_names.clear()
    assert_same(worker.fetch(weights).state, make_state(1))
    assert [int(name[1:9]) for name in storage.read_names] == [1, 0, 1]


@pytest.mark.slow
def test_publish_and_fetch_succeed_despite_a_short_outage() -> None:
    storage = MemoryStorage()
    learner, worker = open_stores(storage, full_every=2)
    storage.failures = [StoreUnavailableError("no route")] * 4
    weights = publish(learner, 0)
    storage.failures = [StoreUnavailableError("no route")] * 4
    assert_same(worker.fetch(weights).state, make_state(0))


@pytest.mark.slow
def test_long_outage_raises_an_error() -> None:
    storage = MemoryStorage()
    weights = publish(VersionStore(storage, make_settings()), 6)
    learner, worker = open_stores(storage, timeout_s=0.4)
    storage.failures = [StoreUnavailableError("no route")] * 10_000
    start_s = time.monotonic()
    with pytest.raises(
        WeightSyncError,
        match=r"fetching weights version 6 from memory.*timeout_s = 0\.4.*no (route|response)",
    ):
        worker.fetch(weights)
    with pytest.raises(WeightSyncError, match=r"publishing weights version 7 to memory"):
        publish(learner, 7)
    assert time.monotonic() - start_s < 60.0


def test_hanging_store_raises_an_error() -> None:
    class HangingStorage(MemoryStorage):
        def __init__(self) -> None:
            super().__init__()
            self.release_event = threading.Event()

        def put(self, name: str, buffers: Sequence[np.ndarray]) -> str:
            self.release_event.wait(240)
            return super().put(name, buffers)

    storage = HangingStorage()
    store = VersionStore(storage, make_settings(timeout_s=0.3))
    start_s = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"publishing weights version 1.*no response within"):
        publish(store, 1)
    assert time.monotonic() - start_s < 60.0
    storage.release_event.set()


def test_result_at_the_deadline_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class LateFuture(Future[str]):
        def result(self, timeout: float | None = None) -> str:
            location = super().result()
            if timeout is not None:
                raise TimeoutError
            return location

    monkeypatch.setattr(store_module, "Future", LateFuture)
    assert store_module.call_with_limit(lambda: "result", 60.0) == "result"


def test_permanent_error_is_raised_immediately() -> None:
    storage = MemoryStorage()
    learner, _ = open_stores(storage, timeout_s=240.0)
    storage.failures = [WeightSyncError("access denied")]
    start_s = time.monotonic()
    with pytest.raises(WeightSyncError, match="access denied"):
        publish(learner, 0)
    assert time.monotonic() - start_s < 60.0


def test_fetching_weights_with_a_manifest_mismatch_fails() -> None:
    learner, worker = open_stores(MemoryStorage())
    state = make_state(1)
    partial_state = {name: tensor for name, tensor in state.items() if name != "matrix"}
    with pytest.raises(WeightSyncError, match="matrix"):
        worker.fetch(learner.publish(make_version_manifest(1, state), partial_state))
    reshaped_state = {**state, "matrix": state["matrix"].reshape(7, 5)}
    with pytest.raises(WeightSyncError, match=r"'matrix' arrived altered.*\(7, 5\)"):
        worker.fetch(learner.publish(make_version_manifest(2, state), reshaped_state))


def test_content_hash_depends_on_the_tensors() -> None:
    hashes = [make_version_manifest(1, make_state(seed)).content_hash for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]
