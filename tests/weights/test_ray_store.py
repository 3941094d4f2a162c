"""Weights in Ray's object store, between real processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from ludus.proto.config import RayWeightStore
from ludus.proto.errors import WeightSyncError
from ludus.trainer.actors.weight_store import make_store
from ludus.trainer.core.interfaces import PublishedWeights
from tests.weights.states import assert_same, make_state, publish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_MAX_TRIES = 600
CONFIG = RayWeightStore(full_every=3, timeout_s=60.0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start Ray with the smallest object store that it allows."""
    try:
        init_ray()
    except Exception as error:  # Ray raises nothing narrower
        if "timed out during startup" not in str(error):
            raise
        init_ray()  # Ray may need more than its limit of 30 s on a busy machine.
    yield
    ray.shutdown()


def init_ray() -> None:
    ray.init(num_cpus=1, object_store_memory=80_000_000, include_dashboard=False)


class StoreProcess:
    """A process with a weight store."""

    def __init__(self) -> None:
        self._store = make_store(CONFIG)

    def publish(self, version: int, num_extra: int = 0) -> PublishedWeights:
        """Publish a version, with an extra tensor if `num_extra` is positive."""
        extra_tensors = {"extra": torch.zeros(num_extra)} if num_extra else {}
        return publish(self._store, version, {**make_state(version), **extra_tensors})

    def fetch_into_new_store(self, weights: PublishedWeights) -> None:
        """Fetch a version into a new store."""
        make_store(CONFIG).fetch(weights)

    def fetch(self, weights: PublishedWeights) -> int:
        """Fetch a version, check its tensors, and return the number of bytes fetched."""
        fetched_weights = self._store.fetch(weights)
        assert_same(fetched_weights.state, make_state(weights.manifest.version))
        return fetched_weights.num_bytes


def start_process() -> Any:
    """Start a process."""
    return ray.remote(num_cpus=0)(StoreProcess).remote()


def test_processes_exchange_versions_and_a_late_process_can_fetch() -> None:
    learner, worker = start_process(), start_process()
    for version in range(5):
        weights = ray.get(learner.publish.remote(version))
        ray.get(worker.fetch.remote(weights))
    late_worker = start_process()
    assert ray.get(late_worker.fetch.remote(weights)) > ray.get(worker.fetch.remote(weights)) == 0


@pytest.mark.long
def test_dropped_version_can_be_fetched_while_a_reference_exists() -> None:
    learner, worker = start_process(), start_process()
    versions = [ray.get(learner.publish.remote(version)) for version in range(8)]
    for weights in versions:
        ray.get(worker.fetch.remote(weights))


@pytest.mark.long
def test_fetching_weights_of_a_dead_learner_fails() -> None:
    learner, worker = start_process(), start_process()
    # Ray copies small objects along with their reference.
    weights = ray.get(learner.publish.remote(0, num_extra=200_000))
    ray.kill(learner)
    # Ray deletes the object when it notices the death of its owner.
    with pytest.raises(WeightSyncError, match="learner died"):
        for _ in range(_MAX_TRIES):
            ray.get(worker.fetch_into_new_store.remote(weights))
            time.sleep(0.1)
