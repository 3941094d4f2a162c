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

_MOST_TRIES = 600
CONFIG = RayWeightStore(full_every=3, timeout_s=60.0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray, with a store as small as it allows."""
    try:
        init_ray()
    except Exception as error:  # Ray raises nothing narrower
        if "timed out during startup" not in str(error):
            raise
        init_ray()  # a busy machine may not keep Ray's 30 s
    yield
    ray.shutdown()


def init_ray() -> None:
    ray.init(num_cpus=1, object_store_memory=80_000_000, include_dashboard=False)


class Process:
    """A process with a store of its own."""

    def __init__(self) -> None:
        self._store = make_store(CONFIG)

    def publish(self, version: int, num_more: int = 0) -> PublishedWeights:
        """See WeightStore; with one more tensor, if it is to have some elements."""
        more = {"more": torch.zeros(num_more)} if num_more else {}
        return publish(self._store, version, {**make_state(version), **more})

    def hold(self, published: PublishedWeights) -> None:
        """Fetches into a store that holds nothing yet."""
        make_store(CONFIG).fetch(published)

    def fetch(self, published: PublishedWeights) -> int:
        """The bytes fetched, once they are seen to be right."""
        fetched = self._store.fetch(published)
        assert_same(fetched.state, make_state(published.manifest.version))
        return fetched.num_bytes


def started() -> Any:
    """A process."""
    return ray.remote(num_cpus=0)(Process).remote()


def test_versions_travel_between_processes_and_a_late_one_catches_up() -> None:
    learner, worker = started(), started()
    for version in range(5):
        newest = ray.get(learner.publish.remote(version))
        ray.get(worker.fetch.remote(newest))
    late = started()
    assert ray.get(late.fetch.remote(newest)) > ray.get(worker.fetch.remote(newest)) == 0


def test_what_is_still_named_by_somebody_can_be_fetched_after_the_store_dropped_it() -> None:
    learner, late = started(), started()
    published = [ray.get(learner.publish.remote(version)) for version in range(8)]
    for each in published:
        ray.get(late.fetch.remote(each))


def test_weights_that_died_with_the_learner_are_reported_as_lost() -> None:
    learner, worker = started(), started()
    # Ray copies small objects along with their reference.
    newest = ray.get(learner.publish.remote(0, num_more=200_000))
    ray.kill(learner)
    # The object goes when its owner's death has come about.
    with pytest.raises(WeightSyncError, match="learner died"):
        for _ in range(_MOST_TRIES):
            ray.get(worker.hold.remote(newest))
            time.sleep(0.1)
