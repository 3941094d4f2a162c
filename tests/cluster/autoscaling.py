"""Players of an autoscaled environment, and a recorder of its pods.

    LoadGenerator --sessions--> gateway --> pods
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
"""Column names of a row. `pending`, `active` and `draining` count sessions in the gateway."""
_STEP_S = 0.5
_FORWARDING_PATTERN = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+) -> (\d+)")


@dataclass(frozen=True, slots=True)
class Removal:
    """A pod removed by a scale-in, with the sessions and deletion costs of the remaining pods."""

    at_s: float
    num_sessions: int
    cost: int
    kept_sessions: tuple[int, ...]
    kept_costs: tuple[int, ...]


@dataclass(slots=True)
class LoadGenerator:
    """A variable number of concurrent players, each with a session of a few seconds."""

    client: AsyncEnvClient
    min_session_s: float = 4.0
    max_session_s: float = 12.0
    target_players: int = 0
    """Target number of concurrent players. A new player replaces each player who finishes."""
    sessions_by_server: Counter[str] = field(default_factory=Counter)
    """Number of open sessions of each server."""
    num_finished: int = 0
    num_drained: int = 0
    """Number of sessions that ended normally on a terminating pod."""
    lost_errors: list[str] = field(default_factory=list)
    """Errors of lost sessions."""
    refusals: list[str] = field(default_factory=list)
    """Errors of sessions that could not be opened."""
    max_wait_s: float = 0.0
    terminating_servers: set[str] = field(default_factory=set)
    """Servers whose pods are terminating."""
    _rng: random.Random = field(default_factory=lambda: random.Random(11))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Run `target_players` concurrent players until canceled."""
        try:
            while True:
                for _ in range(self.target_players - len(self._tasks)):
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
        """Number of players with an open or a pending session."""
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
        self.sessions_by_server[server] += 1
        try:
            await self._take_steps(session, time.monotonic() + duration_s)
        except InfrastructureError as error:
            pod_state = "terminating" if server in self.terminating_servers else "running"
            self.lost_errors.append(f"on a {pod_state} pod: {error}")
        else:
            self.num_finished += 1
            self.num_drained += server in self.terminating_servers
        finally:
            self.sessions_by_server[server] -= 1

    async def _take_steps(self, session: AsyncSession, deadline_s: float) -> None:
        async with session:
            while time.monotonic() < deadline_s:
                await asyncio.sleep(_STEP_S)
                result = await session.step(text="STAND")
                if result.done:
                    await session.reset()


class Recorder:
    """A recorder of an environment's pods and sessions, with one row per second.

    Args:
        deployment: name of the environment's Deployment.
        metrics_url: metrics address of the gateway that the players use.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        deployment: str,
        metrics_url: str,
        generator: LoadGenerator,
    ) -> None:
        self._api, self._namespace, self._deployment = api, namespace, deployment
        self._metrics_url, self._generator = metrics_url, generator
        self._start_s = time.monotonic()
        self.rows: list[tuple[float, ...]] = []
        self.removals: list[Removal] = []
        self.failures: list[str] = []
        """Errors of failed observations."""
        self.num_ready = self.num_replicas = 0

    @property
    def now_s(self) -> float:
        """Seconds since the recorder was created."""
        return time.monotonic() - self._start_s

    async def run(self) -> None:
        """Record observations until canceled."""
        async with aiohttp.ClientSession() as http:
            while True:
                start_s = time.monotonic()
                # A failed observation adds no row.
                try:
                    await self._observe(http)
                except (ClusterError, aiohttp.ClientError, TimeoutError) as error:
                    self.failures.append(f"{self.now_s:.0f} s: {error!r}")
                await asyncio.sleep(max(0.0, start_s + 1 - time.monotonic()))

    async def _observe(self, http: aiohttp.ClientSession) -> None:
        at_s = round(self.now_s, 1)
        query = {"labelSelector": "app.kubernetes.io/component=environment"}
        pods_path = make_resource_path("v1", self._namespace, "pods")
        deployment_path = make_resource_path(
            "apps/v1", self._namespace, "deployments", self._deployment
        )
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
                *(
                    at_s,
                    self._generator.num_players,
                    sum(self._generator.sessions_by_server.values()),
                ),
                *(session_counts.get(state, 0) for state in ("pending", "active", "draining")),
                *(self.num_replicas, self.num_ready, len(self._generator.terminating_servers)),
                len(self._generator.lost_errors),
            )
        )

    async def _read_session_counts(self, http: aiohttp.ClientSession) -> dict[str, int]:
        async with http.get(self._metrics_url) as response:
            metrics_text = await response.text()
        samples = re.findall(
            r'^ludus_gateway_sessions\{.*state="(\w+)"\} (\S+)$', metrics_text, re.MULTILINE
        )
        return {state: int(float(value)) for state, value in samples}

    def _record_removals(self, at_s: float, pods: list[dict[str, Any]]) -> None:
        kept_loads, removed_loads, terminating_servers = [], [], set()
        for pod in pods:
            metadata = pod["metadata"]
            server = make_pod_server_id(metadata["uid"])
            cost = int(metadata.get("annotations", {}).get(COST_ANNOTATION, 0))
            load = (self._generator.sessions_by_server[server], cost)
            if "deletionTimestamp" not in metadata:
                kept_loads.append(load)
                continue
            terminating_servers.add(server)
            if server not in self._generator.terminating_servers:
                removed_loads.append(load)
        self._generator.terminating_servers.clear()
        self._generator.terminating_servers.update(terminating_servers)
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
            await process.stdout.read()  # kubectl prints one line per connection until it exits
            await process.wait()
            sys.stderr.write("kubectl port-forward exited; restarting it\n")
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
    """Start kubectl port-forward; return the process and the local port of each pod port."""
    process = await asyncio.create_subprocess_exec(
        *("kubectl", "-n", namespace, "port-forward", pod, *ports),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assigned_ports: dict[int, int] = {}
    while len(assigned_ports) < len(ports):
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        assert line, "kubectl port-forward exited before it forwarded all ports"
        if match := _FORWARDING_PATTERN.search(line):
            assigned_ports[int(match[2])] = int(match[1])
    return process, assigned_ports
