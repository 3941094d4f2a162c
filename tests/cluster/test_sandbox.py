"""Sandboxes on a real cluster: one for each session, from a warm pool, and shut in."""

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
from ludus.env.security.session_ids import pod_server_id
from ludus.proto.errors import SessionLostError, UnavailableError
from tests.cluster.installed import (
    Installed,
    create,
    installed,
    kubectl,
    namespace,
    until,
    why_not,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
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
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    file = tmp_path_factory.mktemp("sandbox") / "values.json"
    file.write_text(json.dumps(VALUES), encoding="utf-8")
    with installed([file]) as found:
        wait_until_warm(found, NUM_WARM)
        yield found


def wait_until_warm(release: Installed, num_sandboxes: int = 1) -> None:
    """Return once so many sandboxes wait to be claimed."""

    def is_warm() -> bool:
        (pool,) = release.get("sandboxwarmpools")["items"]
        return int(pool.get("status", {}).get("readyReplicas", 0)) >= num_sandboxes

    until(is_warm, f"{num_sandboxes} sandboxes in the pool")


@asynccontextmanager
async def client_of(
    release: Installed, gateway: str = "service/ludus-gateway"
) -> AsyncIterator[AsyncEnvClient]:
    """A client of one of the gateways, through a tunnel of kubectl."""
    command = ["kubectl", "-n", release.namespace, "port-forward", gateway, ":18000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as tunnel:
        try:
            assert tunnel.stdout is not None
            found = re.search(r":(\d+) ->", tunnel.stdout.readline())
            assert found is not None, "kubectl port-forward names no port"
            secret = release.get("secret", "ludus-auth")["data"]["gateway-token"]
            token = base64.b64decode(secret).decode()
            address = f"grpc://127.0.0.1:{found[1]}/code"
            async with await AsyncEnvClient.connect(address, ConnectOptions(token=token)) as client:
                yield client
        finally:
            tunnel.terminate()


def pod_of(release: Installed, session: AsyncSession) -> str:
    """The pod of a session's sandbox."""
    server_id = session.id.split("~")[1]
    for pod in release.get("pods", "-l", "app.kubernetes.io/component=environment")["items"]:
        if pod_server_id(pod["metadata"]["uid"]) == server_id:
            return str(pod["metadata"]["name"])
    raise AssertionError(f"no pod has the server {server_id}")


async def test_sessions_are_claimed_from_a_pool_that_is_filled_again(release: Installed) -> None:
    took_s = []
    async with client_of(release) as client:
        for seed in range(NUM_OPENS):
            await asyncio.to_thread(wait_until_warm, release)
            started_s = time.perf_counter()
            session, _ = await client.open(seed=seed)
            took_s.append(time.perf_counter() - started_s)
            (claim,) = [
                one
                for one in release.get("sandboxclaims")["items"]
                if "deletionTimestamp" not in one["metadata"]
                and one["status"]["sandbox"]["name"] == pod_of(release, session)
            ]
            assert claim["metadata"]["labels"]["ludus.dev/warm-pool"] == POOL
            await session.close()
    took_s.sort()
    sys.stdout.write(
        f"\nopening a session in a sandbox, {NUM_OPENS} times:"
        f" p50 {took_s[len(took_s) // 2]:.2f} s, p99 {took_s[int(0.99 * len(took_s))]:.2f} s\n"
    )
    await asyncio.to_thread(wait_until_warm, release, NUM_WARM)
    until(lambda: not release.get("sandboxclaims")["items"], "every claim to be given up")


async def test_gateways_that_claim_at_once_share_no_sandbox(release: Installed) -> None:
    wait_until_warm(release, NUM_WARM)
    gateways = release.get("pods", "-l", "app.kubernetes.io/component=gateway")["items"]
    first, second = (f"pod/{pod['metadata']['name']}" for pod in gateways)
    async with client_of(release, first) as one, client_of(release, second) as other:
        opens = [client.open(seed=seed) for seed in range(NUM_WARM) for client in (one, other)]
        sessions = [session for session, _ in await asyncio.gather(*opens)]
        assert len({pod_of(release, session) for session in sessions}) == 2 * NUM_WARM
        for session in sessions:
            await session.close()
    until(lambda: not release.get("sandboxclaims")["items"], "every claim to be given up")


async def test_a_sandbox_that_dies_takes_its_own_session_alone(release: Installed) -> None:
    wait_until_warm(release, 3)
    async with client_of(release) as client:
        sessions = [(await client.open(seed=seed))[0] for seed in range(3)]
        pods = [pod_of(release, session) for session in sessions]
        assert len(set(pods)) == 3
        kubectl("-n", release.namespace, "delete", "pod", pods[0], "--force", "--grace-period=0")
        with pytest.raises((SessionLostError, UnavailableError)):
            while True:
                await sessions[0].state()
                await asyncio.sleep(0.5)
        for session in sessions[1:]:
            await session.state()
            await session.close()
    until(lambda: not release.get("sandboxclaims")["items"], "every claim to be given up")


def node_addresses() -> list[str]:
    """Where the nodes are, in the network that the pods' is not."""
    internal = '{.items[*].status.addresses[?(@.type=="InternalIP")].address}'
    return kubectl("get", "nodes", "-o", f"jsonpath={internal}").split()


def tried_without_policy(*targets: str) -> list[str]:
    """What a pod of another namespace reaches, where no policy is.

    A node may say for a moment that it cannot open a log.
    """
    told: list[str] = []

    def all_told() -> bool:
        told[:] = kubectl("-n", place, "logs", "try").split()
        return len(told) == len(targets) // 2

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
    with namespace() as place:
        spec = {"restartPolicy": "Never", "containers": [container]}
        create("v1", "Pod", "try", place, spec=spec)
        done = "--for=jsonpath={.status.phase}=Succeeded"
        kubectl("-n", place, "wait", "pod/try", done, "--timeout=120s")
        until(all_told, "the log of what was reached", 60)
    return told


async def test_a_sandbox_reaches_nobody(release: Installed) -> None:
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
    (api,) = [one for one in slices if one["metadata"]["name"].startswith("kubernetes")]
    api_address = (api["endpoints"][0]["addresses"][0], str(api["ports"][0]["port"]))
    outside = [(address, KUBELET) for address in node_addresses()] + [SOMEWHERE]
    reached = tried_without_policy(*(word for target in outside for word in target))
    assert reached[:-1] == ["reached"] * (len(outside) - 1)
    if reached[-1] == "denied":
        sys.stderr.write("SKIPPED, NOT PASSED: no pod of this cluster reaches the Internet\n")
    async with client_of(release) as client:
        session, _ = await client.open(seed=1)
        pod = pod_of(release, session)
        own = next(one["status"]["podIP"] for one in pods if one["metadata"]["name"] == pod)
        other = next(one for one in addresses["environment"] if one != own)
        inside = [api_address, (other, "18000"), (addresses["gateway"][0], "8000")]
        targets = [word for target in (*inside, *outside) for word in target]

        def tried_from(name: str, *where: str) -> list[str]:
            run = ("exec", name, "--", "python", "-c", TRY, *where)
            return kubectl("-n", release.namespace, *run).split()

        assert tried_from(pod, *targets) == ["denied"] * len((*inside, *outside))
        # What the gateway may, the same way: it is not the way that fails.
        gateway = next(p for p in pods if p["status"]["podIP"] == addresses["gateway"][0])
        name = gateway["metadata"]["name"]
        assert tried_from(name, *api_address, other, "18000") == ["reached"] * 2
        await session.close()
