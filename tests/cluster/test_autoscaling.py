"""KEDA and Kubernetes' autoscaler, real, over players who come and go.

What is seen goes to runs/cluster-test/autoscaling*.json. A copy of one run lies beside this file:
tests/charts/test_autoscaling.py holds the simulation against it, dev/autoscaling_picture.py draws
it.
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

from ludus.env.client.client import AsyncEnvClient
from ludus.env.transports.interface import ConnectOptions
from ludus.services.kubernetes.api import KubernetesApi
from tests.cluster.autoscaling import COLUMNS, Crowd, Removal, Watch, forwarded
from tests.cluster.installed import (
    AUTOSCALING_VALUES,
    ROOT,
    TIMEOUT_S,
    Installed,
    kubectl,
    until,
    why_not,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
RESULTS = ROOT / "runs" / "cluster-test"
DEPLOYMENT = "ludus-env-blackjack"
MANY, FEW = 36, 10
PODS_OF_MANY, PODS_OF_FEW = 6, 2
"""Six sessions to a pod."""
LONG_SCALE_INS = 200
LONG_MANY, LONG_PODS = 54, 9
GROUP, PODS_OF_GROUP = 20, 3
"""Eight fit on a pod."""
DRAIN_S = 60
LONGER_THAN_QUEUE_S = 180.0
ENVIRONMENTS = "app.kubernetes.io/component=environment"


@pytest.fixture(scope="module")
def release(autoscaled: Installed) -> Installed:
    """One that has found, through Prometheus, that nobody plays."""
    until(lambda: _replicas(autoscaled) == 0, "KEDA to ask Prometheus", 2 * TIMEOUT_S)
    return autoscaled


@asynccontextmanager
async def watched(release: Installed) -> AsyncIterator[tuple[Crowd, Watch]]:
    """Players, none yet, and who watches; both end with the context."""
    secret = release.get("secret", "ludus-auth")["data"]["gateway-token"]
    token = base64.b64decode(secret).decode()
    gateways = release.get("pods", "-l", "app.kubernetes.io/component=gateway")["items"]
    pod = gateways[0]["metadata"]["name"]
    async with (
        forwarded(release.namespace, pod, 18000, 9000) as (grpc, admin),
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
            if watch.missed:
                last = "\n".join(watch.missed[-3:])
                sys.stderr.write(f"{len(watch.missed)} looks missed, at last:\n{last}\n")
        for end in ends:
            assert isinstance(end, asyncio.CancelledError), end


@pytest.mark.timeout(900)
async def test_pods_follow_the_players_from_zero_and_back_without_losing_one(
    release: Installed,
) -> None:
    async with watched(release) as (crowd, watch):
        crowd.size = 1
        await eventually(lambda: crowd.num_finished, "the first player, who waits for a pod")
        crowd.size = MANY
        await eventually(lambda: watch.num_ready >= PODS_OF_MANY, "pods for many")
        await asyncio.sleep(10)
        crowd.size = FEW
        await eventually(lambda: watch.num_replicas == PODS_OF_FEW, "pods for few")
        await asyncio.sleep(15)
        crowd.size = 0
        await eventually(lambda: watch.num_replicas == watch.num_ready == 0, "no pod")
    _record("autoscaling", release, crowd, watch)
    assert crowd.void == crowd.refused == []
    assert turns(watch) == 1
    assert emptiest_first(watch.removals) >= 0.9


@pytest.mark.long
@pytest.mark.timeout(10_000)
async def test_nobody_is_lost_in_two_hundred_scale_ins(release: Installed) -> None:
    release.upgrade(
        AUTOSCALING_VALUES, {"environments.blackjack.autoscaling.max": str(LONG_PODS + 1)}
    )
    async with watched(release) as (crowd, watch):
        while len(watch.removals) < LONG_SCALE_INS:
            crowd.size = LONG_MANY
            await eventually(lambda: watch.num_ready >= LONG_PODS, "pods for many")
            crowd.size = FEW
            await eventually(lambda: watch.num_replicas == PODS_OF_FEW, "pods for few")
            _record("autoscaling-long", release, crowd, watch)
            sys.stderr.write(
                f"{watch.now_s:.0f} s: {len(watch.removals)} pods removed, {crowd.num_finished} "
                f"sessions, {len(crowd.void)} lost, {len(watch.missed)} looks missed\n"
            )
    assert crowd.void == []
    assert emptiest_first(watch.removals) >= 0.9


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_group_larger_than_a_pod_waits_for_all_the_pods_it_needs(
    release: Installed,
) -> None:
    async with watched(release) as (crowd, watch):
        opened = await crowd.client.open_group(GROUP)
        await eventually(lambda: watch.num_ready >= PODS_OF_GROUP, "what was ready to be seen")
        for session, _ in opened:
            await session.close()


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_session_that_outlives_the_drain_is_void_and_told_so(release: Installed) -> None:
    async with watched(release) as (crowd, watch):
        crowd.shortest_s = crowd.longest_s = 1000.0
        crowd.size = 1
        await eventually(lambda: crowd.servers.total(), "a session")
        kubectl("-n", release.namespace, "delete", "pods", "--wait=false", "-l", ENVIRONMENTS)
        await eventually(lambda: crowd.leaving, "its pod to be told")
        told_s = watch.now_s
        await eventually(lambda: crowd.void, "the end of its drain")
        assert watch.now_s - told_s > 0.9 * DRAIN_S
    assert "session lost" in crowd.void[0]


def turns(watch: Watch) -> int:
    """How often the number of pods that are wanted began to fall, or to rise, after the other."""
    replicas = [int(row[COLUMNS.index("replicas")]) for row in watch.rows]
    changes = [after - before for before, after in itertools.pairwise(replicas) if after != before]
    return sum((one > 0) != (other > 0) for one, other in itertools.pairwise(changes))


def emptiest_first(removals: list[Removal]) -> float:
    """The share of removals after which no pod of lower cost was left."""
    fit = [one.cost <= min(one.kept_costs, default=one.cost) for one in removals]
    return sum(fit) / len(fit)


async def eventually(condition: Callable[[], Any], what: str) -> None:
    """Return once `condition()` holds."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"waited {TIMEOUT_S:.0f} s for {what}")


def _replicas(release: Installed) -> int:
    return int(release.get("deployment", DEPLOYMENT)["spec"]["replicas"])


def _record(name: str, release: Installed, crowd: Crowd, watch: Watch) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    said = {
        "namespace": release.namespace,
        "scaled_object": release.get("scaledobject", DEPLOYMENT)["spec"],
        "sessions": {
            "finished": crowd.num_finished,
            "void": crowd.void,
            "refused": len(crowd.refused),
            "moved": crowd.num_moved,
            "longest_wait_s": round(crowd.longest_wait_s, 1),
        },
        "emptiest_first": round(emptiest_first(watch.removals), 3),
        "removals": [dataclasses.asdict(one) for one in watch.removals],
        "columns": COLUMNS,
    }
    head = json.dumps(said, indent=1)[:-2]
    rows = ",\n".join(json.dumps(row) for row in watch.rows)
    (RESULTS / f"{name}.json").write_text(f'{head},\n "seconds": [\n{rows}\n ]\n}}\n')
