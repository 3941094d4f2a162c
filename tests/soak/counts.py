"""Counts of a fleet's sessions, processes and folders.

A lost session occupies its slot until its linger time is over, so a comparison of exact numbers
waits that long. Before that, each slot that no client session uses must belong to a recently lost
session.
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
from tests.soak.fleet import FLEET_VARIABLE, KINDS, NUM_WORKERS, Fleet
from tests.soak.processes import FleetProcess, list_workers

_PAUSE_S = 0.5
REPORT_S = 3.0
"""Time in seconds until every client has reported its opened and lost sessions."""

Samples = dict[tuple[str, tuple[str, ...]], float]


class FleetCounts:
    """The counts of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._settle_s = fleet.options.max_settle_s
        self._http = httpx.AsyncClient(timeout=30)
        self._ended: deque[tuple[float, int]] = deque()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def count_on_servers(self) -> Counter[str]:
        """Return the number of sessions of each running server."""
        num_sessions: Counter[str] = Counter()
        for name, server in self._fleet.servers.items():
            if server.is_up:
                num_sessions[name] = int(await self._read_gauge(server, EnvServerMetric.SESSIONS))
        return num_sessions

    async def count_in_gateway(self, gateway: FleetProcess) -> Counter[str]:
        """Return the number of sessions of each environment that a gateway reports."""
        samples = await self._read_samples(gateway)
        return Counter(
            {
                kind: int(samples[(GatewayMetric.SESSIONS, (kind, state))])
                for kind in KINDS
                for state in ("active",)
            }
        )

    async def find_surplus(self, count_sessions: Callable[[], tuple[int, int]]) -> str:
        """Return an error if more slots are occupied than sessions explain; otherwise "".

        Args:
            count_sessions: function that returns the numbers of open and of ended sessions, with a
                delay of one second.
        """
        try:
            num_occupied = (await self.count_on_servers()).total()
        except (httpx.HTTPError, KeyError, StopIteration):
            return ""  # a process has just been killed
        await asyncio.sleep(REPORT_S)
        num_open, num_ended = count_sessions()
        now_s = time.monotonic()
        self._ended.append((now_s, num_ended))
        while len(self._ended) > 1 and self._ended[1][0] < now_s - self._settle_s:
            self._ended.popleft()
        is_recent = self._ended[0][0] > now_s - self._settle_s
        num_ended_recently = num_ended - (0 if is_recent else self._ended[0][1])
        if num_occupied <= num_open + num_ended_recently:
            return ""
        return (
            f"{num_occupied} slots are occupied, by {num_open} open sessions and at most"
            f" {num_ended_recently} recently ended ones"
        )

    async def wait_until_equal(self, open_sessions: Callable[[], Counter[str]]) -> str:
        """Return the differences that remain after a wait; "" if there are none."""
        return await _wait_for_counts(
            lambda: self._find_difference(open_sessions()), self._settle_s
        )

    async def _find_difference(self, open_sessions: Counter[str]) -> str:
        try:
            slots = await self.count_on_servers()
            if +slots != +open_sessions:
                return f"clients have {dict(open_sessions)} sessions, and servers {dict(slots)}"
            by_kind: Counter[str] = Counter()
            for name, num in open_sessions.items():
                by_kind[name.rpartition("-")[0]] += num
            for gateway in self._fleet.gateways.values():
                gateway_counts = await self.count_in_gateway(gateway)
                if +gateway_counts != +by_kind:
                    return (
                        f"clients have {dict(by_kind)} sessions, and {gateway.name}"
                        f" {dict(gateway_counts)}"
                    )
            return (
                await self._find_worker_faults()
                or self._find_folder_faults()
                or self._find_process_faults()
            )
        except httpx.HTTPError as error:
            return f"no response: {type(error).__name__}"

    async def _find_worker_faults(self) -> str:
        """Return an error if a server has too many or too few workers."""
        for name, server in self._fleet.servers.items():
            if name.startswith("inline"):
                continue
            num_reported = int(await self._read_gauge(server, EnvServerMetric.WORKERS))
            forks = list_child_pids(server.pid)
            workers = list_workers(server)
            num_sessions = int(await self._read_gauge(server, EnvServerMetric.SESSIONS))
            num_expected = NUM_WORKERS if name.startswith("pool") else num_sessions + 4
            if len(forks) != 1 or len(workers) != num_reported or num_reported != num_expected:
                return (
                    f"{name}: expected {num_expected} workers, got {num_reported} by its metrics"
                    f" and {len(workers)} processes"
                )
        return ""

    def _find_folder_faults(self) -> str:
        """Return an error if servers or workers have left folders."""
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
            f"{num_servers} servers have {len(folders)} temporary folders, and {running} workers"
            f" have {workers}"
        )

    def _find_process_faults(self) -> str:
        """Return an error if there are zombies, or processes that this one did not start."""
        stray = [
            f"{pid} {'zombie' if state == 'Z' else 'orphan'} {command}"
            for pid, (parent, state, command) in _list_fleet_processes(self._fleet.mark).items()
            if state == "Z" or not _is_descendant(parent)
        ]
        return f"remaining processes: {stray}" if stray else ""

    def find_processes(self) -> list[int]:
        """Return the live processes of the fleet."""
        return sorted(_list_fleet_processes(self._fleet.mark))

    async def count_drained(self, gateway: FleetProcess) -> int:
        """Drain a gateway and return the number of sessions that it still tracks."""
        response = await self._http.post(f"{gateway.admin}/drain")
        return int(response.json()["num_sessions"])

    async def _read_gauge(self, member: FleetProcess, metric: str) -> float:
        samples = await self._read_samples(member)
        return next(value for (name, _), value in samples.items() if name == metric)

    async def _read_samples(self, member: FleetProcess) -> Samples:
        text = (await self._http.get(f"{member.admin}/metrics")).text
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


async def _wait_for_counts(
    find_difference: Callable[[], Awaitable[str]], max_settle_s: float
) -> str:
    deadline_s = time.monotonic() + max_settle_s
    while error := await find_difference():
        if time.monotonic() > deadline_s:
            return error
        await asyncio.sleep(_PAUSE_S)
    return ""


def _list_fleet_processes(mark: str) -> dict[int, tuple[int, str, str]]:
    """Return parent, state and command of each process of the fleet, including zombies."""
    stats = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            environment = (folder / "environ").read_bytes()
        except OSError:  # the process has exited
            continue
        stats[int(folder.name)] = (int(fields[1]), fields[0], command[:80], environment)
    expected = f"{FLEET_VARIABLE}={mark}".encode()
    fleet_pids = {pid for pid, fields in stats.items() if expected in fields[3]} - {os.getpid()}
    zombies = {pid for pid, fields in stats.items() if fields[1] == "Z" and fields[0] in fleet_pids}
    return {pid: stats[pid][:3] for pid in fleet_pids | zombies}


def _is_descendant(pid: int) -> bool:
    """Return whether the process is this process or its descendant."""
    for _ in range(32):
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False
