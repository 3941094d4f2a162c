"""Sandboxes on a real cluster: one per session, from a warm pool, and isolated."""

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
    create,
    find_skip_reason,
    install,
    kubectl,
    namespace,
    wait_until,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]
NUM_WARM = 4
NUM_OPENS = int(os.environ.get("LUDUS_SANDBOX_OPENS", "10"))
POOL = "ludus-env-code"
KUBELET = "10250"
SOMEWHERE = ("1.1.1.1", "443")
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
            "sandbox": {"warmPool": NUM_WARM},
            "resources": {"requests": {"cpu": "10m", "memory": "128Mi"}},
        }
    },
}
TRY = """
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
    file = tmp_path_factory.mktemp("sandbox") / "values.json"
    file.write_text(json.dumps(VALUES), encoding="utf-8")
    with install([file]) as release:
        wait_until_warm(release, NUM_WARM)
        yield release


def wait_until_warm(release: Release, num_sandboxes: int = 1) -> None:
    """Wait until this number of sandboxes is ready to be claimed."""

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
    ) as tunnel:
        try:
            assert tunnel.stdout is not None
            match = re.search(r":(\d+) ->", tunnel.stdout.readline())
            assert match is not None, "kubectl port-forward printed no port"
            secret = release.get("secret", "ludus-auth")["data"]["gateway-token"]
            token = base64.b64decode(secret).decode()
            address = f"grpc://127.0.0.1:{match[1]}/code"
            async with await AsyncEnvClient.connect(address, ConnectOptions(token=token)) as client:
                yield client
        finally:
            tunnel.terminate()


def find_pod(release: Release, session: AsyncSession) -> str:
    """Return the name of the pod of a session's sandbox."""
    server_id = session.id.split("~")[1]
    for pod in release.get("pods", "-l", "app.kubernetes.io/component=environment")["items"]:
        if make_pod_server_id(pod["metadata"]["uid"]) == server_id:
            return str(pod["metadata"]["name"])
    raise AssertionError(f"no pod has the server {server_id}")


async def test_the_pool_is_refilled_after_claims(release: Release) -> None:
    took_s = []
    async with connect_client(release) as client:
        for seed in range(NUM_OPENS):
            await asyncio.to_thread(wait_until_warm, release)
            started_s = time.perf_counter()
            session, _ = await client.open(seed=seed)
            took_s.append(time.perf_counter() - started_s)
            (claim,) = [
                claim
                for claim in release.get("sandboxclaims")["items"]
                if "deletionTimestamp" not in claim["metadata"]
                and claim["status"]["sandbox"]["name"] == find_pod(release, session)
            ]
            assert claim["metadata"]["labels"]["ludus.dev/warm-pool"] == POOL
            await session.close()
    took_s.sort()
    sys.stdout.write(
        f"\nopening a session in a sandbox, {NUM_OPENS} times:"
        f" p50 {took_s[len(took_s) // 2]:.2f} s, p99 {took_s[int(0.99 * len(took_s))]:.2f} s\n"
    )
    await asyncio.to_thread(wait_until_warm, release, NUM_WARM)
    wait_until(lambda: not release.get("sandboxclaims")["items"], "every claim to be given up")


async def test_concurrent_gateways_share_no_sandbox(release: Release) -> None:
    wait_until_warm(release, NUM_WARM)
    gateways = release.get("pods", "-l", "app.kubernetes.io/component=gateway")["items"]
    first_gateway, second_gateway = (f"pod/{pod['metadata']['name']}" for pod in gateways)
    async with (
        connect_client(release, first_gateway) as first_client,
        connect_client(release, second_gateway) as second_client,
    ):
        opens = [
            client.open(seed=seed)
            for seed in range(NUM_WARM)
            for client in (first_client, second_client)
        ]
        sessions = [session for session, _ in await asyncio.gather(*opens)]
        assert len({find_pod(release, session) for session in sessions}) == 2 * NUM_WARM
        for session in sessions:
            await session.close()
    wait_until(lambda: not release.get("sandboxclaims")["items"], "every claim to be given up")


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
    wait_until(lambda: not release.get("sandboxclaims")["items"], "every claim to be given up")


def node_addresses() -> list[str]:
    """Return the addresses of the nodes, which are outside the pods' network."""
    internal = '{.items[*].status.addresses[?(@.type=="InternalIP")].address}'
    return kubectl("get", "nodes", "-o", f"jsonpath={internal}").split()


def try_without_policy(*targets: str) -> list[str]:
    """Try connections from a pod in a namespace without policies; return each result.

    A node may briefly report that it cannot open a log.
    """
    results: list[str] = []

    def is_log_complete() -> bool:
        results[:] = kubectl("-n", test_namespace, "logs", "try").split()
        return len(results) == len(targets) // 2

    container = {
        "name": "try",
        "image": "docker.io/ludus/gateway:dev",
        "command": ["python", "-c", TRY, *targets],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    with namespace() as test_namespace:
        spec = {"restartPolicy": "Never", "containers": [container]}
        create("v1", "Pod", "try", test_namespace, spec=spec)
        condition = "--for=jsonpath={.status.phase}=Succeeded"
        kubectl("-n", test_namespace, "wait", "pod/try", condition, "--timeout=120s")
        wait_until(is_log_complete, "the log of the connections", 60)
    return results


async def test_a_sandbox_cannot_open_connections(release: Release) -> None:
    wait_until_warm(release, 2)
    pods = release.get("pods")["items"]
    addresses = {
        part: [
            pod["status"]["podIP"]
            for pod in pods
            if pod["metadata"]["labels"]["app.kubernetes.io/component"] == part
        ]
        for part in ("gateway", "environment")
    }
    slices = json.loads(kubectl("-n", "default", "get", "endpointslices", "-o", "json"))["items"]
    (api,) = [
        endpoint_slice
        for endpoint_slice in slices
        if endpoint_slice["metadata"]["name"].startswith("kubernetes")
    ]
    api_address = (api["endpoints"][0]["addresses"][0], str(api["ports"][0]["port"]))
    outside = [(address, KUBELET) for address in node_addresses()] + [SOMEWHERE]
    reached = try_without_policy(*(word for target in outside for word in target))
    assert reached[:-1] == ["reached"] * (len(outside) - 1)
    if reached[-1] == "denied":
        sys.stderr.write("SKIPPED, NOT PASSED: no pod of this cluster reaches the Internet\n")
    async with connect_client(release) as client:
        session, _ = await client.open(seed=1)
        pod = find_pod(release, session)
        own_address = next(
            pod_object["status"]["podIP"]
            for pod_object in pods
            if pod_object["metadata"]["name"] == pod
        )
        other_address = next(
            address for address in addresses["environment"] if address != own_address
        )
        inside = [api_address, (other_address, "18000"), (addresses["gateway"][0], "8000")]
        targets = [word for target in (*inside, *outside) for word in target]

        def try_connections(name: str, *endpoints: str) -> list[str]:
            run = ("exec", name, "--", "python", "-c", TRY, *endpoints)
            return kubectl("-n", release.namespace, *run).split()

        assert try_connections(pod, *targets) == ["denied"] * len((*inside, *outside))
        # The gateway can open the same connections, so the method works.
        gateway = next(p for p in pods if p["status"]["podIP"] == addresses["gateway"][0])
        name = gateway["metadata"]["name"]
        assert try_connections(name, *api_address, other_address, "18000") == ["reached"] * 2
        await session.close()
