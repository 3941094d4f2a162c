"""The soak: a fleet under random faults, with clients that verify every result.

warm up --> [a fault per second | every few minutes: pause, compare all counts] --> end, compare
                    |
open and lost sessions of clients --> FaultRecord <-- faults, with the sessions that may end
memory of every process, once per second --> Trend
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.proto.errors import RateLimitError
from tests.env.processes import list_child_pids
from tests.soak.counts import REPORT_S, FleetCounts
from tests.soak.faults import Saboteur
from tests.soak.fleet import KINDS, QUOTA, TENANTS, Fleet
from tests.soak.memory import measure_process
from tests.soak.options import SoakOptions
from tests.soak.processes import FleetProcess, Lifetime
from tests.soak.record import FaultRecord, Location, LostSession

PROGRESS_S = 10.0
_MAX_CONCURRENT = 24
_REPORT_DELAY_S = 40.0
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 120.0

PrintLine = Callable[[str], None]


class Soak:
    """One run of the soak."""

    def __init__(self, options: SoakOptions, say: PrintLine) -> None:
        self.options = options
        self.record = FaultRecord()
        self.fleet = Fleet(options)
        self.fleet_counts = FleetCounts(self.fleet)
        self.fork_servers: dict[int, Lifetime] = {}
        """Memory samples of the fork servers of protected servers, by process id."""
        self.loads: list[float] = []
        """Load average of the machine, every ten seconds."""
        self.num_counts = 0
        self.fault_s = 0.0
        """Time with faults, in seconds."""
        self._print_event = say
        self._open_sessions: dict[str, Counter[str]] = {}
        self._opening: dict[str, int] = {}
        self._counts: dict[tuple[str, int], Counter[str]] = {}
        """Counts by name and process id of each client."""
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._started_s = time.monotonic()
        self._clients_play = False
        self._is_disturbed = False
        """True from the first fault to the last comparison of counts."""
        self.saboteur = Saboteur(self.fleet, self.record, self.start_client, self._add_violation)

    @property
    def counts(self) -> Counter[str]:
        """Total counts of all clients, including killed ones."""
        return sum(self._counts.values(), Counter())

    @property
    def open_sessions(self) -> Counter[str]:
        """Number of open sessions of clients, by server."""
        return sum(self._open_sessions.values(), Counter())

    async def run(self) -> None:
        """Run the soak; `record` then contains the findings."""
        watch_tasks: list[asyncio.Task[None]] = []
        try:
            await self.fleet.start()
            self._log("all servers and gateways have started")
            await self._warm_up()
            await asyncio.gather(*(self.start_client(client) for client in self._clients))
            watchers = (self._take_samples(), self._log_progress())
            watch_tasks = [asyncio.create_task(watcher) for watcher in watchers]
            await self._send_command("play")
            await self._wait_until_full()
            await self._inject_faults()
            await self._end_sessions()
            await self._check_quotas()
        finally:
            for task in watch_tasks:
                task.cancel()
            await asyncio.gather(*watch_tasks, return_exceptions=True)
            await self.saboteur.close()
            await self._tear_down()

    # -- phases --------------------------------------------------------------------------

    async def _warm_up(self) -> None:
        """Fill the records of ended sessions on servers and gateways."""
        num = 2 * self.options.warm_up_opens
        for kind in KINDS if num else ():
            address = f"{self.fleet.grpc_addresses['gateway-kept']}/{kind}"
            token = self.fleet.tokens["saboteur"]
            async with await AsyncEnvClient.connect(address, ConnectOptions(token=token)) as client:
                remaining = iter(range(num))

                async def open_and_close(client: AsyncEnvClient, numbers: object) -> None:
                    for number in numbers:  # type: ignore[attr-defined]
                        options = {"player": "warm", "num_steps": 9}
                        session, _ = await client.open(seed=number, options=options)
                        await session.step({"payload": "warm"})
                        await session.close()

                await asyncio.gather(
                    *(open_and_close(client, remaining) for _ in range(_MAX_CONCURRENT))
                )
            self._log(f"{num} sessions opened and closed on {kind} servers")

    async def _wait_until_full(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while self.open_sessions.total() < 0.9 * self.options.sessions:
            if time.monotonic() > deadline_s:
                self._add_violation(
                    f"only {self.open_sessions.total()} sessions within {_START_TIMEOUT_S:g} s"
                )
                return
            await asyncio.sleep(0.2)

    async def _inject_faults(self) -> None:
        """Inject faults, and compare the counts every few minutes."""
        self._is_disturbed = True
        remaining_s, pause_s = self.options.minutes * 60, 1 / self.options.faults_per_s
        while remaining_s > 0:
            duration_s = min(remaining_s, self.options.count_every_minutes * 60)
            started_s = time.monotonic()
            num_started = 0
            while (now_s := time.monotonic()) < started_s + duration_s:
                self.saboteur.begin()
                num_started += 1
                await asyncio.sleep(max(0.0, started_s + num_started * pause_s - now_s))
            self.fault_s += time.monotonic() - started_s
            remaining_s -= duration_s
            await self._compare_counts()
        self._is_disturbed = False

    async def _compare_counts(self) -> None:
        """Stop all changes and compare all counts."""
        await self.saboteur.settle()
        await self._send_command("hold")
        difference = await self.fleet_counts.wait_until_equal(self._count_open_sessions)
        self.num_counts += 1
        if difference:
            self._add_violation(
                f"count {self.num_counts}: after {self.options.max_settle_s:g} s still {difference}"
            )
        else:
            self._log(
                f"count {self.num_counts}: {self.open_sessions.total()} sessions, slots agree"
            )
        await self._send_command("play")

    def _count_open_sessions(self) -> Counter[str]:
        return Counter({"opening": 1}) if any(self._opening.values()) else self.open_sessions

    async def _end_sessions(self) -> None:
        """Let every client close its sessions, and check that no slot stays occupied."""
        self._log("closing all sessions")
        await self._send_command("end")
        for client in self._clients:
            if not await client.wait(_END_TIMEOUT_S):
                self._add_violation(f"{client.name} did not exit within {_END_TIMEOUT_S:g} s")
                await client.kill()
        await asyncio.gather(*self._reading.values())
        difference = await self.fleet_counts.wait_until_equal(Counter)
        if difference:
            self._add_violation(
                f"at the end: after {self.options.max_settle_s:g} s still {difference}"
            )
        self._log("all sessions have ended; opening the whole quota of each tenant")

    async def _check_quotas(self) -> None:
        """Open the whole quota of each tenant at each gateway, which would fail after a leak."""
        for name, gateway in self.fleet.gateways.items():
            for tenant in TENANTS:
                if num_missing := await self._count_missing(name, tenant):
                    self._add_violation(
                        f"{name}: {tenant} could not open {num_missing} of {QUOTA} sessions"
                    )
            if num := await self.fleet_counts.count_drained(gateway):
                self._add_violation(f"{name} still tracks {num} sessions")

    async def _count_missing(self, gateway: str, tenant: str) -> int:
        """Return the number of sessions of the tenant's quota that cannot be opened."""
        address = f"{self.fleet.grpc_addresses[gateway]}/inline"
        deadline_s = time.monotonic() + self.options.max_settle_s
        async with await AsyncEnvClient.connect(
            address, ConnectOptions(token=self.fleet.tokens[tenant])
        ) as client:
            while num_missing := await _count_missing_sessions(client):
                if time.monotonic() > deadline_s:
                    break
                await asyncio.sleep(PROGRESS_S)
        return num_missing

    async def _tear_down(self) -> None:
        """Stop all processes, and check that no process or file remains."""
        await self.fleet_counts.close()
        try:
            await self.fleet.kill_clients()
            for error in await self.fleet.stop():
                self._add_violation(error)
            await asyncio.sleep(0.5)
            if remaining := self.fleet_counts.find_processes():
                self._add_violation(f"processes remain at the end: {remaining}")
            if files := [path.name for path in self.fleet.temporary.iterdir()]:
                self._add_violation(f"files remain at the end: {files}")
        finally:
            await self.fleet.kill_all()

    # -- clients -------------------------------------------------------------------------

    @property
    def _clients(self) -> list[FleetProcess]:
        return list(self.fleet.clients.values())

    async def start_client(self, client: FleetProcess) -> None:
        """Start a client process and read its events."""
        await client.start()
        self._reading[client.name] = asyncio.create_task(self._read(client))
        if self._clients_play:
            await client.send_command("play")

    async def _send_command(self, command: str) -> None:
        self._clients_play = command == "play"
        for client in self._clients:
            await client.send_command(command, is_last=command == "end")

    async def _read(self, client: FleetProcess) -> None:
        """Read the events of a client process until it exits."""
        pid = client.pid
        async for line in client.iterate_output():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # an incomplete line of a killed client
            self._record_event(client, pid, event)
        self._open_sessions.pop(client.name, None)
        self._opening.pop(client.name, None)

    def _record_event(self, client: FleetProcess, pid: int, event: dict[str, object]) -> None:
        kind = event.pop("kind")
        event.pop("at_s")
        if kind == "held":
            self._open_sessions[client.name] = Counter(event["held"])  # type: ignore[arg-type]
            self._opening[client.name] = int(event["opening"])  # type: ignore[call-overload]
            self._counts[client.name, pid] = Counter(event["counts"])  # type: ignore[arg-type]
        elif kind == "lost":
            location = Location(**event.pop("location"))  # type: ignore[arg-type]
            lost = LostSession(location=location, **event)  # type: ignore[arg-type]
            self.record.lost.append(lost)
        elif kind == "violation":
            self._add_violation(str(event["description"]))

    # -- watching ------------------------------------------------------------------------

    async def _take_samples(self) -> None:
        while True:
            for member in self.fleet.measured_processes:
                if member.is_up and self._is_disturbed:
                    member.take_sample()
                if member.unexpected_exit:
                    self._add_violation(member.unexpected_exit)
                    await member.start()
            if self._is_disturbed:
                self._sample_fork_servers()
            await asyncio.sleep(1.0)

    def _sample_fork_servers(self) -> None:
        for name, server in self.fleet.servers.items():
            if not server.is_protected or name.startswith("inline"):
                continue
            pids = [pid for pid, life in self.fork_servers.items() if life.name == name]
            pid = pids[0] if pids else None
            if pid is None and (children := list_child_pids(server.pid)):
                pid = children[0]
                self.fork_servers[pid] = Lifetime(name, pid, time.monotonic())
            measured = None if pid is None else measure_process(pid, time.monotonic())
            if pid is not None and measured is not None:
                self.fork_servers[pid].samples.append(measured)

    async def _log_progress(self) -> None:
        reported_losses: set[str] = set()
        while True:
            await asyncio.sleep(PROGRESS_S - REPORT_S)
            self.loads.append(os.getloadavg()[0])
            surplus = await self.fleet_counts.find_surplus(self._count_held_and_ended)
            if surplus and self._is_disturbed:
                self._add_violation(surplus)
            open_sessions, counts = self.open_sessions.total(), self.counts
            self._log(
                f"{open_sessions} sessions, {counts['opened']} opened, {counts['steps']} steps,"
                f" {len(self.record.faults)} faults, {len(self.record.lost)} lost,"
                f" {len(self.record.find_unexplained_losses())} unexplained,"
                f" {len(self.record.violations)} violations; load {self.loads[-1]:.1f}"
            )
            self._log_unexplained(reported_losses)

    def _count_held_and_ended(self) -> tuple[int, int]:
        """Return the numbers of open and of ended sessions; an opening session counts as open."""
        open_sessions = self.open_sessions.total() + sum(self._opening.values())
        return open_sessions, self.counts[
            "opened"
        ] + self.saboteur.num_opens - self.open_sessions.total()

    def _log_unexplained(self, reported_losses: set[str]) -> None:
        """Log each loss that no fault explains, once all faults are recorded."""
        for loss in self.record.find_unexplained_losses():
            if (
                loss.player not in reported_losses
                and loss.failed_s < time.monotonic() - _REPORT_DELAY_S
            ):
                reported_losses.add(loss.player)
                self._log(f"LOST WITHOUT A FAULT: {loss}")

    def _add_violation(self, description: str) -> None:
        self.record.violations.append(description)
        self._log(f"VIOLATION: {description}")

    def _log(self, text: str) -> None:
        self._print_event(f"{time.monotonic() - self._started_s:7.1f} s  {text}")


async def _count_missing_sessions(client: AsyncEnvClient) -> int:
    """Return the number of quota sessions that cannot be opened; -1 if more than the quota open."""
    opens = [client.open(seed=number, options={"player": "quota"}) for number in range(QUOTA)]
    results = await asyncio.gather(*opens, return_exceptions=True)
    sessions = [result[0] for result in results if not isinstance(result, BaseException)]
    num_missing = QUOTA - len(sessions)
    try:
        session, _ = await client.open(seed=0)
        sessions.append(session)
        num_missing = num_missing or -1
    except RateLimitError:
        pass
    await asyncio.gather(*(session.close() for session in sessions))
    return num_missing
