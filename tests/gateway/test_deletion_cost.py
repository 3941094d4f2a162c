"""Deletion costs of pods, which must be lowest for pods with the fewest sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.services.gateway.kubernetes.deletion_cost import (
    COST_ANNOTATION,
    DeletionCostWriter,
    choose_bucket,
)
from tests.env.polling import wait_until
from tests.gateway.cluster_objects import NAMESPACE, make_api_client
from tests.gateway.fake_kubernetes import FakeKubernetes


@dataclass
class WriterSetup:
    """A deletion cost writer whose loads, leadership and clock are set by the test."""

    cluster: FakeKubernetes
    writer: DeletionCostWriter = field(init=False)
    loads: dict[str, tuple[int, int]] = field(default_factory=dict)
    is_leader: bool = True
    now_s: float = 0.0

    def add_pods(self, **loads: tuple[int, int]) -> None:
        for name in loads:
            metadata = {"name": name, "namespace": NAMESPACE, "annotations": {"kept": "yes"}}
            self.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata})
        self.loads.update(loads)

    def read_cost(self, pod: str) -> str | None:
        annotations = self.cluster.get("v1", "pods", NAMESPACE, pod)["metadata"]["annotations"]
        assert annotations["kept"] == "yes"
        return annotations.get(COST_ANNOTATION)

    @property
    def patched_pods(self) -> list[str]:
        return [request.target.name for request in self.cluster.requests if request.verb == "patch"]


@pytest.fixture
async def setup() -> AsyncIterator[WriterSetup]:
    async with FakeKubernetes() as cluster, make_api_client(cluster) as api:
        setup = WriterSetup(cluster)
        setup.writer = DeletionCostWriter(
            api,
            NAMESPACE,
            lambda: setup.loads,
            lambda: setup.is_leader,
            max_patches_per_s=1000.0,
            clock=lambda: setup.now_s,
        )
        yield setup


@pytest.mark.parametrize(
    ("num_sessions", "capacity", "bucket"),
    [
        (0, 256, 0), (1, 256, 25), (64, 256, 25), (65, 256, 50), (128, 256, 50),
        (129, 256, 75), (192, 256, 75), (193, 256, 100), (256, 256, 100), (300, 256, 100),
        (0, 0, 0), (1, 0, 100), (1, 1, 100), (1, 3, 50),
    ],
)  # fmt: skip
def test_bucket_is_utilization_rounded_up_to_a_quarter(
    num_sessions: int, capacity: int, bucket: int
) -> None:
    assert choose_bucket(num_sessions, capacity) == bucket


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_more_sessions_never_cost_less(num_sessions: int, capacity: int) -> None:
    bucket = choose_bucket(num_sessions, capacity)
    assert bucket in (0, 25, 50, 75, 100)
    assert (bucket == 0) == (num_sessions == 0)
    assert choose_bucket(num_sessions + 1, capacity) >= bucket


async def test_pods_keep_other_annotations_when_costs_are_written(
    setup: WriterSetup,
) -> None:
    setup.add_pods(empty=(0, 100), some=(30, 100), full=(100, 100))
    assert await setup.writer.sweep() == 3
    assert [setup.read_cost(pod) for pod in ("empty", "some", "full")] == ["0", "50", "100"]


async def test_cost_is_written_only_for_a_new_bucket_and_after_30_s(setup: WriterSetup) -> None:
    setup.add_pods(a=(10, 100))
    await setup.writer.sweep()
    setup.now_s += 100
    setup.loads["a"] = (25, 100)  # the same bucket
    assert await setup.writer.sweep() == 0
    setup.loads["a"] = (26, 100)
    assert await setup.writer.sweep() == 1
    setup.loads["a"] = (100, 100)
    setup.now_s += 29.9
    assert await setup.writer.sweep() == 0
    setup.now_s += 0.2
    assert await setup.writer.sweep() == 1
    assert setup.read_cost("a") == "100"


async def test_gateway_that_is_not_leader_writes_no_costs(setup: WriterSetup) -> None:
    setup.add_pods(a=(10, 100))
    setup.is_leader = False
    assert await setup.writer.sweep() == 0
    assert setup.patched_pods == []


async def test_new_leader_writes_all_costs_again(setup: WriterSetup) -> None:
    setup.add_pods(a=(10, 100))
    await setup.writer.sweep()
    setup.is_leader = False
    await setup.writer.sweep()
    setup.is_leader = True
    assert await setup.writer.sweep() == 1


async def test_sweep_ends_when_leadership_is_lost(setup: WriterSetup) -> None:
    setup.add_pods(**{f"pod{number}": (10, 100) for number in range(200)})
    sweep_task = asyncio.create_task(setup.writer.sweep())
    await wait_until(lambda: setup.patched_pods)
    setup.is_leader = False
    assert await sweep_task < 200


async def test_missing_pod_is_skipped(setup: WriterSetup, caplog: pytest.LogCaptureFixture) -> None:
    setup.add_pods(a=(10, 100), b=(10, 100))
    setup.cluster.remove("v1", "pods", NAMESPACE, "a")
    await setup.writer.sweep()
    assert setup.read_cost("b") == "25"
    assert caplog.text == ""
    setup.now_s += 100
    assert await setup.writer.sweep() == 0, "the missing pod was tried again"


async def test_refused_write_does_not_block_other_writes(
    setup: WriterSetup, caplog: pytest.LogCaptureFixture
) -> None:
    setup.add_pods(a=(90, 100), b=(10, 100))
    setup.cluster.fail(403, verb="patch")
    assert await setup.writer.sweep() == 1
    assert setup.read_cost("a") is None
    assert setup.read_cost("b") == "25"
    assert "pod a" in caplog.text
    assert await setup.writer.sweep() == 0
    setup.now_s += 31
    assert await setup.writer.sweep() == 1
    assert setup.read_cost("a") == "100"


@pytest.mark.parametrize("status", [429, 500])
async def test_failing_api_server_gets_no_more_writes_in_a_sweep(
    setup: WriterSetup, status: int
) -> None:
    setup.add_pods(**{f"pod{number}": (10, 100) for number in range(5)})
    setup.cluster.fail(status, verb="patch")
    assert await setup.writer.sweep() == 0
    assert len(setup.patched_pods) == 1
    assert await setup.writer.sweep() == 4


async def test_gateway_survives_an_api_server_outage(setup: WriterSetup) -> None:
    setup.add_pods(a=(10, 100))
    await setup.cluster.go_down()
    assert await setup.writer.sweep() == 0
    await setup.cluster.come_up()
    setup.now_s += 31
    assert await setup.writer.sweep() == 1


async def test_pods_with_the_largest_cost_error_are_written_first(setup: WriterSetup) -> None:
    setup.add_pods(empty=(0, 100), some=(30, 100), full=(100, 100))
    await setup.writer.sweep()
    assert setup.patched_pods == ["full", "some", "empty"]


async def test_writes_are_spread_over_time() -> None:
    async with FakeKubernetes() as cluster, make_api_client(cluster) as api:
        loads = {f"pod{number}": (1, 2) for number in range(10)}
        writer = DeletionCostWriter(
            api,
            NAMESPACE,
            lambda: loads,
            lambda: True,
            sweep_interval_s=0.01,
            max_patches_per_s=50.0,
        )
        start_s = time.monotonic()
        task = asyncio.create_task(writer.run())
        await wait_until(lambda: cluster.num_requests("patch") == 10)
        assert time.monotonic() - start_s >= 9 / 50
        await asyncio.sleep(0.05)
        task.cancel()
        assert cluster.num_requests("patch") == 10
