"""A fake agent-sandbox whose warm pool consists of servers in this process."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ludus.env.security.session_ids import derive_server_token
from ludus.env.serving.server import EnvServer
from ludus.services.gateway.kubernetes.sandboxes import API_VERSION
from tests.gateway.cluster_objects import NAMESPACE
from tests.gateway.fake_kubernetes import FakeKubernetes
from tests.gateway.gateways import make_server

POOL = "code"
CLAIMS = (API_VERSION, "sandboxclaims")
POOLS = (API_VERSION, "sandboxwarmpools")
_ADDRESSES = (f"127.0.{i}.{j}" for i in itertools.count(7) for j in range(1, 250))


def find_free_port() -> int:
    """Return a port that is free on all addresses of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class FakeSandboxes:
    """A fake agent-sandbox controller.

    Args:
        has_pool: If False, the cluster has no warm pool.
    """

    def __init__(self, cluster: FakeKubernetes, *, has_pool: bool = True) -> None:
        self.cluster = cluster
        self.port = find_free_port()
        self.fleet_token = ""
        """Token from which the tokens of new servers are derived; empty for no tokens."""
        self.servers: dict[str, EnvServer] = {}
        """Servers by claim name."""
        self.is_empty = False
        """If True, the pool has no free sandbox, so new claims stay unassigned."""
        if has_pool:
            pool = {"name": POOL, "namespace": NAMESPACE}
            cluster.put({"apiVersion": API_VERSION, "kind": "SandboxWarmPool", "metadata": pool})

    @property
    def claims(self) -> list[str]:
        """Names of the existing claims."""
        return [claim["metadata"]["name"] for claim in self.cluster.list_objects(*CLAIMS)]

    @property
    def num_sessions(self) -> int:
        return sum(server.core.load.num_sessions for server in self.servers.values())

    async def replace(self, claim: str) -> None:
        """Replace the pod of a claim, as the controller does after the pod was deleted."""
        old_server = self.servers.pop(claim)
        claim_object = self.cluster.get(*CLAIMS, NAMESPACE, claim)
        assert claim_object is not None
        condition = {
            "type": "Ready",
            "status": "False",
            "message": "Pod exists with phase: Pending",
        }
        self.cluster.put(claim_object | {"status": {"conditions": [condition]}})
        await self._assign(claim)
        await old_server.stop()

    async def __aenter__(self) -> FakeSandboxes:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for server in self.servers.values():
            await server.stop()

    async def _run(self) -> None:
        while True:
            claims = self.claims
            for name in [
                claim for claim in claims if claim not in self.servers and not self.is_empty
            ]:
                await self._assign(name)
            for name in [claim for claim in self.servers if claim not in claims]:
                await self.servers.pop(name).stop()
            await asyncio.sleep(0.005)

    async def _assign(self, name: str) -> None:
        address = next(_ADDRESSES)
        pod_name = f"sandbox-{address}"
        options: dict[str, Any] = {"insecure": True, "max_sessions": 1, "server_id": pod_name}
        if self.fleet_token:
            options["token"] = derive_server_token(self.fleet_token, pod_name)
        server = make_server(host=address, grpc_port=self.port, **options)
        await server.start()
        claim = self.cluster.get(*CLAIMS, NAMESPACE, name)
        if claim is None:
            await server.stop()
            return
        self.servers[name] = server
        condition = {"type": "Ready", "status": "True", "message": "Pod is Ready"}
        sandbox = {"name": pod_name, "podIPs": [address]}
        self.cluster.put(claim | {"status": {"conditions": [condition], "sandbox": sandbox}})


def write_kubeconfig(path: Path, cluster: FakeKubernetes) -> Path:
    """Write a kubeconfig for the fake cluster; return its path."""
    path.write_text(
        f"""
apiVersion: v1
kind: Config
clusters: [{{name: fake, cluster: {{server: "{cluster.url}"}}}}]
users: [{{name: test, user: {{token: a-token}}}}]
contexts: [{{name: fake, context: {{cluster: fake, user: test}}}}]
current-context: fake
""",
        encoding="utf-8",
    )
    return path


@asynccontextmanager
async def run_sandboxes(*, has_pool: bool = True) -> AsyncIterator[FakeSandboxes]:
    """Run a fake cluster with agent-sandbox; yield the controller."""
    async with (
        FakeKubernetes() as cluster,
        FakeSandboxes(cluster, has_pool=has_pool) as fake_sandboxes,
    ):
        yield fake_sandboxes
