"""Random faults from a seed, several per minute.

A fault says which sessions it may end: those of the worker, server, client or tenant that it hits,
and those of sockets to a gateway. What only disturbs may end none.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from ludus.proto.errors import EnvError
from tests.soak.book import Book, Fault, Location
from tests.soak.environment import first_digest, next_digest
from tests.soak.fleet import GATEWAYS, KINDS, TENANTS, Fleet
from tests.soak.members import Member, list_workers, send
from tests.soak.messages import HALF_SENT, MALFORMED, OVERSIZED, Address, Send, attempt
from tests.soak.wires import SdkDoor

MAX_PAUSE_S = 6.0
SILENT_S = 4.5
"""Pause after which a server counts as unreachable. Over plain HTTP, a step without a number that
was under way is not repeated, and its session is given up."""
REVOKED_S = (3.0, 8.0)
DOWN_S = (0.1, 3.0)
_KILLS_WORKERS = ("hang", "exit", "crash", "flood memory", "flood disk")
_DISTURBS = ("fail", "fork", "flood output", "flood result")
_ON_THE_LOOP = ("fail", "flood result")
"""Deeds of environments that a server may run inline."""

Do = Callable[["Fault", random.Random], Awaitable[str]]


WEIGHTS = {
    "worker killed": 12.0,
    "server killed": 3.0,
    "gateway killed": 2.5,
    "client killed": 3.5,
    "token revoked": 2.5,
    "process paused": 5.0,
    "worker paused": 3.0,
    **{f"environment: {deed}": 3.0 for deed in (*_KILLS_WORKERS, *_DISTURBS)},
    **{f"oversized: {name}": 2.5 for name in OVERSIZED},
    **{f"malformed: {name}": 2.5 for name in MALFORMED},
    **{f"half-sent: {name}": 10.0 for name in HALF_SENT},
}
"""Relative frequency of each kind."""


def draw_faults(seed: int) -> Iterator[tuple[str, random.Random]]:
    """Yield kinds of faults without end, each with a generator for its details.

    Each fault has its own: how long another one takes must not change what is drawn next.
    """
    draw = random.Random(f"faults {seed}")
    for number in itertools.count():
        (kind,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        yield kind, random.Random(f"fault {seed} {number}")


class Saboteur:
    """Injects faults; several may be under way."""

    def __init__(
        self,
        fleet: Fleet,
        book: Book,
        start_client: Callable[[Member], Awaitable[None]],
        find: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._book = book
        self._drawn = draw_faults(fleet.options.seed)
        self._start_client = start_client
        self._find = find
        self._running: set[asyncio.Task[None]] = set()
        self._doors = {
            kind: SdkDoor(f"{fleet.grpc_addresses[GATEWAYS[0]]}/{kind}", fleet.tokens["saboteur"])
            for kind in KINDS
        }
        self._is_revoked = False
        self.num_opens = 0
        """Maximum number of sessions that faults keep open."""
        self._do = self._each_kind()

    def begin(self) -> Fault:
        """Start a random fault."""
        kind, draw = next(self._drawn)
        fault = Fault(len(self._book.faults), kind, "", time.monotonic())
        self._book.faults.append(fault)
        task = asyncio.create_task(self._run(fault, draw))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return fault

    async def settle(self) -> None:
        """Wait until no fault is under way and all members are running."""
        while self._running:
            await asyncio.wait(self._running)

    async def close(self) -> None:
        """Close its connections."""
        for door in self._doors.values():
            await door.close()

    async def _run(self, fault: Fault, draw: random.Random) -> None:
        try:
            fault.outcome = await self._do[fault.kind](fault, draw)
        except EnvError as error:
            fault.outcome = str(error.code)
        except Exception as error:  # noqa: BLE001 - a fault of the soak itself must show
            fault.outcome = f"{type(error).__name__}: {error}"
            self._find(f"fault {fault.number} ({fault.kind}): {fault.outcome}")
        fault.ended_s = min(fault.ended_s, time.monotonic())

    def _each_kind(self) -> dict[str, Do]:
        send = {
            **{f"oversized: {name}": send for name, send in OVERSIZED.items()},
            **{f"malformed: {name}": send for name, send in MALFORMED.items()},
            **{f"half-sent: {name}": send for name, send in HALF_SENT.items()},
        }
        deeds = (*_KILLS_WORKERS, *_DISTURBS)
        return {
            "worker killed": self._kill_worker,
            "server killed": self._kill_server,
            "gateway killed": self._kill_gateway,
            "client killed": self._kill_client,
            "token revoked": self._revoke,
            "process paused": self._pause,
            "worker paused": self._pause_worker,
            **{f"environment: {deed}": partial(self._misbehave, deed) for deed in deeds},
            **{kind: partial(self._send, deed) for kind, deed in send.items()},
        }

    # -- kills ---------------------------------------------------------------------------

    async def _kill_worker(self, fault: Fault, draw: random.Random) -> str:
        server, pid = self._worker(draw)
        if not pid:
            return "skipped: no worker"
        fault.target = f"{server} {pid}"
        fault.hits = (Location(server=server, worker=pid),)
        return "killed" if send(pid, signal.SIGKILL) else "skipped: it was gone"

    async def _kill_server(self, fault: Fault, draw: random.Random) -> str:
        victim = self._victim(self._fleet.servers, draw)
        if victim is None:
            return "skipped: all are down"
        fault.target = victim.name
        fault.hits = (Location(server=victim.name),)
        await self._kill(victim, fault, draw)
        await victim.start()
        return "started again"

    async def _kill_gateway(self, fault: Fault, draw: random.Random) -> str:
        victim = self._victim(self._fleet.gateways, draw)
        if victim is None:
            return "skipped: it is down"
        fault.target = victim.name
        fault.hits = (Location(gateway=victim.name),)
        await self._kill(victim, fault, draw)
        await victim.start()
        return "started again"

    async def _kill_client(self, fault: Fault, draw: random.Random) -> str:
        victim = self._victim(self._fleet.clients, draw)
        if victim is None:
            return "skipped: all are down"
        fault.target = victim.name
        await self._kill(victim, fault, draw)
        await self._start_client(victim)
        return "started again"

    async def _kill(self, victim: Member, fault: Fault, draw: random.Random) -> None:
        await victim.kill()
        fault.ended_s = time.monotonic()
        await asyncio.sleep(draw.uniform(*DOWN_S))

    def _victim(self, members: dict[str, Member], draw: random.Random) -> Member | None:
        able = [member for member in members.values() if not member.is_kept and member.is_up]
        return draw.choice(able) if able else None

    def _worker(self, draw: random.Random) -> tuple[str, int]:
        """Return a server and the process id of a worker, or 0 without workers."""
        name = draw.choice([name for name in self._fleet.servers if not name.startswith("inline")])
        server = self._fleet.servers[name]
        if not server.is_up:
            return name, 0
        workers = list_workers(server)
        return name, draw.choice(workers) if workers else 0

    # -- clocks and tokens -----------------------------------------------------------------

    async def _pause(self, fault: Fault, draw: random.Random) -> str:
        """Pause a process, so that its monotonic clock jumps."""
        everybody = [member for member in self._fleet.long_lived if member.is_up]
        victim = draw.choice(everybody)
        span_s = draw.uniform(0.5, MAX_PAUSE_S)
        fault.target = f"{victim.name} for {span_s:.1f} s"
        if span_s > SILENT_S and victim.name in self._fleet.servers:
            fault.hits = (Location(server=victim.name, wire="http"),)
        await victim.pause(span_s)
        return "continued"

    async def _pause_worker(self, fault: Fault, draw: random.Random) -> str:
        server, pid = self._worker(draw)
        if not pid:
            return "skipped: no worker"
        fault.target = f"{server} {pid}"
        if send(pid, signal.SIGSTOP):
            await asyncio.sleep(draw.uniform(0.5, MAX_PAUSE_S))
        return "continued" if send(pid, signal.SIGCONT) else "it was killed meanwhile"

    async def _revoke(self, fault: Fault, draw: random.Random) -> str:
        if self._is_revoked:
            return "skipped: it is revoked"
        fault.target = "revoked"
        fault.hits = (Location(tenant="revoked"),)
        self._is_revoked = True
        try:
            self._fleet.write_tenants(tuple(tenant for tenant in TENANTS if tenant != "revoked"))
            await asyncio.sleep(draw.uniform(*REVOKED_S))
        finally:
            self._fleet.write_tenants(TENANTS)
            self._is_revoked = False
        await asyncio.sleep(2.0)  # until every gateway has read the file
        return "given back"

    # -- environments and messages -------------------------------------------------------------

    async def _misbehave(self, deed: str, fault: Fault, draw: random.Random) -> str:
        """Open a session whose environment misbehaves."""
        kind = draw.choice(KINDS if deed in _ON_THE_LOOP else KINDS[1:])
        seed, player = draw.randrange(2**31), f"saboteur/{fault.number}"
        self.num_opens += 1
        session = await self._doors[kind].open(seed, player, 1000)
        first = session.first
        fault.target = f"{first['server']} {first['worker']}"
        if deed in _KILLS_WORKERS:
            fault.hits = (Location(server=first["server"], worker=first["worker"]),)
        try:
            outcome = await self._step(session.step({"payload": "deed", "deed": deed}))
            if deed in _DISTURBS:
                await self._goes_on(session.state, seed, player, deed)
        finally:
            await session.close()
        return outcome

    async def _step(self, stepping: Awaitable[object]) -> str:
        try:
            await stepping
        except EnvError as error:
            return str(error.code)
        return "answered"

    async def _goes_on(
        self, state: Callable[[], Awaitable[dict[str, object]]], seed: int, player: str, deed: str
    ) -> None:
        """Check that the session is open, and its state after the deed."""
        digest = (await state()).get("digest")
        earlier = first_digest(seed, player)
        due = {
            "fail": earlier,  # the step was not taken
            "flood result": None,  # the step has no result, so the episode is over
        }.get(deed, next_digest(earlier, 1, "deed"))
        if digest != due:
            self._find(f"{player}: after {deed}: expected {due}, got {digest}")

    async def _send(self, send_it: Send, fault: Fault, draw: random.Random) -> str:
        self.num_opens += 1
        fleet = self._fleet
        name = draw.choice([*fleet.gateways, *fleet.servers])
        fault.target = name
        path = f"/envs/{draw.choice(KINDS)}" if name in fleet.gateways else ""
        token = fleet.tokens["saboteur"]
        address = Address(fleet.http_addresses[name], fleet.grpc_addresses[name], path, token)
        return await attempt(send_it, address, draw)
