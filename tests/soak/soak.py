"""The soak: processes under faults, clients that verify every result, and counts in between.

warm up --> [faults, each second one | every few minutes: hold, count exactly] --> end, count
                    |
clients say what they hold and lose --> Book <-- faults say what they may end
each second a sample of every process's memory --> Trend
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
from tests.soak.book import Book, Location, LostSession
from tests.soak.census import REPORT_S, Census
from tests.soak.faults import Saboteur
from tests.soak.fleet import KINDS, QUOTA, TENANTS, Fleet
from tests.soak.members import Lifetime, Member
from tests.soak.memory import sample
from tests.soak.options import SoakOptions

PROGRESS_S = 10.0
_AT_ONCE = 24
_TOLD_AFTER_S = 40.0
_START_WITHIN_S = 60.0
_END_WITHIN_S = 120.0

Say = Callable[[str], None]


class Soak:
    """A run of the soak."""

    def __init__(self, options: SoakOptions, say: Say) -> None:
        self.options = options
        self.book = Book()
        self.fleet = Fleet(options)
        self.census = Census(self.fleet)
        self.fork_servers: dict[int, Lifetime] = {}
        """Samples of the servers that are never killed."""
        self.loads: list[float] = []
        """Samples of the machine, every ten seconds."""
        self.num_counts = 0
        self.fault_s = 0.0
        """Time with faults, in seconds."""
        self._say = say
        self._open_sessions: dict[str, Counter[str]] = {}
        self._opening: dict[str, int] = {}
        self._counts: dict[tuple[str, int], Counter[str]] = {}
        """Counts of each client process."""
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._begun_s = time.monotonic()
        self._clients_play = False
        self._is_disturbed = False
        """Time from the first fault to the last count, in seconds."""
        self.saboteur = Saboteur(self.fleet, self.book, self.start_client, self._find)

    @property
    def counts(self) -> Counter[str]:
        """Total counts of all clients, including killed ones."""
        return sum(self._counts.values(), Counter())

    @property
    def open_sessions(self) -> Counter[str]:
        """Number of open sessions of clients, by server."""
        return sum(self._open_sessions.values(), Counter())

    async def run(self) -> None:
        """Run the soak; the book then contains the findings."""
        watching: list[asyncio.Task[None]] = []
        try:
            await self.fleet.start()
            self._tell("all servers and gateways are up")
            await self._warm_up()
            await asyncio.gather(*(self.start_client(client) for client in self._clients))
            watchers = (self._sample(), self._progress())
            watching = [asyncio.create_task(watcher) for watcher in watchers]
            await self._order("play")
            await self._until_full()
            await self._faults()
            await self._end()
            await self._quotas()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
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

                await asyncio.gather(*(open_and_close(client, remaining) for _ in range(_AT_ONCE)))
            self._tell(f"{num} sessions opened and closed on {kind} servers")

    async def _until_full(self) -> None:
        deadline_s = time.monotonic() + _START_WITHIN_S
        while self.open_sessions.total() < 0.9 * self.options.sessions:
            if time.monotonic() > deadline_s:
                self._find(
                    f"only {self.open_sessions.total()} sessions within {_START_WITHIN_S:g} s"
                )
                return
            await asyncio.sleep(0.2)

    async def _faults(self) -> None:
        """Inject faults, and count in between."""
        self._is_disturbed = True
        left_s, pause_s = self.options.minutes * 60, 1 / self.options.faults_per_s
        while left_s > 0:
            span_s = min(left_s, self.options.count_every_minutes * 60)
            begun_s = time.monotonic()
            num_begun = 0
            while (now_s := time.monotonic()) < begun_s + span_s:
                self.saboteur.begin()
                num_begun += 1
                await asyncio.sleep(max(0.0, begun_s + num_begun * pause_s - now_s))
            self.fault_s += time.monotonic() - begun_s
            left_s -= span_s
            await self._count()
        self._is_disturbed = False

    async def _count(self) -> None:
        """Stop all changes and compare the counts."""
        await self.saboteur.settle()
        await self._order("hold")
        difference = await self.census.exact(self._still_held)
        self.num_counts += 1
        if difference:
            self._find(
                f"count {self.num_counts}: after {self.options.settle_s:g} s still {difference}"
            )
        else:
            self._tell(
                f"count {self.num_counts}: {self.open_sessions.total()} sessions, slots agree"
            )
        await self._order("play")

    def _still_held(self) -> Counter[str]:
        return Counter({"opening": 1}) if any(self._opening.values()) else self.open_sessions

    async def _end(self) -> None:
        """Let every client close its sessions; no slot may stay occupied."""
        self._tell("the sessions end")
        await self._order("end")
        for client in self._clients:
            if not await client.wait(_END_WITHIN_S):
                self._find(f"{client.name} did not end within {_END_WITHIN_S:g} s")
                await client.kill()
        await asyncio.gather(*self._reading.values())
        difference = await self.census.exact(Counter)
        if difference:
            self._find(f"at the end: after {self.options.settle_s:g} s still {difference}")
        self._tell("every session has ended; each tenant takes its whole quota")

    async def _quotas(self) -> None:
        """Open the whole quota of each tenant at each gateway; a leak would refuse some."""
        for name, gateway in self.fleet.gateways.items():
            for tenant in TENANTS:
                if missing := await self._missing_at(name, tenant):
                    self._find(f"{name}: {tenant} could not open {missing} of {QUOTA} sessions")
            if num := await self.census.count_drained(gateway):
                self._find(f"{name} still tracks {num} sessions")

    async def _missing_at(self, gateway: str, tenant: str) -> int:
        """Return the number of slots that the tenant's quota has lost."""
        address = f"{self.fleet.grpc_addresses[gateway]}/inline"
        deadline_s = time.monotonic() + self.options.settle_s
        async with await AsyncEnvClient.connect(
            address, ConnectOptions(token=self.fleet.tokens[tenant])
        ) as client:
            while missing := await _missing_places(client):
                if time.monotonic() > deadline_s:
                    break
                await asyncio.sleep(PROGRESS_S)
        return missing

    async def _tear_down(self) -> None:
        """Stop all processes; nothing may be left."""
        await self.census.close()
        try:
            await self.fleet.kill_clients()
            for fault in await self.fleet.stop():
                self._find(fault)
            await asyncio.sleep(0.5)
            if remaining := self.census.find_processes():
                self._find(f"processes are left at the end: {remaining}")
            if files := [path.name for path in self.fleet.temporary.iterdir()]:
                self._find(f"files are left at the end: {files}")
        finally:
            await self.fleet.kill_all()

    # -- clients -------------------------------------------------------------------------

    @property
    def _clients(self) -> list[Member]:
        return list(self.fleet.clients.values())

    async def start_client(self, client: Member) -> None:
        """Start a client process and read its events."""
        await client.start()
        self._reading[client.name] = asyncio.create_task(self._read(client))
        if self._clients_play:
            await client.order("play")

    async def _order(self, word: str) -> None:
        self._clients_play = word == "play"
        for client in self._clients:
            await client.order(word, is_last=word == "end")

    async def _read(self, client: Member) -> None:
        """Read the events of a client process until its end."""
        pid = client.pid
        async for line in client.lines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # cut off by a kill
            self._take(client, pid, event)
        self._open_sessions.pop(client.name, None)
        self._opening.pop(client.name, None)

    def _take(self, client: Member, pid: int, event: dict[str, object]) -> None:
        kind = event.pop("kind")
        event.pop("at_s")
        if kind == "held":
            self._open_sessions[client.name] = Counter(event["held"])  # type: ignore[arg-type]
            self._opening[client.name] = int(event["opening"])  # type: ignore[call-overload]
            self._counts[client.name, pid] = Counter(event["counts"])  # type: ignore[arg-type]
        elif kind == "lost":
            location = Location(**event.pop("location"))  # type: ignore[arg-type]
            lost = LostSession(location=location, **event)  # type: ignore[arg-type]
            self.book.lost.append(lost)
        elif kind == "violation":
            self._find(str(event["what"]))

    # -- watching ------------------------------------------------------------------------

    async def _sample(self) -> None:
        while True:
            for member in self.fleet.long_lived:
                if member.is_up and self._is_disturbed:
                    member.take_sample()
                if member.ended_by_itself:
                    self._find(member.ended_by_itself)
                    await member.start()
            if self._is_disturbed:
                self._sample_fork_servers()
            await asyncio.sleep(1.0)

    def _sample_fork_servers(self) -> None:
        for name, server in self.fleet.servers.items():
            if not server.is_kept or name.startswith("inline"):
                continue
            pids = [pid for pid, life in self.fork_servers.items() if life.member == name]
            pid = pids[0] if pids else None
            if pid is None and (children := list_child_pids(server.pid)):
                pid = children[0]
                self.fork_servers[pid] = Lifetime(name, pid, time.monotonic())
            measured = None if pid is None else sample(pid, time.monotonic())
            if pid is not None and measured is not None:
                self.fork_servers[pid].samples.append(measured)

    async def _progress(self) -> None:
        reported_losses: set[str] = set()
        while True:
            await asyncio.sleep(PROGRESS_S - REPORT_S)
            self.loads.append(os.getloadavg()[0])
            wrong = await self.census.exceeds(self._held_and_ended)
            if wrong and self._is_disturbed:
                self._find(wrong)
            open_sessions, counts = self.open_sessions.total(), self.counts
            self._tell(
                f"{open_sessions} sessions, {counts['opened']} opened, {counts['steps']} steps,"
                f" {len(self.book.faults)} faults, {len(self.book.lost)} lost,"
                f" {len(self.book.unexplained_losses())} unexplained,"
                f" {len(self.book.violations)} violations; load {self.loads[-1]:.1f}"
            )
            self._tell_unexplained(reported_losses)

    def _held_and_ended(self) -> tuple[int, int]:
        """Count sessions that are open or being opened, and ended sessions."""
        open_sessions = self.open_sessions.total() + sum(self._opening.values())
        return open_sessions, self.counts[
            "opened"
        ] + self.saboteur.num_opens - self.open_sessions.total()

    def _tell_unexplained(self, reported_losses: set[str]) -> None:
        """Report each loss that no fault explains, once all faults are recorded."""
        for loss in self.book.unexplained_losses():
            if (
                loss.player not in reported_losses
                and loss.failed_s < time.monotonic() - _TOLD_AFTER_S
            ):
                reported_losses.add(loss.player)
                self._tell(f"NOT HIT: {loss}")

    def _find(self, problem: str) -> None:
        self.book.violations.append(problem)
        self._tell(f"VIOLATION: {problem}")

    def _tell(self, problem: str) -> None:
        self._say(f"{time.monotonic() - self._begun_s:7.1f} s  {problem}")


async def _missing_places(client: AsyncEnvClient) -> int:
    """Return the number of quota sessions that could not be opened; -1 if more could be."""
    requested = [client.open(seed=number, options={"player": "quota"}) for number in range(QUOTA)]
    answers = await asyncio.gather(*requested, return_exceptions=True)
    sessions = [answer[0] for answer in answers if not isinstance(answer, BaseException)]
    missing = QUOTA - len(sessions)
    try:
        session, _ = await client.open(seed=0)
        sessions.append(session)
        missing = missing or -1
    except RateLimitError:
        pass
    await asyncio.gather(*(session.close() for session in sessions))
    return missing
