"""Deletion costs: pods with the fewest sessions go first, with few writes to the API server."""

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
class Bench:
    """A writer with loads, leadership and a clock set by the test."""

    cluster: FakeKubernetes
    costs: DeletionCostWriter = field(init=False)
    loads: dict[str, tuple[int, int]] = field(default_factory=dict)
    is_leader: bool = True
    now_s: float = 0.0

    def add(self, **loads: tuple[int, int]) -> None:
        for name in loads:
            metadata = {"name": name, "namespace": NAMESPACE, "annotations": {"kept": "yes"}}
            self.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata})
        self.loads.update(loads)

    def cost(self, pod: str) -> str | None:
        annotations = self.cluster.get("v1", "pods", NAMESPACE, pod)["metadata"]["annotations"]
        assert annotations["kept"] == "yes"
        return annotations.get(COST_ANNOTATION)

    @property
    def patched(self) -> list[str]:
        return [r.target.name for r in self.cluster.requests if r.verb == "patch"]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with FakeKubernetes() as cluster, make_api_client(cluster) as api:
        bench = Bench(cluster)
        bench.costs = DeletionCostWriter(
            api,
            NAMESPACE,
            lambda: bench.loads,
            lambda: bench.is_leader,
            max_patches_per_s=1000.0,
            clock=lambda: bench.now_s,
        )
        yield bench


@pytest.mark.parametrize(
    ("num_sessions", "capacity", "bucket"),
    [
        (0, 256, 0), (1, 256, 25), (64, 256, 25), (65, 256, 50), (128, 256, 50),
        (129, 256, 75), (192, 256, 75), (193, 256, 100), (256, 256, 100), (300, 256, 100),
        (0, 0, 0), (1, 0, 100), (1, 1, 100), (1, 3, 50),
    ],
)  # fmt: skip
def test_a_bucket_is_the_use_rounded_up_to_a_quarter(
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
    bench: Bench,
) -> None:
    bench.add(empty=(0, 100), some=(30, 100), full=(100, 100))
    assert await bench.costs.sweep() == 3
    assert [bench.cost(pod) for pod in ("empty", "some", "full")] == ["0", "50", "100"]


async def test_only_another_bucket_is_written_and_half_a_minute_later(bench: Bench) -> None:
    bench.add(a=(10, 100))
    await bench.costs.sweep()
    bench.now_s += 100
    bench.loads["a"] = (25, 100)  # the same bucket
    assert await bench.costs.sweep() == 0
    bench.loads["a"] = (26, 100)
    assert await bench.costs.sweep() == 1
    bench.loads["a"] = (100, 100)
    bench.now_s += 29.9
    assert await bench.costs.sweep() == 0
    bench.now_s += 0.2
    assert await bench.costs.sweep() == 1
    assert bench.cost("a") == "100"


async def test_gateway_that_does_not_lead_writes_nothing(bench: Bench) -> None:
    bench.add(a=(10, 100))
    bench.is_leader = False
    assert await bench.costs.sweep() == 0
    assert bench.patched == []


async def test_new_leader_writes_all_costs_again(bench: Bench) -> None:
    bench.add(a=(10, 100))
    await bench.costs.sweep()
    bench.is_leader = False
    await bench.costs.sweep()
    bench.is_leader = True
    assert await bench.costs.sweep() == 1


async def test_a_sweep_ends_when_leadership_does(bench: Bench) -> None:
    bench.add(**{f"pod{number}": (10, 100) for number in range(200)})
    sweep = asyncio.create_task(bench.costs.sweep())
    await wait_until(lambda: bench.patched)
    bench.is_leader = False
    assert await sweep < 200


async def test_missing_pod_is_skipped(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.add(a=(10, 100), b=(10, 100))
    bench.cluster.remove("v1", "pods", NAMESPACE, "a")
    await bench.costs.sweep()
    assert bench.cost("b") == "25"
    assert caplog.text == ""
    bench.now_s += 100
    assert await bench.costs.sweep() == 0, "it is not tried again"


async def test_one_refused_write_does_not_block_others(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.add(a=(90, 100), b=(10, 100))
    bench.cluster.fail(403, verb="patch")
    assert await bench.costs.sweep() == 1
    assert bench.cost("a") is None
    assert bench.cost("b") == "25"
    assert "pod a" in caplog.text
    assert await bench.costs.sweep() == 0
    bench.now_s += 31
    assert await bench.costs.sweep() == 1
    assert bench.cost("a") == "100"


@pytest.mark.parametrize("status", [429, 500])
async def test_failing_api_server_gets_no_more_writes_in_a_sweep(bench: Bench, status: int) -> None:
    bench.add(**{f"pod{number}": (10, 100) for number in range(5)})
    bench.cluster.fail(status, verb="patch")
    assert await bench.costs.sweep() == 0
    assert len(bench.patched) == 1
    assert await bench.costs.sweep() == 4


async def test_gateway_survives_an_api_server_outage(bench: Bench) -> None:
    bench.add(a=(10, 100))
    await bench.cluster.go_down()
    assert await bench.costs.sweep() == 0
    await bench.cluster.come_up()
    bench.now_s += 31
    assert await bench.costs.sweep() == 1


async def test_pods_with_the_largest_cost_error_are_written_first(bench: Bench) -> None:
    bench.add(empty=(0, 100), some=(30, 100), full=(100, 100))
    await bench.costs.sweep()
    assert bench.patched == ["full", "some", "empty"]


async def test_writes_are_spread_over_time() -> None:
    async with FakeKubernetes() as cluster, make_api_client(cluster) as api:
        loads = {f"pod{number}": (1, 2) for number in range(10)}
        costs = DeletionCostWriter(
            api,
            NAMESPACE,
            lambda: loads,
            lambda: True,
            sweep_interval_s=0.01,
            max_patches_per_s=50.0,
        )
        began_s = time.monotonic()
        running = asyncio.create_task(costs.run())
        await wait_until(lambda: cluster.num_requests("patch") == 10)
        assert time.monotonic() - began_s >= 9 / 50
        await asyncio.sleep(0.05)
        running.cancel()
        assert cluster.num_requests("patch") == 10
