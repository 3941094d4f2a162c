"""Autoscaling with KEDA and the Kubernetes autoscaler for a varying number of players.

Recordings are written to runs/cluster-test/autoscaling*.json. tests/cluster/autoscaling.json is a
copy of one recording. tests/charts/test_autoscaling.py compares the copy with a simulation, and
dev/autoscaling_picture.py draws it.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.transports.address import ConnectOptions
from ludus.services.kubernetes.api import KubernetesApi
from tests.cluster.autoscaling import COLUMNS, LoadGenerator, Recorder, Removal, forward_ports
from tests.cluster.gateway_client import connect_client
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
RESULTS_FOLDER = ROOT / "runs" / "cluster-test"
DEPLOYMENT = "ludus-env-blackjack"
MANY_PLAYERS, FEW_PLAYERS = 36, 10
MANY_PODS, FEW_PODS = 6, 2
"""Number of pods for MANY_PLAYERS and FEW_PLAYERS, at six sessions per pod."""
MIN_SCALE_INS = 200
LONG_TEST_PLAYERS, LONG_TEST_PODS = 54, 9
GROUP_SIZE, GROUP_PODS = 20, 3
"""Group size and the number of pods that the group needs, at eight sessions per pod."""
DRAIN_S = 60
CLIENT_TIMEOUT_S = 180.0
DEFAULT_INTERVALS = {
    "environments.blackjack.autoscaling.pollingSeconds": "5",
    "monitoring.monitors.gatewayInterval": "5s",
}
"""The chart's default intervals, which are longer than those of autoscaling.yaml."""
MAX_FIRST_POD_S = 30.0
SERVER_SELECTOR = "app.kubernetes.io/component=environment"


@pytest.fixture(scope="module")
def release(autoscaled_release: Release) -> Release:
    """Return the release after it has scaled to zero pods."""
    wait_until(
        lambda: _read_replicas(autoscaled_release) == 0, "KEDA to scale to zero pods", 2 * TIMEOUT_S
    )
    return autoscaled_release


@asynccontextmanager
async def run_players(release: Release) -> AsyncIterator[tuple[LoadGenerator, Recorder]]:
    """Start a recorder and a load generator without players; stop both on exit."""
    secret = release.get("secret", "ludus-auth")["data"]["gateway-token"]
    token = base64.b64decode(secret).decode()
    gateways = release.get("pods", "-l", "app.kubernetes.io/component=gateway")["items"]
    pod = gateways[0]["metadata"]["name"]
    async with (
        forward_ports(release.namespace, pod, 18000, 9000) as (grpc_port, admin_port),
        KubernetesApi() as api,
    ):
        generator = LoadGenerator(
            await AsyncEnvClient.connect(
                f"grpc://127.0.0.1:{grpc_port}/blackjack",
                ConnectOptions(token=token, timeout_s=CLIENT_TIMEOUT_S),
            )
        )
        metrics_url = f"http://127.0.0.1:{admin_port}/metrics"
        recorder = Recorder(api, release.namespace, DEPLOYMENT, metrics_url, generator)
        tasks = [asyncio.create_task(generator.run()), asyncio.create_task(recorder.run())]
        try:
            yield generator, recorder
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await generator.client.close()
            if recorder.failures:
                last_failures = "\n".join(recorder.failures[-3:])
                sys.stderr.write(
                    f"{len(recorder.failures)} observations failed. Last errors:\n{last_failures}\n"
                )
        for result in results:
            assert isinstance(result, asyncio.CancelledError), result


@pytest.mark.timeout(900)
async def test_pods_scale_from_zero_and_back_without_lost_sessions(
    release: Release,
) -> None:
    async with run_players(release) as (generator, recorder):
        generator.target_players = 1
        await wait_until_true(lambda: generator.num_finished, "the first finished session")
        generator.target_players = MANY_PLAYERS
        await wait_until_true(lambda: recorder.num_ready >= MANY_PODS, f"{MANY_PODS} ready pods")
        await asyncio.sleep(10)
        generator.target_players = FEW_PLAYERS
        await wait_until_true(lambda: recorder.num_replicas == FEW_PODS, f"{FEW_PODS} pods")
        await asyncio.sleep(15)
        generator.target_players = 0
        await wait_until_true(lambda: recorder.num_replicas == recorder.num_ready == 0, "zero pods")
    _write_recording("autoscaling", release, generator, recorder)
    assert generator.lost_errors == generator.refusals == []
    assert count_direction_changes(recorder) == 1
    assert compute_lowest_cost_share(recorder.removals) >= 0.9


@pytest.mark.timeout(900)
async def test_a_waiting_open_requests_the_first_pod_within_thirty_seconds(
    release: Release,
) -> None:
    release.upgrade(AUTOSCALING_VALUES, DEFAULT_INTERVALS)
    wait_until(lambda: _read_replicas(release) == 0, "KEDA to scale to zero pods", 2 * TIMEOUT_S)
    async with connect_client(release, "blackjack", timeout_s=CLIENT_TIMEOUT_S) as client:
        start_s = time.monotonic()
        open_task = asyncio.create_task(client.open())
        while await asyncio.to_thread(_read_replicas, release) == 0:
            await asyncio.sleep(0.2)
        request_s = time.monotonic() - start_s
        session, _ = await open_task
        open_s = time.monotonic() - start_s
        await session.close()
    sys.stdout.write(f"\nfirst pod requested after {request_s:.1f} s, open after {open_s:.1f} s\n")
    assert request_s < MAX_FIRST_POD_S


@pytest.mark.long
@pytest.mark.timeout(10_000)
async def test_two_hundred_scale_ins_lose_no_session(release: Release) -> None:
    release.upgrade(
        AUTOSCALING_VALUES, {"environments.blackjack.autoscaling.max": str(LONG_TEST_PODS + 1)}
    )
    async with run_players(release) as (generator, recorder):
        while len(recorder.removals) < MIN_SCALE_INS:
            generator.target_players = LONG_TEST_PLAYERS
            await wait_until_true(
                lambda: recorder.num_ready >= LONG_TEST_PODS, f"{LONG_TEST_PODS} ready pods"
            )
            generator.target_players = FEW_PLAYERS
            await wait_until_true(lambda: recorder.num_replicas == FEW_PODS, f"{FEW_PODS} pods")
            _write_recording("autoscaling-long", release, generator, recorder)
            sys.stderr.write(
                f"{recorder.now_s:.0f} s: {len(recorder.removals)} pods removed, "
                f"{generator.num_finished} sessions, {len(generator.lost_errors)} lost, "
                f"{len(recorder.failures)} observations failed\n"
            )
    assert generator.lost_errors == []
    assert compute_lowest_cost_share(recorder.removals) >= 0.9


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_group_larger_than_a_pod_waits_for_enough_pods(
    release: Release,
) -> None:
    async with run_players(release) as (generator, recorder):
        group_sessions = await generator.client.open_group(GROUP_SIZE)
        await wait_until_true(lambda: recorder.num_ready >= GROUP_PODS, f"{GROUP_PODS} ready pods")
        for session, _ in group_sessions:
            await session.close()


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_session_that_outlasts_the_drain_is_notified_and_lost(release: Release) -> None:
    async with run_players(release) as (generator, recorder):
        generator.min_session_s = generator.max_session_s = 1000.0
        generator.target_players = 1
        await wait_until_true(lambda: generator.sessions_by_server.total(), "a session")
        kubectl("-n", release.namespace, "delete", "pods", "--wait=false", "-l", SERVER_SELECTOR)
        await wait_until_true(lambda: generator.terminating_servers, "the pod to start terminating")
        deletion_s = recorder.now_s
        await wait_until_true(lambda: generator.lost_errors, "the session to be lost")
        assert recorder.now_s - deletion_s > 0.9 * DRAIN_S
    assert "session lost" in generator.lost_errors[0]


def count_direction_changes(recorder: Recorder) -> int:
    """Count how often the target number of pods switches between rising and falling."""
    replicas = [int(row[COLUMNS.index("replicas")]) for row in recorder.rows]
    changes = [
        next_count - count
        for count, next_count in itertools.pairwise(replicas)
        if next_count != count
    ]
    return sum(
        (change > 0) != (next_change > 0) for change, next_change in itertools.pairwise(changes)
    )


def compute_lowest_cost_share(removals: list[Removal]) -> float:
    """Return the share of removals that removed a pod with the lowest deletion cost."""
    has_lowest_cost = [
        removal.cost <= min(removal.kept_costs, default=removal.cost) for removal in removals
    ]
    return sum(has_lowest_cost) / len(has_lowest_cost)


async def wait_until_true(condition: Callable[[], Any], goal: str) -> None:
    """Wait until `condition()` is true."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"waited {TIMEOUT_S:.0f} s for {goal}")


def _read_replicas(release: Release) -> int:
    return int(release.get("deployment", DEPLOYMENT)["spec"]["replicas"])


def _write_recording(
    name: str, release: Release, generator: LoadGenerator, recorder: Recorder
) -> None:
    RESULTS_FOLDER.mkdir(parents=True, exist_ok=True)
    recording = {
        "namespace": release.namespace,
        "scaled_object": release.get("scaledobject", DEPLOYMENT)["spec"],
        "sessions": {
            "finished": generator.num_finished,
            "void": generator.lost_errors,
            "refused": len(generator.refusals),
            "moved": generator.num_drained,
            "longest_wait_s": round(generator.max_wait_s, 1),
        },
        "emptiest_first": round(compute_lowest_cost_share(recorder.removals), 3),
        "removals": [dataclasses.asdict(removal) for removal in recorder.removals],
        "columns": COLUMNS,
    }
    header = json.dumps(recording, indent=1)[:-2]
    rows = ",\n".join(json.dumps(row) for row in recorder.rows)
    (RESULTS_FOLDER / f"{name}.json").write_text(f'{header},\n "seconds": [\n{rows}\n ]\n}}\n')
