"""Random faults from a seed, several per minute.

Each fault declares which sessions may end: those of a worker, server, client or tenant, or those of
sockets to a gateway. A fault that only disturbs may end no session.
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
from tests.soak.environment import compute_first_digest, compute_next_digest
from tests.soak.fleet import GATEWAYS, KINDS, TENANTS, Fleet
from tests.soak.messages import HALF_SENT, MALFORMED, OVERSIZED, Receiver, Send, send_and_describe
from tests.soak.openers import SdkOpener
from tests.soak.processes import FleetProcess, list_workers, send_signal
from tests.soak.record import Fault, FaultRecord, Location

MAX_PAUSE_S = 6.0
UNREACHABLE_AFTER_S = 4.5
"""Pause in seconds after which a server counts as unreachable. Over plain HTTP, a running step
without a number is not repeated, so its session is lost."""
REVOCATION_RANGE_S = (3.0, 8.0)
DOWNTIME_RANGE_S = (0.1, 3.0)
_FATAL_MISBEHAVIORS = ("hang", "exit", "crash", "flood memory", "flood disk")
_HARMLESS_MISBEHAVIORS = ("fail", "fork", "flood output", "flood result")
_INLINE_MISBEHAVIORS = ("fail", "flood result")
"""Misbehaviors that an inline server survives."""

FaultFunction = Callable[["Fault", random.Random], Awaitable[str]]


WEIGHTS = {
    "worker killed": 12.0,
    "server killed": 3.0,
    "gateway killed": 2.5,
    "client killed": 3.5,
    "token revoked": 2.5,
    "process paused": 5.0,
    "worker paused": 3.0,
    **{
        f"environment: {misbehavior}": 3.0
        for misbehavior in (*_FATAL_MISBEHAVIORS, *_HARMLESS_MISBEHAVIORS)
    },
    **{f"oversized: {name}": 2.5 for name in OVERSIZED},
    **{f"malformed: {name}": 2.5 for name in MALFORMED},
    **{f"half-sent: {name}": 10.0 for name in HALF_SENT},
}
"""Relative frequency of each kind of fault."""


def draw_faults(seed: int) -> Iterator[tuple[str, random.Random]]:
    """Yield kinds of faults forever, each with a random generator for its details.

    With a separate generator for each fault, the duration of one fault does not affect the next.
    """
    draw = random.Random(f"faults {seed}")
    for number in itertools.count():
        (kind,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        yield kind, random.Random(f"fault {seed} {number}")


class Saboteur:
    """Injects faults, several of them concurrently."""

    def __init__(
        self,
        fleet: Fleet,
        record: FaultRecord,
        start_client: Callable[[FleetProcess], Awaitable[None]],
        find: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._record = record
        self._random_faults = draw_faults(fleet.options.seed)
        self._start_client = start_client
        self._add_violation = find
        self._running: set[asyncio.Task[None]] = set()
        self._openers = {
            kind: SdkOpener(f"{fleet.grpc_addresses[GATEWAYS[0]]}/{kind}", fleet.tokens["saboteur"])
            for kind in KINDS
        }
        self._is_revoked = False
        self.num_opens = 0
        """Number of sessions that faults have opened."""
        self._functions = self._make_functions()

    def begin(self) -> Fault:
        """Start a random fault."""
        kind, draw = next(self._random_faults)
        fault = Fault(len(self._record.faults), kind, "", time.monotonic())
        self._record.faults.append(fault)
        task = asyncio.create_task(self._run(fault, draw))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return fault

    async def settle(self) -> None:
        """Wait until all running faults have ended."""
        while self._running:
            await asyncio.wait(self._running)

    async def close(self) -> None:
        """Close the connections."""
        for opener in self._openers.values():
            await opener.close()

    async def _run(self, fault: Fault, draw: random.Random) -> None:
        try:
            fault.outcome = await self._functions[fault.kind](fault, draw)
        except EnvError as error:
            fault.outcome = str(error.code)
        except Exception as error:  # noqa: BLE001 - errors of the soak are violations
            fault.outcome = f"{type(error).__name__}: {error}"
            self._add_violation(f"fault {fault.number} ({fault.kind}): {fault.outcome}")
        fault.finished_s = min(fault.finished_s, time.monotonic())

    def _make_functions(self) -> dict[str, FaultFunction]:
        senders = {
            **{f"oversized: {name}": send for name, send in OVERSIZED.items()},
            **{f"malformed: {name}": send for name, send in MALFORMED.items()},
            **{f"half-sent: {name}": send for name, send in HALF_SENT.items()},
        }
        misbehaviors = (*_FATAL_MISBEHAVIORS, *_HARMLESS_MISBEHAVIORS)
        return {
            "worker killed": self._kill_worker,
            "server killed": self._kill_server,
            "gateway killed": self._kill_gateway,
            "client killed": self._kill_client,
            "token revoked": self._revoke,
            "process paused": self._pause,
            "worker paused": self._pause_worker,
            **{
                f"environment: {misbehavior}": partial(self._misbehave, misbehavior)
                for misbehavior in misbehaviors
            },
            **{kind: partial(self._send, send) for kind, send in senders.items()},
        }

    # -- kills ---------------------------------------------------------------------------

    async def _kill_worker(self, fault: Fault, draw: random.Random) -> str:
        server, pid = self._choose_worker(draw)
        if not pid:
            return "skipped: no worker"
        fault.target = f"{server} {pid}"
        fault.affected_locations = (Location(server=server, worker=pid),)
        return "killed" if send_signal(pid, signal.SIGKILL) else "skipped: the worker has exited"

    async def _kill_server(self, fault: Fault, draw: random.Random) -> str:
        victim = self._choose_victim(self._fleet.servers, draw)
        if victim is None:
            return "skipped: all are stopped"
        fault.target = victim.name
        fault.affected_locations = (Location(server=victim.name),)
        await self._kill(victim, fault, draw)
        await victim.start()
        return "restarted"

    async def _kill_gateway(self, fault: Fault, draw: random.Random) -> str:
        victim = self._choose_victim(self._fleet.gateways, draw)
        if victim is None:
            return "skipped: the gateway is stopped"
        fault.target = victim.name
        fault.affected_locations = (Location(gateway=victim.name),)
        await self._kill(victim, fault, draw)
        await victim.start()
        return "restarted"

    async def _kill_client(self, fault: Fault, draw: random.Random) -> str:
        victim = self._choose_victim(self._fleet.clients, draw)
        if victim is None:
            return "skipped: all are stopped"
        fault.target = victim.name
        await self._kill(victim, fault, draw)
        await self._start_client(victim)
        return "restarted"

    async def _kill(self, victim: FleetProcess, fault: Fault, draw: random.Random) -> None:
        await victim.kill()
        fault.finished_s = time.monotonic()
        await asyncio.sleep(draw.uniform(*DOWNTIME_RANGE_S))

    def _choose_victim(
        self, members: dict[str, FleetProcess], draw: random.Random
    ) -> FleetProcess | None:
        candidates = [
            member for member in members.values() if not member.is_protected and member.is_up
        ]
        return draw.choice(candidates) if candidates else None

    def _choose_worker(self, draw: random.Random) -> tuple[str, int]:
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
        running_processes = [member for member in self._fleet.measured_processes if member.is_up]
        victim = draw.choice(running_processes)
        duration_s = draw.uniform(0.5, MAX_PAUSE_S)
        fault.target = f"{victim.name} for {duration_s:.1f} s"
        if duration_s > UNREACHABLE_AFTER_S and victim.name in self._fleet.servers:
            fault.affected_locations = (Location(server=victim.name, wire="http"),)
        await victim.pause(duration_s)
        return "continued"

    async def _pause_worker(self, fault: Fault, draw: random.Random) -> str:
        server, pid = self._choose_worker(draw)
        if not pid:
            return "skipped: no worker"
        fault.target = f"{server} {pid}"
        if send_signal(pid, signal.SIGSTOP):
            await asyncio.sleep(draw.uniform(0.5, MAX_PAUSE_S))
        return (
            "continued"
            if send_signal(pid, signal.SIGCONT)
            else "the worker was killed during the pause"
        )

    async def _revoke(self, fault: Fault, draw: random.Random) -> str:
        if self._is_revoked:
            return "skipped: the token is already revoked"
        fault.target = "revoked"
        fault.affected_locations = (Location(tenant="revoked"),)
        self._is_revoked = True
        try:
            self._fleet.write_tenants(tuple(tenant for tenant in TENANTS if tenant != "revoked"))
            await asyncio.sleep(draw.uniform(*REVOCATION_RANGE_S))
        finally:
            self._fleet.write_tenants(TENANTS)
            self._is_revoked = False
        await asyncio.sleep(2.0)  # Every gateway has read the file by then.
        return "restored"

    # -- environments and messages -------------------------------------------------------------

    async def _misbehave(self, misbehavior: str, fault: Fault, draw: random.Random) -> str:
        """Open a session whose environment misbehaves."""
        kind = draw.choice(KINDS if misbehavior in _INLINE_MISBEHAVIORS else KINDS[1:])
        seed, player = draw.randrange(2**31), f"saboteur/{fault.number}"
        self.num_opens += 1
        session = await self._openers[kind].open(seed, player, 1000)
        first_result = session.first
        fault.target = f"{first_result['server']} {first_result['worker']}"
        if misbehavior in _FATAL_MISBEHAVIORS:
            fault.affected_locations = (
                Location(server=first_result["server"], worker=first_result["worker"]),
            )
        try:
            outcome = await self._step(
                session.step({"payload": "fault", "misbehavior": misbehavior})
            )
            if misbehavior in _HARMLESS_MISBEHAVIORS:
                await self._check_state_after(session.state, seed, player, misbehavior)
        finally:
            await session.close()
        return outcome

    async def _step(self, step: Awaitable[object]) -> str:
        try:
            await step
        except EnvError as error:
            return str(error.code)
        return "answered"

    async def _check_state_after(
        self,
        state: Callable[[], Awaitable[dict[str, object]]],
        seed: int,
        player: str,
        misbehavior: str,
    ) -> None:
        """Check that the session is open and has the expected state after the misbehavior."""
        digest = (await state()).get("digest")
        first_digest = compute_first_digest(seed, player)
        expected_digest = {
            "fail": first_digest,  # the step was not taken
            "flood result": None,  # the step has no result, so the episode is over
        }.get(misbehavior, compute_next_digest(first_digest, 1, "fault"))
        if digest != expected_digest:
            self._add_violation(
                f"{player}: after {misbehavior}: expected {expected_digest}, got {digest}"
            )

    async def _send(self, send_message: Send, fault: Fault, draw: random.Random) -> str:
        self.num_opens += 1
        fleet = self._fleet
        name = draw.choice([*fleet.gateways, *fleet.servers])
        fault.target = name
        path = f"/envs/{draw.choice(KINDS)}" if name in fleet.gateways else ""
        token = fleet.tokens["saboteur"]
        address = Receiver(fleet.http_addresses[name], fleet.grpc_addresses[name], path, token)
        return await send_and_describe(send_message, address, draw)
