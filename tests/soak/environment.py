"""An environment whose results prove which step it took: player, step number and a keyed digest.

    digest(0) = H(seed, player)    digest(n) = H(digest(n - 1), n, payload)

The digest differs if a result belongs to another session or step, or if a step was taken twice.
Actions can request misbehaviors, which no environment should have.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from ludus.env import Action, Environment, Observation, State, Transition
from ludus.env.limits import MAX_RESULT_BYTES

SERVER_VARIABLE = "SOAK_SERVER"
CHILD_LIFETIME_S = 7200
_CHUNK_BYTES = 2**20
_NUM_FLOOD_CHUNKS = 4096


class EchoAction(Action):
    """Input of the next digest. The result has `pad` additional characters."""

    payload: str = ""
    pad: int = 0
    misbehavior: str = ""


class EchoObservation(Observation):
    """The player and the location of a step."""

    player: str
    number: int
    digest: str
    server: str
    worker: int
    pad: str = ""


class EchoState(State):
    """The last step."""

    player: str = ""
    number: int = 0
    digest: str = ""


def compute_first_digest(seed: int, player: str) -> str:
    """Return the digest of a reset."""
    return _digest(f"seed {seed}", player)


def compute_next_digest(previous: str, number: int, payload: str) -> str:
    """Return the digest of the next step."""
    return _digest(previous, f"{number} {payload}")


def _digest(key: str, text: str) -> str:
    return hashlib.blake2b(text.encode(), key=key.encode(), digest_size=12).hexdigest()


class EchoEnv(Environment[EchoAction, EchoObservation, EchoState]):
    """An echo environment on the server's event loop."""

    action_type = EchoAction
    observation_type = EchoObservation
    state_type = EchoState
    name = "echo"
    steps_on_event_loop = True

    def __init__(self) -> None:
        self._state = EchoState()
        self._num_steps = 0

    def reset(
        self, *, seed: int | None = None, player: str = "", num_steps: int = 1
    ) -> Transition[EchoObservation]:
        self._num_steps = num_steps
        self._state = EchoState(player=player, digest=compute_first_digest(seed or 0, player))
        return Transition(self._observe())

    def step(self, action: EchoAction) -> Transition[EchoObservation]:
        if action.misbehavior:
            MISBEHAVIORS[action.misbehavior]()
        state = self._state
        state.number += 1
        state.digest = compute_next_digest(state.digest, state.number, action.payload)
        pad = "x" * (MAX_RESULT_BYTES + 1 if action.misbehavior == "flood result" else action.pad)
        terminated = state.number >= self._num_steps
        return Transition(self._observe(pad), reward=1.0, terminated=terminated)

    @property
    def state(self) -> EchoState:
        return self._state

    def _observe(self, pad: str = "") -> EchoObservation:
        state = self._state
        return EchoObservation(
            player=state.player,
            number=state.number,
            digest=state.digest,
            server=os.environ.get(SERVER_VARIABLE, ""),
            worker=int(os.environ.get("LUDUS_WORKER_PID", os.getpid())),
            pad=pad,
        )


class ThreadedEchoEnv(EchoEnv):
    """An echo environment in threads."""

    steps_on_event_loop = False


def _hang() -> None:
    threading.Event().wait()


def _exit() -> NoReturn:
    os._exit(7)


def _crash() -> None:
    ctypes.string_at(0)


def _fail() -> NoReturn:
    raise ValueError("the step fails on request")


def _fork() -> None:
    """Start a background process that tries to outlive its worker."""
    sleep_program = f"import time; time.sleep({CHILD_LIFETIME_S})"
    start_program = (
        "import subprocess, sys;"
        f" subprocess.Popen([sys.executable, '-S', '-c', {sleep_program!r}],"
        " start_new_session=True)"
    )
    subprocess.run([sys.executable, "-S", "-c", start_program], check=True)


def _flood_output() -> None:
    for _ in range(64):
        os.write(2, b"flood " * 1024)


def _flood_memory() -> None:
    blocks = []
    for _ in range(_NUM_FLOOD_CHUNKS):
        blocks.append(os.urandom(1024) * 1024)
        time.sleep(0.005)


def _flood_disk() -> None:
    with tempfile.NamedTemporaryFile(dir=Path.home(), delete=False) as file:
        for _ in range(_NUM_FLOOD_CHUNKS // 16):
            file.write(b"\0" * _CHUNK_BYTES)
            time.sleep(0.02)


def _do_nothing() -> None:
    """Do nothing."""


MISBEHAVIORS: dict[str, Any] = {
    "hang": _hang,
    "exit": _exit,
    "crash": _crash,
    "fail": _fail,
    "fork": _fork,
    "flood output": _flood_output,
    "flood memory": _flood_memory,
    "flood disk": _flood_disk,
    "flood result": _do_nothing,
}
