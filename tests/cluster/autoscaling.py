"""Players on an environment that scales, and what is seen of its pods meanwhile.

    Crowd --sessions--> gateway --> pods
    Watch --each second--> a row of numbers, and a Removal for every pod that begins to terminate

The players come through `kubectl port-forward`, which works on every cluster and past every
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

from ludus.env.client.client import AsyncEnvClient, AsyncSession
from ludus.env.security.session_ids import pod_server_id
from ludus.proto.errors import ClusterError, EnvError, InfrastructureError
from ludus.services.kubernetes.api import KubernetesApi, resource_path

COST = "controller.kubernetes.io/pod-deletion-cost"
COLUMNS = (
    *("at_s", "players", "playing"),
    *("pending", "active", "draining"),
    *("replicas", "ready", "terminating", "void"),
)
"""Of a row. Sessions that are pending, active or on draining pods are the gateway's count."""
_STEP_S = 0.5
_FORWARDED = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+) -> (\d+)")


@dataclass(frozen=True, slots=True)
class Removal:
    """A pod that a scale-in has chosen, and those that it has not."""

    at_s: float
    num_sessions: int
    cost: int
    kept_sessions: tuple[int, ...]
    kept_costs: tuple[int, ...]


@dataclass(slots=True)
class Crowd:
    """Players who come one after the other, each with a session for a few seconds."""

    client: AsyncEnvClient
    shortest_s: float = 4.0
    longest_s: float = 12.0
    size: int = 0
    """How many play at once; who ends a session is followed by another player."""
    servers: Counter[str] = field(default_factory=Counter)
    """Open sessions by server."""
    num_finished: int = 0
    num_moved: int = 0
    """Sessions that ended well on a pod that was being removed."""
    void: list[str] = field(default_factory=list)
    """Sessions that were lost, and why."""
    refused: list[str] = field(default_factory=list)
    """Players who got no session, and why."""
    longest_wait_s: float = 0.0
    leaving: set[str] = field(default_factory=set)
    """Servers whose pods are being removed."""
    _draw: random.Random = field(default_factory=lambda: random.Random(11))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Keep `size` players there, for ever."""
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
    def num_there(self) -> int:
        """Players who play or wait."""
        return len(self._tasks)

    async def _play(self) -> None:
        seconds = self._draw.uniform(self.shortest_s, self.longest_s)
        began_s = time.monotonic()
        try:
            session, _ = await self.client.open()
        except EnvError as error:
            self.refused.append(str(error))
            return
        self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - began_s)
        server = session.id.split("~")[1]
        self.servers[server] += 1
        try:
            await self._steps(session, time.monotonic() + seconds)
        except InfrastructureError as error:
            leaving = "that is removed" if server in self.leaving else "that stays"
            self.void.append(f"on a pod {leaving}: {error}")
        else:
            self.num_finished += 1
            self.num_moved += server in self.leaving
        finally:
            self.servers[server] -= 1

    async def _steps(self, session: AsyncSession, until_s: float) -> None:
        async with session:
            while time.monotonic() < until_s:
                await asyncio.sleep(_STEP_S)
                result = await session.step(text="STAND")
                if result.done:
                    await session.reset()


class Watch:
    """Looks at an environment once a second.

    Args:
        environment: name of its Deployment.
        metrics: address of the metrics of the gateway that the players use.
    """

    def __init__(
        self, api: KubernetesApi, namespace: str, environment: str, metrics: str, crowd: Crowd
    ) -> None:
        self._api, self._namespace, self._name = api, namespace, environment
        self._metrics, self._crowd = metrics, crowd
        self._began_s = time.monotonic()
        self.rows: list[tuple[float, ...]] = []
        self.removals: list[Removal] = []
        self.missed: list[str] = []
        """Looks that failed, and why."""
        self.num_ready = self.num_replicas = 0

    @property
    def now_s(self) -> float:
        """Seconds since the first look."""
        return time.monotonic() - self._began_s

    async def run(self) -> None:
        """Look, for ever."""
        async with aiohttp.ClientSession() as http:
            while True:
                began_s = time.monotonic()
                # A second that nobody saw is a row less.
                try:
                    await self._look(http)
                except (ClusterError, aiohttp.ClientError, TimeoutError) as error:
                    self.missed.append(f"{self.now_s:.0f} s: {error!r}")
                await asyncio.sleep(max(0.0, began_s + 1 - time.monotonic()))

    async def _look(self, http: aiohttp.ClientSession) -> None:
        at_s = round(self.now_s, 1)
        query = {"labelSelector": "app.kubernetes.io/component=environment"}
        pods_path = resource_path("v1", self._namespace, "pods")
        deployment_path = resource_path("apps/v1", self._namespace, "deployments", self._name)
        pods, deployment, metrics = await asyncio.gather(
            self._api.read(pods_path, query), self._api.read(deployment_path), self._sessions(http)
        )
        self.num_replicas = deployment["spec"]["replicas"]
        self.num_ready = deployment["status"].get("readyReplicas", 0)
        self._note_removals(at_s, pods["items"])
        self.rows.append(
            (
                *(at_s, self._crowd.num_there, sum(self._crowd.servers.values())),
                *(metrics.get(state, 0) for state in ("pending", "active", "draining")),
                *(self.num_replicas, self.num_ready, len(self._crowd.leaving)),
                len(self._crowd.void),
            )
        )

    async def _sessions(self, http: aiohttp.ClientSession) -> dict[str, int]:
        async with http.get(self._metrics) as answer:
            text = await answer.text()
        found = re.findall(r'^ludus_gateway_sessions\{.*state="(\w+)"\} (\S+)$', text, re.MULTILINE)
        return {state: int(float(value)) for state, value in found}

    def _note_removals(self, at_s: float, pods: list[dict[str, Any]]) -> None:
        kept, chosen, leaving = [], [], set()
        for pod in pods:
            metadata = pod["metadata"]
            server = pod_server_id(metadata["uid"])
            cost = int(metadata.get("annotations", {}).get(COST, 0))
            load = (self._crowd.servers[server], cost)
            if "deletionTimestamp" not in metadata:
                kept.append(load)
                continue
            leaving.add(server)
            if server not in self._crowd.leaving:
                chosen.append(load)
        self._crowd.leaving.clear()
        self._crowd.leaving.update(leaving)
        sessions, costs = (
            (tuple(column) for column in zip(*kept, strict=True)) if kept else ((), ())
        )
        self.removals += [Removal(at_s, num, cost, sessions, costs) for num, cost in chosen]


@asynccontextmanager
async def forwarded(namespace: str, pod: str, *ports: int) -> AsyncIterator[list[int]]:
    """Ports of this machine that lead to a pod's, for as long as the context lasts.

    kubectl gives a tunnel up when one connection in it fails, which within an hour one does. It is
    made anew then, on the same ports, and clients come back to their sessions.
    """
    there = [f":{port}" for port in ports]
    process, found = await _tunnel(namespace, pod, there)
    here = [found[port] for port in ports]
    both = [f"{found[port]}:{port}" for port in ports]

    async def keep() -> None:
        nonlocal process
        while True:
            assert process.stdout is not None
            await process.stdout.read()  # a line for each connection, until it ends
            await process.wait()
            sys.stderr.write("kubectl port-forward has ended; it is started again\n")
            process, _ = await _tunnel(namespace, pod, both)

    keeping = asyncio.create_task(keep())
    try:
        yield here
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _tunnel(
    namespace: str, pod: str, ports: Sequence[str]
) -> tuple[asyncio.subprocess.Process, dict[int, int]]:
    """kubectl, once it forwards, and the port of this machine for each of the pod's."""
    process = await asyncio.create_subprocess_exec(
        *("kubectl", "-n", namespace, "port-forward", pod, *ports),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    found: dict[int, int] = {}
    while len(found) < len(ports):
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        assert line, "kubectl port-forward has ended"
        if match := _FORWARDED.search(line):
            found[int(match[2])] = int(match[1])
    return process, found
