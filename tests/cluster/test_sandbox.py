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

from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.security.session_ids import server_id_of
from ludus.proto.errors import SessionLostError, UnavailableError
from tests.cluster.installed import Installed, installed, kubectl, until, why_not

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
NUM_WARM = 4
NUM_OPENS = int(os.environ.get("LUDUS_SANDBOX_OPENS", "10"))
POOL = "ludus-env-code"
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
async def client_of(release: Installed) -> AsyncIterator[AsyncEnvClient]:
    """A client of one of the gateways, through a tunnel of kubectl."""
    command = [
        "kubectl",
        "-n",
        release.namespace,
        "port-forward",
        "service/ludus-gateway",
        ":18000",
    ]
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
            async with await AsyncEnvClient.connect(address, token=token) as client:
                yield client
        finally:
            tunnel.terminate()


def pod_of(release: Installed, session: AsyncSession) -> str:
    """The pod of a session's sandbox."""
    server_id = session.id.split("~")[1]
    for pod in release.get("pods", "-l", "app.kubernetes.io/component=environment")["items"]:
        if server_id_of(pod["metadata"]["uid"]) == server_id:
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
    async with client_of(release) as client:
        session, _ = await client.open(seed=1)
        pod = pod_of(release, session)
        own = next(one["status"]["podIP"] for one in pods if one["metadata"]["name"] == pod)
        other = next(one for one in addresses["environment"] if one != own)
        targets = [*api_address, other, "18000", addresses["gateway"][0], "8000", "1.1.1.1", "443"]

        def tried_from(name: str, *where: str) -> list[str]:
            run = ("exec", name, "--", "python", "-c", TRY, *where)
            return kubectl("-n", release.namespace, *run).split()

        assert tried_from(pod, *targets) == ["denied"] * 4
        # What the gateway may, the same way: it is not the way that fails.
        gateway = next(p for p in pods if p["status"]["podIP"] == addresses["gateway"][0])
        name = gateway["metadata"]["name"]
        assert tried_from(name, *api_address, other, "18000") == ["reached"] * 2
        await session.close()
