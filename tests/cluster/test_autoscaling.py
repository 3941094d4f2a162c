"""The real KEDA and Kubernetes autoscaler with a varying number of players.

Recordings go to runs/cluster-test/autoscaling*.json. This folder contains a copy of one recording,
which tests/charts/test_autoscaling.py compares with the simulation and
dev/autoscaling_picture.py draws.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.transports.address import ConnectOptions
from ludus.services.kubernetes.api import KubernetesApi
from tests.cluster.autoscaling import COLUMNS, Crowd, Removal, Watch, forward_ports
from tests.cluster.installed import (
    AUTOSCALING_VALUES,
    ROOT,
    TIMEOUT_S,
    Release,
    find_skip_reason,
    kubectl,
    wait_until,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]
RESULTS = ROOT / "runs" / "cluster-test"
DEPLOYMENT = "ludus-env-blackjack"
MANY, FEW = 36, 10
PODS_OF_MANY, PODS_OF_FEW = 6, 2
"""Number of pods for the many and the few players; six sessions fit on a pod."""
LONG_SCALE_INS = 200
LONG_MANY, LONG_PODS = 54, 9
GROUP, PODS_OF_GROUP = 20, 3
"""Size of the group and number of its pods; eight sessions fit on a pod."""
DRAIN_S = 60
LONGER_THAN_QUEUE_S = 180.0
ENVIRONMENTS = "app.kubernetes.io/component=environment"


@pytest.fixture(scope="module")
def release(autoscaled_release: Release) -> Release:
    """Return the release after it has scaled to zero pods."""
    wait_until(lambda: _replicas(autoscaled_release) == 0, "KEDA to ask Prometheus", 2 * TIMEOUT_S)
    return autoscaled_release


@asynccontextmanager
async def watch_players(release: Release) -> AsyncIterator[tuple[Crowd, Watch]]:
    """Start a crowd without players and a watch; stop both when the context exits."""
    secret = release.get("secret", "ludus-auth")["data"]["gateway-token"]
    token = base64.b64decode(secret).decode()
    gateways = release.get("pods", "-l", "app.kubernetes.io/component=gateway")["items"]
    pod = gateways[0]["metadata"]["name"]
    async with (
        forward_ports(release.namespace, pod, 18000, 9000) as (grpc, admin),
        KubernetesApi() as api,
    ):
        crowd = Crowd(
            await AsyncEnvClient.connect(
                f"grpc://127.0.0.1:{grpc}/blackjack",
                ConnectOptions(token=token, timeout_s=LONGER_THAN_QUEUE_S),
            )
        )
        metrics = f"http://127.0.0.1:{admin}/metrics"
        watch = Watch(api, release.namespace, DEPLOYMENT, metrics, crowd)
        tasks = [asyncio.create_task(crowd.run()), asyncio.create_task(watch.run())]
        try:
            yield crowd, watch
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            await crowd.client.close()
            if watch.failures:
                last_failures = "\n".join(watch.failures[-3:])
                sys.stderr.write(f"{len(watch.failures)} looks missed, at last:\n{last_failures}\n")
        for end in ends:
            assert isinstance(end, asyncio.CancelledError), end


@pytest.mark.timeout(900)
async def test_pods_scale_from_zero_and_back_without_lost_sessions(
    release: Release,
) -> None:
    async with watch_players(release) as (crowd, watch):
        crowd.size = 1
        await wait_until_true(lambda: crowd.num_finished, "the first player, who waits for a pod")
        crowd.size = MANY
        await wait_until_true(lambda: watch.num_ready >= PODS_OF_MANY, "pods for many")
        await asyncio.sleep(10)
        crowd.size = FEW
        await wait_until_true(lambda: watch.num_replicas == PODS_OF_FEW, "pods for few")
        await asyncio.sleep(15)
        crowd.size = 0
        await wait_until_true(lambda: watch.num_replicas == watch.num_ready == 0, "no pod")
    _record("autoscaling", release, crowd, watch)
    assert crowd.void == crowd.refused == []
    assert count_turns(watch) == 1
    assert emptiest_first_share(watch.removals) >= 0.9


@pytest.mark.long
@pytest.mark.timeout(10_000)
async def test_two_hundred_scale_ins_lose_no_session(release: Release) -> None:
    release.upgrade(
        AUTOSCALING_VALUES, {"environments.blackjack.autoscaling.max": str(LONG_PODS + 1)}
    )
    async with watch_players(release) as (crowd, watch):
        while len(watch.removals) < LONG_SCALE_INS:
            crowd.size = LONG_MANY
            await wait_until_true(lambda: watch.num_ready >= LONG_PODS, "pods for many")
            crowd.size = FEW
            await wait_until_true(lambda: watch.num_replicas == PODS_OF_FEW, "pods for few")
            _record("autoscaling-long", release, crowd, watch)
            sys.stderr.write(
                f"{watch.now_s:.0f} s: {len(watch.removals)} pods removed, {crowd.num_finished} "
                f"sessions, {len(crowd.void)} lost, {len(watch.failures)} looks missed\n"
            )
    assert crowd.void == []
    assert emptiest_first_share(watch.removals) >= 0.9


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_group_larger_than_a_pod_waits_for_all_the_pods_it_needs(
    release: Release,
) -> None:
    async with watch_players(release) as (crowd, watch):
        opened = await crowd.client.open_group(GROUP)
        await wait_until_true(lambda: watch.num_ready >= PODS_OF_GROUP, "what was ready to be seen")
        for session, _ in opened:
            await session.close()


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_session_longer_than_the_drain_is_void_and_notified(release: Release) -> None:
    async with watch_players(release) as (crowd, watch):
        crowd.shortest_s = crowd.longest_s = 1000.0
        crowd.size = 1
        await wait_until_true(lambda: crowd.servers.total(), "a session")
        kubectl("-n", release.namespace, "delete", "pods", "--wait=false", "-l", ENVIRONMENTS)
        await wait_until_true(lambda: crowd.leaving, "its pod to be notified")
        request_s = watch.now_s
        await wait_until_true(lambda: crowd.void, "the end of its drain")
        assert watch.now_s - request_s > 0.9 * DRAIN_S
    assert "session lost" in crowd.void[0]


def count_turns(watch: Watch) -> int:
    """Count the changes of direction of the target number of pods."""
    replicas = [int(row[COLUMNS.index("replicas")]) for row in watch.rows]
    changes = [
        next_count - count
        for count, next_count in itertools.pairwise(replicas)
        if next_count != count
    ]
    return sum(
        (change > 0) != (next_change > 0) for change, next_change in itertools.pairwise(changes)
    )


def emptiest_first_share(removals: list[Removal]) -> float:
    """Return the share of removals that chose a pod of the lowest cost."""
    fit = [removal.cost <= min(removal.kept_costs, default=removal.cost) for removal in removals]
    return sum(fit) / len(fit)


async def wait_until_true(condition: Callable[[], Any], goal: str) -> None:
    """Return once `condition()` holds."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"waited {TIMEOUT_S:.0f} s for {goal}")


def _replicas(release: Release) -> int:
    return int(release.get("deployment", DEPLOYMENT)["spec"]["replicas"])


def _record(name: str, release: Release, crowd: Crowd, watch: Watch) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    recording = {
        "namespace": release.namespace,
        "scaled_object": release.get("scaledobject", DEPLOYMENT)["spec"],
        "sessions": {
            "finished": crowd.num_finished,
            "void": crowd.void,
            "refused": len(crowd.refused),
            "moved": crowd.num_moved,
            "longest_wait_s": round(crowd.longest_wait_s, 1),
        },
        "emptiest_first": round(emptiest_first_share(watch.removals), 3),
        "removals": [dataclasses.asdict(removal) for removal in watch.removals],
        "columns": COLUMNS,
    }
    head = json.dumps(recording, indent=1)[:-2]
    rows = ",\n".join(json.dumps(row) for row in watch.rows)
    (RESULTS / f"{name}.json").write_text(f'{head},\n "seconds": [\n{rows}\n ]\n}}\n')
