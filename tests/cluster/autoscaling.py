"""Players on an environment that scales, and a record of its pods during play.

    Crowd --sessions--> gateway --> pods
    Recorder --each second--> a row of numbers, and a Removal for each pod that starts to terminate

The players connect through `kubectl port-forward`, which works on every cluster and bypasses every
NetworkPolicy.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ludus.env.client import AsyncEnvClient, AsyncSession
from ludus.env.security.session_ids import make_pod_server_id
from ludus.proto.errors import ClusterError, EnvError, InfrastructureError
from ludus.services.kubernetes.api import KubernetesApi, make_resource_path

COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
COLUMNS = (
    *("at_s", "players", "playing"),
    *("pending", "active", "draining"),
    *("replicas", "ready", "terminating", "void"),
)
"""Columns of a row. The gateway counts pending and active sessions, and those on draining pods."""
_STEP_S = 0.5
_FORWARDING_PATTERN = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+) -> (\d+)")


@dataclass(frozen=True, slots=True)
class Removal:
    """A pod that a scale-in removes, and the pods that it keeps."""

    at_s: float
    num_sessions: int
    cost: int
    kept_sessions: tuple[int, ...]
    kept_costs: tuple[int, ...]


@dataclass(slots=True)
class Crowd:
    """A number of concurrent players, each with a session for a few seconds."""

    client: AsyncEnvClient
    min_session_s: float = 4.0
    max_session_s: float = 12.0
    size: int = 0
    """Number of concurrent players. A new player replaces each player who leaves."""
    servers: Counter[str] = field(default_factory=Counter)
    """Open sessions by server."""
    num_finished: int = 0
    num_moved: int = 0
    """Number of sessions that ended normally on a pod that was being removed."""
    lost_errors: list[str] = field(default_factory=list)
    """Errors of the sessions that were lost."""
    refusals: list[str] = field(default_factory=list)
    """Errors of the players who got no session."""
    max_wait_s: float = 0.0
    leaving_servers: set[str] = field(default_factory=set)
    """Servers whose pods are being removed."""
    _rng: random.Random = field(default_factory=lambda: random.Random(11))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Keep `size` players in play until canceled."""
        try:
            while True:
                for _ in range(self.size - len(self._tasks)):
                    task = asyncio.create_task(self._play())
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                await asyncio.sleep(0.1)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_players(self) -> int:
        """Number of players who play or wait."""
        return len(self._tasks)

    async def _play(self) -> None:
        duration_s = self._rng.uniform(self.min_session_s, self.max_session_s)
        start_s = time.monotonic()
        try:
            session, _ = await self.client.open()
        except EnvError as error:
            self.refusals.append(str(error))
            return
        self.max_wait_s = max(self.max_wait_s, time.monotonic() - start_s)
        server = session.id.split("~")[1]
        self.servers[server] += 1
        try:
            await self._take_steps(session, time.monotonic() + duration_s)
        except InfrastructureError as error:
            pod_state = "that is removed" if server in self.leaving_servers else "that stays"
            self.lost_errors.append(f"on a pod {pod_state}: {error}")
        else:
            self.num_finished += 1
            self.num_moved += server in self.leaving_servers
        finally:
            self.servers[server] -= 1

    async def _take_steps(self, session: AsyncSession, deadline_s: float) -> None:
        async with session:
            while time.monotonic() < deadline_s:
                await asyncio.sleep(_STEP_S)
                result = await session.step(text="STAND")
                if result.done:
                    await session.reset()


class Recorder:
    """A recorder of an environment's state, once per second.

    Args:
        environment: name of the environment's Deployment.
        metrics: metrics address of the gateway that the players use.
    """

    def __init__(
        self, api: KubernetesApi, namespace: str, environment: str, metrics_url: str, crowd: Crowd
    ) -> None:
        self._api, self._namespace, self._name = api, namespace, environment
        self._metrics_url, self._crowd = metrics_url, crowd
        self._start_s = time.monotonic()
        self.rows: list[tuple[float, ...]] = []
        self.removals: list[Removal] = []
        self.failures: list[str] = []
        """Errors of the observations that failed."""
        self.num_ready = self.num_replicas = 0

    @property
    def now_s(self) -> float:
        """Seconds since the first observation."""
        return time.monotonic() - self._start_s

    async def run(self) -> None:
        """Record observations until canceled."""
        async with aiohttp.ClientSession() as http:
            while True:
                start_s = time.monotonic()
                # A failed observation leaves out one row.
                try:
                    await self._observe(http)
                except (ClusterError, aiohttp.ClientError, TimeoutError) as error:
                    self.failures.append(f"{self.now_s:.0f} s: {error!r}")
                await asyncio.sleep(max(0.0, start_s + 1 - time.monotonic()))

    async def _observe(self, http: aiohttp.ClientSession) -> None:
        at_s = round(self.now_s, 1)
        query = {"labelSelector": "app.kubernetes.io/component=environment"}
        pods_path = make_resource_path("v1", self._namespace, "pods")
        deployment_path = make_resource_path("apps/v1", self._namespace, "deployments", self._name)
        pods, deployment, session_counts = await asyncio.gather(
            self._api.read(pods_path, query),
            self._api.read(deployment_path),
            self._read_session_counts(http),
        )
        self.num_replicas = deployment["spec"]["replicas"]
        self.num_ready = deployment["status"].get("readyReplicas", 0)
        self._record_removals(at_s, pods["items"])
        self.rows.append(
            (
                *(at_s, self._crowd.num_players, sum(self._crowd.servers.values())),
                *(session_counts.get(state, 0) for state in ("pending", "active", "draining")),
                *(self.num_replicas, self.num_ready, len(self._crowd.leaving_servers)),
                len(self._crowd.lost_errors),
            )
        )

    async def _read_session_counts(self, http: aiohttp.ClientSession) -> dict[str, int]:
        async with http.get(self._metrics_url) as response:
            text = await response.text()
        samples = re.findall(
            r'^ludus_gateway_sessions\{.*state="(\w+)"\} (\S+)$', text, re.MULTILINE
        )
        return {state: int(float(value)) for state, value in samples}

    def _record_removals(self, at_s: float, pods: list[dict[str, Any]]) -> None:
        kept_loads, removed_loads, leaving_servers = [], [], set()
        for pod in pods:
            metadata = pod["metadata"]
            server = make_pod_server_id(metadata["uid"])
            cost = int(metadata.get("annotations", {}).get(COST_ANNOTATION, 0))
            load = (self._crowd.servers[server], cost)
            if "deletionTimestamp" not in metadata:
                kept_loads.append(load)
                continue
            leaving_servers.add(server)
            if server not in self._crowd.leaving_servers:
                removed_loads.append(load)
        self._crowd.leaving_servers.clear()
        self._crowd.leaving_servers.update(leaving_servers)
        sessions, costs = (
            (tuple(column) for column in zip(*kept_loads, strict=True)) if kept_loads else ((), ())
        )
        self.removals += [
            Removal(at_s, num_sessions, cost, sessions, costs)
            for num_sessions, cost in removed_loads
        ]


@asynccontextmanager
async def forward_ports(namespace: str, pod: str, *ports: int) -> AsyncIterator[list[int]]:
    """Forward local ports to ports of a pod until the context exits; yield the local ports.

    kubectl closes a tunnel when one of its connections fails, which happens within an hour. The
    tunnel is then reopened on the same ports, and clients reconnect to their sessions.
    """
    remote_ports = [f":{port}" for port in ports]
    process, assigned_ports = await _open_tunnel(namespace, pod, remote_ports)
    local_ports = [assigned_ports[port] for port in ports]
    port_pairs = [f"{assigned_ports[port]}:{port}" for port in ports]

    async def reopen_forever() -> None:
        nonlocal process
        while True:
            assert process.stdout is not None
            await process.stdout.read()  # one line per connection, until kubectl exits
            await process.wait()
            sys.stderr.write("kubectl port-forward has ended; it is started again\n")
            process, _ = await _open_tunnel(namespace, pod, port_pairs)

    reopen_task = asyncio.create_task(reopen_forever())
    try:
        yield local_ports
    finally:
        reopen_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reopen_task
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _open_tunnel(
    namespace: str, pod: str, ports: Sequence[str]
) -> tuple[asyncio.subprocess.Process, dict[int, int]]:
    """Start kubectl; return it once it forwards, and the local port for each port of the pod."""
    process = await asyncio.create_subprocess_exec(
        *("kubectl", "-n", namespace, "port-forward", pod, *ports),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assigned_ports: dict[int, int] = {}
    while len(assigned_ports) < len(ports):
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        assert line, "kubectl port-forward has ended"
        if match := _FORWARDING_PATTERN.search(line):
            assigned_ports[int(match[2])] = int(match[1])
    return process, assigned_ports
