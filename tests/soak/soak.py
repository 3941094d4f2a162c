"""The soak: a plane under faults, clients that verify every answer, and the counts in between.

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
from tests.env.processes import child_processes
from tests.soak.book import Book, LostSession, Place
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
    """One run of it."""

    def __init__(self, options: SoakOptions, say: Say) -> None:
        self.options = options
        self.book = Book()
        self.fleet = Fleet(options)
        self.census = Census(self.fleet)
        self.fork_servers: dict[int, Lifetime] = {}
        """Of the servers that are kept."""
        self.loads: list[float] = []
        """Of the machine, each ten seconds."""
        self.num_counts = 0
        self.fault_s = 0.0
        """For how long there were faults."""
        self._say = say
        self._held: dict[str, Counter[str]] = {}
        self._opening: dict[str, int] = {}
        self._counts: dict[tuple[str, int], Counter[str]] = {}
        """Of each client process."""
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._begun_s = time.monotonic()
        self._clients_play = False
        self._is_disturbed = False
        """From the first fault to the last count; what is looked at each second belongs to it."""
        self.saboteur = Saboteur(self.fleet, self.book, self.start_client, self._find)

    @property
    def counts(self) -> Counter[str]:
        """What all clients counted, those that were killed too."""
        return sum(self._counts.values(), Counter())

    @property
    def held(self) -> Counter[str]:
        """Sessions that clients hold, by server."""
        return sum(self._held.values(), Counter())

    async def run(self) -> None:
        """Run it to its end; the book then says what was found."""
        watching: list[asyncio.Task[None]] = []
        try:
            await self.fleet.start()
            self._tell("all servers and gateways are up")
            await self._warm_up()
            await asyncio.gather(*(self.start_client(one) for one in self._clients))
            watching = [asyncio.create_task(one) for one in (self._sample(), self._progress())]
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
        """Fill what servers and the gateway remember of sessions that ended."""
        num = 2 * self.options.warm_up_opens
        for kind in KINDS if num else ():
            address = f"{self.fleet.grpc_of['gateway-kept']}/{kind}"
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
        while self.held.total() < 0.9 * self.options.sessions:
            if time.monotonic() > deadline_s:
                self._find(f"only {self.held.total()} sessions within {_START_WITHIN_S:g} s")
                return
            await asyncio.sleep(0.2)

    async def _faults(self) -> None:
        """Disturb, and count in between."""
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
        """Stop everything that changes numbers, and compare them all."""
        await self.saboteur.settle()
        await self._order("hold")
        difference = await self.census.exact(self._still_held)
        self.num_counts += 1
        if difference:
            self._find(
                f"count {self.num_counts}: after {self.options.settle_s:g} s still {difference}"
            )
        else:
            self._tell(f"count {self.num_counts}: {self.held.total()} places for as many sessions")
        await self._order("play")

    def _still_held(self) -> Counter[str]:
        return Counter({"opening": 1}) if any(self._opening.values()) else self.held

    async def _end(self) -> None:
        """Let every client end its sessions; no place may be left."""
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
        """Take the whole quota of each tenant at each gateway: what leaked would be missing."""
        for name, gateway in self.fleet.gateways.items():
            for tenant in TENANTS:
                if missing := await self._missing_at(name, tenant):
                    self._find(f"{name}: {tenant} could not open {missing} of {QUOTA} sessions")
            if num := await self.census.drained(gateway):
                self._find(f"{name} still tracks {num} sessions")

    async def _missing_at(self, gateway: str, tenant: str) -> int:
        """Places of the tenant's quota that do not come back there."""
        address = f"{self.fleet.grpc_of[gateway]}/inline"
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
        """End the plane; nothing of it may be left."""
        await self.census.close()
        try:
            await self.fleet.kill_clients()
            for fault in await self.fleet.stop():
                self._find(fault)
            await asyncio.sleep(0.5)
            if left := self.census.left_processes():
                self._find(f"processes are left at the end: {left}")
            if files := [one.name for one in self.fleet.temporary.iterdir()]:
                self._find(f"files are left at the end: {files}")
        finally:
            await self.fleet.kill_all()

    # -- clients -------------------------------------------------------------------------

    @property
    def _clients(self) -> list[Member]:
        return list(self.fleet.clients.values())

    async def start_client(self, client: Member) -> None:
        """Start a client process and follow what it says."""
        await client.start()
        self._reading[client.name] = asyncio.create_task(self._read(client))
        if self._clients_play:
            await client.order("play")

    async def _order(self, word: str) -> None:
        self._clients_play = word == "play"
        for client in self._clients:
            await client.order(word, is_last=word == "end")

    async def _read(self, client: Member) -> None:
        """Follow one client process to its end."""
        pid = client.pid
        async for line in client.lines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # cut off by a kill
            self._take(client, pid, event)
        self._held.pop(client.name, None)
        self._opening.pop(client.name, None)

    def _take(self, client: Member, pid: int, event: dict[str, object]) -> None:
        kind = event.pop("kind")
        event.pop("at_s")
        if kind == "held":
            self._held[client.name] = Counter(event["held"])  # type: ignore[arg-type]
            self._opening[client.name] = int(event["opening"])  # type: ignore[call-overload]
            self._counts[client.name, pid] = Counter(event["counts"])  # type: ignore[arg-type]
        elif kind == "lost":
            place = Place(**event.pop("place"))  # type: ignore[arg-type]
            lost = LostSession(place=place, **event)  # type: ignore[arg-type]
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
            known = next((p for p, one in self.fork_servers.items() if one.member == name), None)
            if known is None and (children := child_processes(server.pid)):
                known = children[0]
                self.fork_servers[known] = Lifetime(name, known, time.monotonic())
            taken = None if known is None else sample(known, time.monotonic())
            if known is not None and taken is not None:
                self.fork_servers[known].samples.append(taken)

    async def _progress(self) -> None:
        told: set[str] = set()
        while True:
            await asyncio.sleep(PROGRESS_S - REPORT_S)
            self.loads.append(os.getloadavg()[0])
            wrong = await self.census.exceeds(self._held_and_ended)
            if wrong and self._is_disturbed:
                self._find(wrong)
            held, counts = self.held.total(), self.counts
            self._tell(
                f"{held} sessions, {counts['opened']} opened, {counts['steps']} steps,"
                f" {len(self.book.faults)} faults, {len(self.book.lost)} lost,"
                f" {len(self.book.unexplained())} unexplained,"
                f" {len(self.book.violations)} violations; load {self.loads[-1]:.1f}"
            )
            self._tell_unexplained(told)

    def _held_and_ended(self) -> tuple[int, int]:
        """Sessions that are open or being opened, and those that have ended."""
        held = self.held.total() + sum(self._opening.values())
        return held, self.counts["opened"] + self.saboteur.num_opens - self.held.total()

    def _tell_unexplained(self, told: set[str]) -> None:
        """Tell each loss that no fault explains, as soon as every fault has said what it hits."""
        for one in self.book.unexplained():
            if one.player not in told and one.failed_s < time.monotonic() - _TOLD_AFTER_S:
                told.add(one.player)
                self._tell(f"NOT HIT: {one}")

    def _find(self, what: str) -> None:
        self.book.violations.append(what)
        self._tell(f"VIOLATION: {what}")

    def _tell(self, what: str) -> None:
        self._say(f"{time.monotonic() - self._begun_s:7.1f} s  {what}")


async def _missing_places(client: AsyncEnvClient) -> int:
    """How many sessions of a whole quota could not be opened; -1 where there was room for more."""
    asked = [client.open(seed=number, options={"player": "quota"}) for number in range(QUOTA)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    sessions = [one[0] for one in answers if not isinstance(one, BaseException)]
    missing = QUOTA - len(sessions)
    try:
        session, _ = await client.open(seed=0)
        sessions.append(session)
        missing = missing or -1
    except RateLimitError:
        pass
    await asyncio.gather(*(session.close() for session in sessions))
    return missing
