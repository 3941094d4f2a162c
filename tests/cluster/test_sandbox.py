"""Sandboxes on a real cluster: the warm pool, one session per sandbox, and isolation."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from ludus.env.client import AsyncEnvClient, AsyncSession, ConnectOptions
from ludus.env.security.session_ids import make_pod_server_id
from ludus.proto.errors import SessionLostError, UnavailableError
from tests.cluster.installed import (
    Release,
    create_namespace,
    create_object,
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
POOL_NAME = "ludus-env-code"
KUBELET_PORT = "10250"
PUBLIC_ADDRESS = ("1.1.1.1", "443")
VALUES = {
    "image": {"tag": "dev"},
    "auth": {"existingSecret": "ludus-auth"},
    "gateway": {"replicas": 2, "drainSeconds": 30, "resources": {"requests": {"cpu": "50m"}}},
    "environments": {
        "code": {
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
CONNECTION_PROGRAM = """
import socket, sys
for host, port in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        print("reached")
    except OSError as error:
        print("denied")
"""


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


@asynccontextmanager
async def connect_client(
    release: Release, gateway: str = "service/ludus-gateway"
) -> AsyncIterator[AsyncEnvClient]:
    """Connect a client to one of the gateways through a kubectl tunnel."""
    command = ["kubectl", "-n", release.namespace, "port-forward", gateway, ":18000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            match = re.search(r":(\d+) ->", process.stdout.readline())
            assert match is not None, "kubectl port-forward printed no port"
            secret = release.get("secret", "ludus-auth")["data"]["gateway-token"]
            token = base64.b64decode(secret).decode()
            address = f"grpc://127.0.0.1:{match[1]}/code"
            async with await AsyncEnvClient.connect(address, ConnectOptions(token=token)) as client:
                yield client
        finally:
            process.terminate()


def find_pod(release: Release, session: AsyncSession) -> str:
    """Return the name of the pod that runs a session."""
    server_id = session.id.split("~")[1]
    for pod in release.get("pods", "-l", "app.kubernetes.io/component=environment")["items"]:
        if make_pod_server_id(pod["metadata"]["uid"]) == server_id:
            return str(pod["metadata"]["name"])
    raise AssertionError(f"no pod runs server {server_id}")


async def test_sandbox_pool_is_refilled_after_claims(release: Release) -> None:
    durations_s = []
    async with connect_client(release) as client:
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
        connect_client(release, first_gateway) as first_client,
        connect_client(release, second_gateway) as second_client,
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
    async with connect_client(release) as client:
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

    container = {
        "name": "try",
        "image": "docker.io/ludus/gateway:dev",
        "command": ["python", "-c", CONNECTION_PROGRAM, *targets],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    with create_namespace() as test_namespace:
        spec = {"restartPolicy": "Never", "containers": [container]}
        create_object("v1", "Pod", "try", test_namespace, spec=spec)
        condition = "--for=jsonpath={.status.phase}=Succeeded"
        kubectl("-n", test_namespace, "wait", "pod/try", condition, "--timeout=120s")
        wait_until(is_log_complete, "the complete log of the connection test", 60)
    return results


async def test_a_sandbox_cannot_open_connections(release: Release) -> None:
    wait_until_warm(release, 2)
    pods = release.get("pods")["items"]
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
    async with connect_client(release) as client:
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
        targets = [word for target in (*inside_targets, *outside_targets) for word in target]

        def try_connections(pod_name: str, *endpoints: str) -> list[str]:
            exec_command = ("exec", pod_name, "--", "python", "-c", CONNECTION_PROGRAM, *endpoints)
            return kubectl("-n", release.namespace, *exec_command).split()

        assert try_connections(pod, *targets) == ["denied"] * len(
            (*inside_targets, *outside_targets)
        )
        # The gateway can open these connections, so the denials above are due to the policy.
        gateway = next(
            gateway_pod
            for gateway_pod in pods
            if gateway_pod["status"]["podIP"] == addresses["gateway"][0]
        )
        gateway_name = gateway["metadata"]["name"]
        assert try_connections(gateway_name, *api_address, peer_address, "18000") == ["reached"] * 2
        await session.close()
