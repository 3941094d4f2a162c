"""Counts of slots on servers and in gateways, processes and folders.

Lost sessions keep their slots until their linger is over, so an exact count waits for that. Before
that, every slot above the number of client sessions must belong to a recently lost session.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ludus.proto.metrics import EnvServerMetric, GatewayMetric
from tests.env.processes import list_child_pids
from tests.soak.fleet import KINDS, MARK_VARIABLE, NUM_WORKERS, Fleet
from tests.soak.members import Member, list_workers

_PAUSE_S = 0.5
REPORT_S = 3.0
"""Time until every client has reported what it opened and lost, in seconds."""

Samples = dict[tuple[str, tuple[str, ...]], float]


class Census:
    """The counts of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._settle_s = fleet.options.settle_s
        self._http = httpx.AsyncClient(timeout=30)
        self._ended: deque[tuple[float, int]] = deque()

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def on_servers(self) -> Counter[str]:
        """Return the number of sessions of each running server."""
        num_sessions: Counter[str] = Counter()
        for name, server in self._fleet.servers.items():
            if server.is_up:
                num_sessions[name] = int(await self._gauge(server, EnvServerMetric.SESSIONS))
        return num_sessions

    async def in_gateway(self, gateway: Member) -> Counter[str]:
        """Return the number of sessions of each environment, as a gateway counts them."""
        samples = await self._samples(gateway)
        return Counter(
            {
                kind: int(samples[(GatewayMetric.SESSIONS, (kind, state))])
                for kind in KINDS
                for state in ("active",)
            }
        )

    async def exceeds(self, sessions: Callable[[], tuple[int, int]]) -> str:
        """Return what is wrong with the number of slots, or "" if it can be right.

        Args:
            sessions: how many are held, and how many have ended; a second behind.
        """
        try:
            num_places = (await self.on_servers()).total()
        except (httpx.HTTPError, KeyError, StopIteration):
            return ""  # a member has just been killed
        await asyncio.sleep(REPORT_S)
        num_held, num_ended = sessions()
        now_s = time.monotonic()
        self._ended.append((now_s, num_ended))
        while len(self._ended) > 1 and self._ended[1][0] < now_s - self._settle_s:
            self._ended.popleft()
        is_young = self._ended[0][0] > now_s - self._settle_s
        num_lately = num_ended - (0 if is_young else self._ended[0][1])
        if num_places <= num_held + num_lately:
            return ""
        return f"{num_places} places for {num_held} sessions and {num_lately} that ended lately"

    async def exact(self, open_sessions: Callable[[], Counter[str]]) -> str:
        """Return the differences that remain after a wait; "" if there are none."""
        return await _wait_for_counts(lambda: self._difference(open_sessions()), self._settle_s)

    async def _difference(self, open_sessions: Counter[str]) -> str:
        try:
            slots = await self.on_servers()
            if +slots != +open_sessions:
                return f"clients hold {dict(open_sessions)}, servers {dict(slots)}"
            by_kind: Counter[str] = Counter()
            for name, num in open_sessions.items():
                by_kind[name.rpartition("-")[0]] += num
            for gateway in self._fleet.gateways.values():
                seen = await self.in_gateway(gateway)
                if +seen != +by_kind:
                    return f"clients hold {dict(by_kind)}, {gateway.name} knows {dict(seen)}"
            return await self._workers() or self._folders() or self._processes()
        except httpx.HTTPError as error:
            return f"no answer: {type(error).__name__}"

    async def _workers(self) -> str:
        """Return surplus and missing workers."""
        for name, server in self._fleet.servers.items():
            if name.startswith("inline"):
                continue
            counted = int(await self._gauge(server, EnvServerMetric.WORKERS))
            forks = list_child_pids(server.pid)
            running = list_workers(server)
            sessions = int(await self._gauge(server, EnvServerMetric.SESSIONS))
            due = NUM_WORKERS if name.startswith("pool") else sessions + 4
            if len(forks) != 1 or len(running) != counted or counted != due:
                return f"{name}: {due} workers are due, {counted} counted, {len(running)} run"
        return ""

    def _folders(self) -> str:
        """Return the folders of servers and workers that are gone."""
        num_servers = sum(not name.startswith("inline") for name in self._fleet.servers)
        folders = list(self._fleet.temporary.iterdir())
        running = sum(
            len(list_workers(server))
            for name, server in self._fleet.servers.items()
            if not name.startswith("inline")
        )
        # The worker that described the environment left an empty folder.
        inside = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
        workers = sum(path.name != "0" for path in inside)
        if len(folders) == num_servers and workers == running:
            return ""
        return (
            f"{len(folders)} temporary folders of {num_servers} servers, in them {workers} of"
            f" {running} workers"
        )

    def _processes(self) -> str:
        """Return zombies and processes that no member of the fleet started or adopted."""
        lost = [
            f"{pid} {'zombie' if state == 'Z' else 'orphan'} {command}"
            for pid, (parent, state, command) in _fleet_processes(self._fleet.mark).items()
            if state == "Z" or not _descends(parent)
        ]
        return f"left over: {lost}" if lost else ""

    def find_processes(self) -> list[int]:
        """Return the live processes of the fleet."""
        return sorted(_fleet_processes(self._fleet.mark))

    async def count_drained(self, gateway: Member) -> int:
        """Drain a gateway and return the number of sessions that it still tracks."""
        answer = await self._http.post(f"{gateway.admin}/drain")
        return int(answer.json()["num_sessions"])

    async def _gauge(self, member: Member, metric: str) -> float:
        samples = await self._samples(member)
        return next(value for (name, _), value in samples.items() if name == metric)

    async def _samples(self, member: Member) -> Samples:
        text = (await self._http.get(f"{member.admin}/metrics")).text
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


async def _wait_for_counts(difference: Callable[[], Awaitable[str]], settle_s: float) -> str:
    deadline_s = time.monotonic() + settle_s
    while num_sessions := await difference():
        if time.monotonic() > deadline_s:
            return num_sessions
        await asyncio.sleep(_PAUSE_S)
    return ""


def _fleet_processes(mark: str) -> dict[int, tuple[int, str, str]]:
    """Return parent, state and command of each process of the fleet, including zombies."""
    stats = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            environment = (folder / "environ").read_bytes()
        except OSError:  # the process is gone
            continue
        stats[int(folder.name)] = (int(fields[1]), fields[0], command[:80], environment)
    expected = f"{MARK_VARIABLE}={mark}".encode()
    own_pid = {pid for pid, fields in stats.items() if expected in fields[3]} - {os.getpid()}
    zombies = {pid for pid, fields in stats.items() if fields[1] == "Z" and fields[0] in own_pid}
    return {pid: stats[pid][:3] for pid in own_pid | zombies}


def _descends(pid: int) -> bool:
    """Return True if the process is this process or its descendant."""
    for _ in range(32):
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False
