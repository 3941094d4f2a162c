"""Sandboxes on a real cluster: the warm pool, one session per sandbox, and isolation."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator

import pytest

from ludus.env.client import AsyncSession
from ludus.proto.errors import SessionLostError, UnavailableError
from tests.cluster.client_pod import CONNECTION_PROGRAM, create_python_pod, try_connections
from tests.cluster.gateway_client import connect_client
from tests.cluster.installed import (
    Release,
    create_namespace,
    find_skip_reason,
    install,
    kubectl,
    wait_until,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]
WARM_POOL_SIZE = 4
NUM_OPENS = int(os.environ.get("LUDUS_SANDBOX_OPENS", "10"))
ENVIRONMENT, POOL_NAME = "code", "ludus-env-code"
KUBELET_PORT = "10250"
PUBLIC_ADDRESS = ("1.1.1.1", "443")
VALUES = {
    "image": {"tag": "dev"},
    "auth": {"existingSecret": "ludus-auth"},
    "gateway": {"replicas": 2, "drainSeconds": 30, "resources": {"requests": {"cpu": "50m"}}},
    "environments": {
        ENVIRONMENT: {
            "image": {"repository": "ludus/env-openspiel"},
            "package": "openspiel_env",
            "options": {"game": "blackjack"},
            "mode": "sandbox",
            "capacity": 1,
            "drainSeconds": 5,
            "sandbox": {"warmPool": WARM_POOL_SIZE},
            "resources": {"requests": {"cpu": "10m", "memory": "128Mi"}},
        }
    },
}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    values_path = tmp_path_factory.mktemp("sandbox") / "values.json"
    values_path.write_text(json.dumps(VALUES), encoding="utf-8")
    with install([values_path]) as release:
        wait_until_warm(release, WARM_POOL_SIZE)
        yield release


def wait_until_warm(release: Release, num_sandboxes: int = 1) -> None:
    """Wait until the warm pool has at least `num_sandboxes` ready sandboxes."""

    def is_warm() -> bool:
        (pool,) = release.get("sandboxwarmpools")["items"]
        return int(pool.get("status", {}).get("readyReplicas", 0)) >= num_sandboxes

    wait_until(is_warm, f"{num_sandboxes} sandboxes in the pool")


def find_pod(release: Release, session: AsyncSession) -> str:
    """Return the name of the pod that runs a session."""
    server_id = session.id.split("~")[1]
    pods = release.get("pods", "-l", "app.kubernetes.io/component=environment")["items"]
    assert server_id in [pod["metadata"]["name"] for pod in pods]
    return server_id


async def test_sandbox_pool_is_refilled_after_claims(release: Release) -> None:
    durations_s = []
    async with connect_client(release, ENVIRONMENT) as client:
        for seed in range(NUM_OPENS):
            await asyncio.to_thread(wait_until_warm, release)
            start_s = time.perf_counter()
            session, _ = await client.open(seed=seed)
            durations_s.append(time.perf_counter() - start_s)
            (claim,) = [
                claim
                for claim in release.get("sandboxclaims")["items"]
                if "deletionTimestamp" not in claim["metadata"]
                and claim["status"]["sandbox"]["name"] == find_pod(release, session)
            ]
            assert claim["metadata"]["labels"]["ludus.dev/warm-pool"] == POOL_NAME
            await session.close()
    durations_s.sort()
    sys.stdout.write(
        f"\nopening a session in a sandbox, {NUM_OPENS} times:"
        f" p50 {durations_s[len(durations_s) // 2]:.2f} s,"
        f" p99 {durations_s[int(0.99 * len(durations_s))]:.2f} s\n"
    )
    await asyncio.to_thread(wait_until_warm, release, WARM_POOL_SIZE)
    wait_until(lambda: not release.get("sandboxclaims")["items"], "all claims to be deleted")


async def test_concurrent_gateways_claim_different_sandboxes(release: Release) -> None:
    wait_until_warm(release, WARM_POOL_SIZE)
    gateways = release.get("pods", "-l", "app.kubernetes.io/component=gateway")["items"]
    first_gateway, second_gateway = (f"pod/{pod['metadata']['name']}" for pod in gateways)
    async with (
        connect_client(release, ENVIRONMENT, first_gateway) as first_client,
        connect_client(release, ENVIRONMENT, second_gateway) as second_client,
    ):
        open_calls = [
            client.open(seed=seed)
            for seed in range(WARM_POOL_SIZE)
            for client in (first_client, second_client)
        ]
        sessions = [session for session, _ in await asyncio.gather(*open_calls)]
        assert len({find_pod(release, session) for session in sessions}) == 2 * WARM_POOL_SIZE
        for session in sessions:
            await session.close()
    wait_until(lambda: not release.get("sandboxclaims")["items"], "all claims to be deleted")


async def test_a_dead_sandbox_ends_only_its_session(release: Release) -> None:
    wait_until_warm(release, 3)
    async with connect_client(release, ENVIRONMENT) as client:
        sessions = [(await client.open(seed=seed))[0] for seed in range(3)]
        pods = [find_pod(release, session) for session in sessions]
        assert len(set(pods)) == 3
        kubectl("-n", release.namespace, "delete", "pod", pods[0], "--force", "--grace-period=0")
        with pytest.raises((SessionLostError, UnavailableError)):
            while True:
                await sessions[0].state()
                await asyncio.sleep(0.5)
        for session in sessions[1:]:
            await session.state()
            await session.close()
    wait_until(lambda: not release.get("sandboxclaims")["items"], "all claims to be deleted")


def list_node_addresses() -> list[str]:
    """Return the internal IP addresses of the nodes."""
    address_path = '{.items[*].status.addresses[?(@.type=="InternalIP")].address}'
    return kubectl("get", "nodes", "-o", f"jsonpath={address_path}").split()


def connect_without_policy(*targets: str) -> list[str]:
    """Try connections from a pod in a namespace without policies; return each result.

    The log is read repeatedly, because it can be unavailable for a short time.
    """
    results: list[str] = []

    def is_log_complete() -> bool:
        results[:] = kubectl("-n", test_namespace, "logs", "try").split()
        return len(results) == len(targets) // 2

    with create_namespace() as test_namespace:
        create_python_pod(test_namespace, "try", [CONNECTION_PROGRAM, *targets])
        condition = "--for=jsonpath={.status.phase}=Succeeded"
        kubectl("-n", test_namespace, "wait", "pod/try", condition, "--timeout=120s")
        wait_until(is_log_complete, "the complete log of the connection test", 60)
    return results


async def test_a_sandbox_cannot_open_connections(release: Release) -> None:
    wait_until_warm(release, 2)
    # Sandboxes of earlier sessions may still be stopping, and accept no connections.
    pods = [
        pod for pod in release.get("pods")["items"] if "deletionTimestamp" not in pod["metadata"]
    ]
    addresses = {
        component: [
            pod["status"]["podIP"]
            for pod in pods
            if pod["metadata"]["labels"]["app.kubernetes.io/component"] == component
        ]
        for component in ("gateway", "environment")
    }
    endpoint_slices = json.loads(kubectl("-n", "default", "get", "endpointslices", "-o", "json"))[
        "items"
    ]
    (api_slice,) = [
        make_endpoint_slice
        for make_endpoint_slice in endpoint_slices
        if make_endpoint_slice["metadata"]["name"].startswith("kubernetes")
    ]
    api_address = (api_slice["endpoints"][0]["addresses"][0], str(api_slice["ports"][0]["port"]))
    outside_targets = [(address, KUBELET_PORT) for address in list_node_addresses()] + [
        PUBLIC_ADDRESS
    ]
    results = connect_without_policy(*(word for target in outside_targets for word in target))
    assert results[:-1] == ["reached"] * (len(outside_targets) - 1)
    if results[-1] == "denied":
        sys.stderr.write("SKIPPED, NOT PASSED: pods of this cluster cannot reach the Internet\n")
    async with connect_client(release, ENVIRONMENT) as client:
        session, _ = await client.open(seed=1)
        pod = find_pod(release, session)
        sandbox_address = next(
            pod_object["status"]["podIP"]
            for pod_object in pods
            if pod_object["metadata"]["name"] == pod
        )
        peer_address = next(
            address for address in addresses["environment"] if address != sandbox_address
        )
        inside_targets = [api_address, (peer_address, "18000"), (addresses["gateway"][0], "8000")]
        targets = (*inside_targets, *outside_targets)
        assert try_connections(release.namespace, pod, *targets) == ["denied"] * len(targets)
        # The gateway can open these connections, so the denials above are due to the policy.
        gateway = next(
            gateway_pod
            for gateway_pod in pods
            if gateway_pod["status"]["podIP"] == addresses["gateway"][0]
        )
        gateway_name = gateway["metadata"]["name"]
        permitted_targets = (api_address, (peer_address, "18000"))
        results = try_connections(release.namespace, gateway_name, *permitted_targets)
        assert results == ["reached"] * 2
        await session.close()
