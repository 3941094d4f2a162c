"""A client process: opens sessions, verifies every result, and reports events.

    stdin   "hold"  open and close no session; only read the state of the open sessions
            "play"  open sessions, play them to their end, and repeat
            "end"   close all sessions and exit
    stdout  one JSON line per second with the number of open sessions, and one per event

python -m tests.soak.client SPEC
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from ludus.env.types import JsonObject
from ludus.proto.errors import AuthenticationError, EnvError, ErrorCode, PermissionDeniedError
from tests.soak.environment import compute_first_digest, compute_next_digest
from tests.soak.openers import PlayedSession, SessionOpener, make_opener

LOSSES = frozenset(
    {
        *(ErrorCode.SESSION_LOST, ErrorCode.SESSION_ERROR, ErrorCode.UNAVAILABLE),
        *(ErrorCode.TIMEOUT, ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED),
    }
)
"""Codes of errors that lose a session. Any other error of a session is a violation."""
REFUSALS = LOSSES | {ErrorCode.DRAINING}
"""Codes of errors with which an open may be refused. Free slots are always available."""
_REFUSED_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """The options of a client process."""

    name: str
    wire: str
    gateway: str
    """Gateway whose death ends the sessions; "" if no gateway's death does."""
    tenant: str
    token: str
    seed: int
    addresses: dict[str, str]
    """Address of each environment."""
    num_sessions: dict[str, int]
    """Number of sessions of each environment."""
    num_steps: dict[str, tuple[int, int]]
    """Minimum and maximum number of steps of a session."""
    pace_s: float = 0.6
    """Mean pause between two steps, in seconds."""


class WrongResultError(Exception):
    """A result that differs from the expected one."""


@dataclass(slots=True)
class _TrackedSession:
    """An open session, with the expected result of its next call."""

    player: str
    called_s: float
    """Start time of the latest successful call."""
    wire_session: PlayedSession
    digest: str
    number: int = 0

    def check(self, result: JsonObject, label: str, called_s: float) -> None:
        """Compare the result of a call with the expected one."""
        expected = {"player": self.player, "number": self.number, "digest": self.digest}
        actual = {name: result.get(name) for name in expected}
        if actual != expected:
            raise WrongResultError(f"{label}: expected {expected}, got {actual}")
        self.called_s = called_s


class Client:
    """Opens and plays all sessions of the process."""

    def __init__(self, spec: ClientSpec) -> None:
        self._spec = spec
        self._random = random.Random(f"client {spec.name} {spec.seed}")
        self._num_open: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._is_playing = asyncio.Event()
        self._is_ending = False
        self._num_opening = 0

    async def run(self) -> None:
        """Play until the command "end"."""
        openers = {
            name: make_opener(self._spec.wire, address, self._spec.token)
            for name, address in self._spec.addresses.items()
        }
        report_task = asyncio.create_task(self._report_forever())
        command_task = asyncio.create_task(self._read_commands())
        slots = [
            asyncio.create_task(self._fill_slot(name, openers[name], f"{name}.{index}"))
            for name, num in self._spec.num_sessions.items()
            for index in range(num)
        ]
        await asyncio.gather(*slots)
        for opener in openers.values():
            with contextlib.suppress(EnvError):
                await opener.close()
        report_task.cancel()
        command_task.cancel()
        self._report()
        _print_event(kind="ended", client=self._spec.name)

    async def _read_commands(self) -> None:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        while line := (await reader.readline()).decode().strip():
            match line:
                case "hold":
                    self._is_playing.clear()
                case "play":
                    self._is_playing.set()
                case "end":
                    self._is_ending = True
                    self._is_playing.set()
        self._is_ending = True
        self._is_playing.set()

    async def _report_forever(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(1.0)

    def _report(self) -> None:
        _print_event(
            kind="held",
            client=self._spec.name,
            held=dict(+self._num_open),
            counts=dict(self._counts),
            opening=self._num_opening,
        )

    async def _fill_slot(self, environment: str, opener: SessionOpener, slot: str) -> None:
        await asyncio.sleep(self._random.uniform(0.0, 3.0))
        for number in range(sys.maxsize):
            await self._is_playing.wait()
            if self._is_ending:
                return
            session = await self._open(environment, opener, f"{self._spec.name}/{slot}/{number}")
            if session is not None:
                await self._play_session(session, environment)

    async def _open(
        self, environment: str, opener: SessionOpener, player: str
    ) -> _TrackedSession | None:
        seed = self._random.randrange(2**31)
        num_steps = self._random.randint(*self._spec.num_steps[environment])
        self._num_opening += 1
        called_s = time.monotonic()
        try:
            wire_session = await opener.open(seed, player, num_steps)
        except EnvError as error:
            self._counts[f"refused {error.code}"] += 1
            if error.code not in REFUSALS:
                self._report_violation(
                    f"{player}: the open was refused: {error.code} {error.message}"
                )
            await asyncio.sleep(_REFUSED_PAUSE_S)
            return None
        finally:
            self._num_opening -= 1
        self._counts["opened"] += 1
        return _TrackedSession(player, called_s, wire_session, compute_first_digest(seed, player))

    async def _play_session(self, session: _TrackedSession, environment: str) -> None:
        server = str(session.wire_session.first.get("server"))
        self._num_open[server] += 1
        try:
            session.check(session.wire_session.first, "the first result", session.called_s)
            await self._play(session)
        except WrongResultError as error:
            self._report_violation(f"{session.player}: {error}")
        except EnvError as error:
            self._report_loss(session, environment, error)
            if isinstance(error, AuthenticationError | PermissionDeniedError):
                await asyncio.sleep(_REFUSED_PAUSE_S)
        finally:
            self._num_open[server] -= 1
        with contextlib.suppress(EnvError):
            await session.wire_session.close()

    async def _play(self, session: _TrackedSession) -> None:
        while not self._is_ending:
            await asyncio.sleep(self._random.expovariate(1 / self._spec.pace_s))
            called_s = time.monotonic()
            if not self._is_playing.is_set():
                session.check(await session.wire_session.state(), "the state", called_s)
                self._counts["states"] += 1
                continue
            payload = self._random.randbytes(self._random.choice((4, 16, 16, 64, 2048))).hex()
            pad = 100_000 if self._random.random() < 0.01 else 0
            result, done = await session.wire_session.step({"payload": payload, "pad": pad})
            session.number += 1
            session.digest = compute_next_digest(session.digest, session.number, payload)
            session.check(result, f"step {session.number}", called_s)
            self._counts["steps"] += 1
            if done:
                self._counts["came to their end"] += 1
                return
        self._counts["closed at the end"] += 1

    def _report_loss(self, session: _TrackedSession, environment: str, error: EnvError) -> None:
        if error.code not in LOSSES:
            self._report_violation(f"{session.player}: {error.code} {error.message}")
        first_result = session.wire_session.first
        self._counts["lost"] += 1
        _print_event(
            kind="lost",
            player=session.player,
            location={
                "server": first_result.get("server"),
                "worker": first_result.get("worker"),
                "gateway": self._spec.gateway,
                "client": self._spec.name,
                "tenant": self._spec.tenant,
                "wire": self._spec.wire,
            },
            last_success_s=session.called_s,
            failed_s=time.monotonic(),
            code=str(error.code),
            message=error.message[:300],
        )

    def _report_violation(self, description: str) -> None:
        _print_event(kind="violation", description=f"{self._spec.wire} {description}"[:1000])


def _print_event(**event: Any) -> None:
    sys.stdout.write(json.dumps({**event, "at_s": time.monotonic()}) + "\n")
    sys.stdout.flush()


def encode_spec(spec: ClientSpec) -> str:
    """Return the command-line argument of a client process."""
    return json.dumps(asdict(spec))


if __name__ == "__main__":
    asyncio.run(Client(ClientSpec(**json.loads(sys.argv[1]))).run())
