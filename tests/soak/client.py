"""A client process: opens sessions, verifies every result, and reports events.

    stdin   "hold"  no session opens or ends; those open are asked for their state
            "play"  open, play, end, and again
            "end"   close everything and exit
    stdout  a JSON line a second with what is held, and one for each thing that happens

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
from tests.soak.environment import first_digest, next_digest
from tests.soak.wires import Door, PlayedSession, make_door

LOSSES = frozenset(
    {
        *(ErrorCode.SESSION_LOST, ErrorCode.SESSION_ERROR, ErrorCode.UNAVAILABLE),
        *(ErrorCode.TIMEOUT, ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED),
    }
)
"""Errors that mean a lost session; any other error is a wrong result."""
REFUSALS = LOSSES | {ErrorCode.DRAINING}
"""Errors with which an open may be refused; capacity is never short."""
_REFUSED_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """The options of a client process."""

    name: str
    wire: str
    gateway: str
    """Gateway whose death ends its sessions; "" if none does."""
    tenant: str
    token: str
    seed: int
    doors: dict[str, str]
    """Address of each environment."""
    num_sessions: dict[str, int]
    """Number of sessions of each environment."""
    num_steps: dict[str, tuple[int, int]]
    """Minimum and maximum number of steps of a session."""
    pace_s: float = 0.6
    """Mean pause between two steps, in seconds."""


class WrongAnswer(Exception):
    """A result that differs from the expected one."""


@dataclass(slots=True)
class _Life:
    """A session as its client knows it."""

    player: str
    called_s: float
    """Start of the latest successful call; the session was alive until then."""
    session: PlayedSession
    digest: str
    number: int = 0

    def check(self, answer: JsonObject, label: str, called_s: float) -> None:
        """Compare the result of a call with the expected one."""
        due = {"player": self.player, "number": self.number, "digest": self.digest}
        got = {name: answer.get(name) for name in due}
        if got != due:
            raise WrongAnswer(f"{label}: expected {due}, got {got}")
        self.called_s = called_s


class Client:
    """All sessions of the process."""

    def __init__(self, spec: ClientSpec) -> None:
        self._spec = spec
        self._random = random.Random(f"client {spec.name} {spec.seed}")
        self._num_open: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._is_playing = asyncio.Event()
        self._is_ending = False
        self._num_opening = 0

    async def run(self) -> None:
        """Play until a stop request."""
        doors = {
            name: make_door(self._spec.wire, address, self._spec.token)
            for name, address in self._spec.doors.items()
        }
        reporting = asyncio.create_task(self._report_forever())
        obeying = asyncio.create_task(self._obey())
        slots = [
            asyncio.create_task(self._fill_slot(name, doors[name], f"{name}.{index}"))
            for name, num in self._spec.num_sessions.items()
            for index in range(num)
        ]
        await asyncio.gather(*slots)
        for door in doors.values():
            with contextlib.suppress(EnvError):
                await door.close()
        reporting.cancel()
        obeying.cancel()
        self._report()
        _say(kind="ended", client=self._spec.name)

    async def _obey(self) -> None:
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
        _say(
            kind="held",
            client=self._spec.name,
            held=dict(+self._num_open),
            counts=dict(self._counts),
            opening=self._num_opening,
        )

    async def _fill_slot(self, environment: str, door: Door, slot: str) -> None:
        await asyncio.sleep(self._random.uniform(0.0, 3.0))
        for number in range(sys.maxsize):
            await self._is_playing.wait()
            if self._is_ending:
                return
            life = await self._open(environment, door, f"{self._spec.name}/{slot}/{number}")
            if life is not None:
                await self._live(life, environment)

    async def _open(self, environment: str, door: Door, player: str) -> _Life | None:
        seed = self._random.randrange(2**31)
        num_steps = self._random.randint(*self._spec.num_steps[environment])
        self._num_opening += 1
        called_s = time.monotonic()
        try:
            session = await door.open(seed, player, num_steps)
        except EnvError as error:
            self._counts[f"refused {error.code}"] += 1
            if error.code not in REFUSALS:
                self._blame(f"{player}: open was refused: {error.code} {error.message}")
            await asyncio.sleep(_REFUSED_PAUSE_S)
            return None
        finally:
            self._num_opening -= 1
        self._counts["opened"] += 1
        return _Life(player, called_s, session, first_digest(seed, player))

    async def _live(self, life: _Life, environment: str) -> None:
        server = str(life.session.first.get("server"))
        self._num_open[server] += 1
        try:
            life.check(life.session.first, "the first answer", life.called_s)
            await self._play(life)
        except WrongAnswer as error:
            self._blame(f"{life.player}: {error}")
        except EnvError as error:
            self._lose(life, environment, error)
            if isinstance(error, AuthenticationError | PermissionDeniedError):
                await asyncio.sleep(_REFUSED_PAUSE_S)
        finally:
            self._num_open[server] -= 1
        with contextlib.suppress(EnvError):
            await life.session.close()

    async def _play(self, life: _Life) -> None:
        while not self._is_ending:
            await asyncio.sleep(self._random.expovariate(1 / self._spec.pace_s))
            called_s = time.monotonic()
            if not self._is_playing.is_set():
                life.check(await life.session.state(), "the state", called_s)
                self._counts["states"] += 1
                continue
            payload = self._random.randbytes(self._random.choice((4, 16, 16, 64, 2048))).hex()
            pad = 100_000 if self._random.random() < 0.01 else 0
            answer, done = await life.session.step({"payload": payload, "pad": pad})
            life.number += 1
            life.digest = next_digest(life.digest, life.number, payload)
            life.check(answer, f"step {life.number}", called_s)
            self._counts["steps"] += 1
            if done:
                self._counts["came to their end"] += 1
                return
        self._counts["closed at the end"] += 1

    def _lose(self, life: _Life, environment: str, error: EnvError) -> None:
        if error.code not in LOSSES:
            self._blame(f"{life.player}: {error.code} {error.message}")
        first = life.session.first
        self._counts["lost"] += 1
        _say(
            kind="lost",
            player=life.player,
            location={
                "server": first.get("server"),
                "worker": first.get("worker"),
                "gateway": self._spec.gateway,
                "client": self._spec.name,
                "tenant": self._spec.tenant,
                "wire": self._spec.wire,
            },
            alive_s=life.called_s,
            failed_s=time.monotonic(),
            code=str(error.code),
            message=error.message[:300],
        )

    def _blame(self, problem: str) -> None:
        _say(kind="violation", what=f"{self._spec.wire} {problem}"[:1000])


def _say(**event: Any) -> None:
    sys.stdout.write(json.dumps({**event, "at_s": time.monotonic()}) + "\n")
    sys.stdout.flush()


def spec_text(spec: ClientSpec) -> str:
    """Encode the argument of a client process."""
    return json.dumps(asdict(spec))


if __name__ == "__main__":
    asyncio.run(Client(ClientSpec(**json.loads(sys.argv[1]))).run())
