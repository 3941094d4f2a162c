"""An environment that misbehaves in the requested phase."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ludus.env import Action, Environment, Message, Observation, State, Transition
from ludus.env.limits import MAX_RESULT_BYTES
from ludus.env.types import Tool
from ludus.proto.errors import EnvError


class Phase(StrEnum):
    """The phase of a deed."""

    BUILD = "build"
    RESET = "reset"
    STEP = "step"
    RENDER = "render"
    ANSWERS = "answers"
    PARSE = "parse"
    STATE = "state"
    TOOL = "tool"
    CLOSE = "close"


class HollowError(EnvError):
    """An EnvError without code and message."""

    def __init__(self) -> None:
        pass


class SpeechlessError(Exception):
    """An error whose text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raise(error: BaseException) -> Any:
    raise error


RAISES: dict[str, Callable[[], Any]] = {
    "ValueError": lambda: _raise(ValueError("unlucky")),
    "SystemExit": lambda: _raise(SystemExit(7)),
    "KeyboardInterrupt": lambda: _raise(KeyboardInterrupt()),
    "GeneratorExit": lambda: _raise(GeneratorExit()),
    "CancelledError": lambda: _raise(asyncio.CancelledError()),
    "StopIteration": lambda: _raise(StopIteration()),
    "a surrogate": lambda: _raise(ValueError("\ud800 is no text")),
    "a long message": lambda: _raise(ValueError("long " * 50_000)),
    "an error without words": lambda: _raise(SpeechlessError()),
    "an error without code": lambda: _raise(HollowError()),
    "recursion": lambda: RAISES["recursion"](),
}
HANG = "hang"
FILL_DISK = "fill the disk"
EXIT = "exit"
CRASH = "crash"


def _fill_disk() -> None:
    for number in range(2048):
        Path(tempfile.gettempdir(), f"filled-{number}").write_bytes(b"x" * 8192)
    threading.Event().wait()


def _print() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.write("said by an environment\n" * 10_000)
        stream.flush()


def _fork(in_copy: Callable[[], Any]) -> None:
    """Return in a forked copy, and in the process itself after the copy has exited."""
    pid = os.fork()
    if pid == 0:
        in_copy()
        return
    for _ in range(1000):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise RuntimeError("a copy has gone on")


FATAL: dict[str, Callable[[], Any]] = {
    EXIT: lambda: os._exit(7),
    CRASH: lambda: ctypes.string_at(0),
    FILL_DISK: _fill_disk,
}
"""Deeds that end a process, at once or by a limit."""
HARMLESS: dict[str, Callable[[], Any]] = {
    "fork": lambda: _fork(lambda: None),
    "fork, and raise in the copy": lambda: _fork(RAISES["SystemExit"]),
    "print": _print,
}
"""Deeds that may have no effect on other sessions."""
_STRANGE_RESULTS: dict[str, Callable[[Transition[Any]], Any]] = {
    "None": lambda good: None,
    "a reward of NaN": lambda good: Transition(good.observation, reward=float("nan")),
    "an infinite reward": lambda good: Transition(good.observation, reward=float("-inf")),
    "a reward that is a word": lambda good: Transition(good.observation, reward="much"),
    "a tensor that is a list": lambda good: Transition(good.observation, tensors={"a": [1, 2]}),
    "a tensor of objects": lambda good: Transition(
        good.observation, tensors={"a": np.array([object()])}
    ),
    "a tensor without a name": lambda good: Transition(good.observation, tensors={3: np.zeros(2)}),
    "info that is no JSON": lambda good: Transition(good.observation, info={"what": object()}),
    "info with a surrogate": lambda good: Transition(good.observation, info={"what": "\ud800"}),
    "too much": lambda good: Transition(
        good.observation, tensors={"a": np.zeros(MAX_RESULT_BYTES + 1, np.uint8)}
    ),
}
_STRANGE_ANSWERS: dict[str, Any] = {
    "integers": [1, 2],
    "a word": "ADD",
    "a surrogate": ["\ud800"],
    "None": None,
}
STRANGE: dict[Phase, dict[str, Any]] = {
    Phase.RESET: _STRANGE_RESULTS,
    Phase.STEP: _STRANGE_RESULTS,
    Phase.RENDER: {"a surrogate": [{"role": "user", "content": "\ud800"}], "a set": {1}},
    Phase.ANSWERS: _STRANGE_ANSWERS,
    Phase.STATE: {"None": None, "a word": "state"},
    Phase.TOOL: {"a set": {1}, "a surrogate": {"what": "\ud800"}},
}


class MoveAction(Action):
    """Add a number; `deed` is the misbehavior of this step."""

    add: int = 1
    deed: str = ""
    phase: Phase = Phase.STEP


class MoveObservation(Observation):
    """The sum so far."""

    total: int


class MoveState(State):
    """The sum so far."""

    total: int = 0


class _Renderer:
    def __init__(self, environment: MisbehavingEnv) -> None:
        self._environment = environment

    def render(self, observation: MoveObservation, *, first: bool) -> list[Message]:
        good: list[Message] = [{"role": "user", "content": f"Total {observation.total}."}]
        return self._environment.does(Phase.RENDER, good)

    def parse(self, text: str, observation: MoveObservation) -> MoveAction:
        return self._environment.does(Phase.PARSE, MoveAction())

    def legal_answers(self, observation: MoveObservation) -> list[str]:
        return self._environment.does(Phase.ANSWERS, ["ADD"])


class MisbehavingEnv(Environment[MoveAction, MoveObservation, MoveState]):
    """Adds numbers without end.

    Args:
        folder: while it holds a file `build`, nothing can be built; the file names the deed.
    """

    action_type = MoveAction
    observation_type = MoveObservation
    state_type = MoveState
    name = "misbehaving"

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._total = 0
        self._deeds: dict[Phase, str] = {}
        self.text_renderer = _Renderer(self)
        build_deed = self._folder / "build"
        if build_deed.exists():
            self._deeds[Phase.BUILD] = build_deed.read_text()
        self.does(Phase.BUILD, None)

    @property
    def tools(self) -> list[Tool]:
        return [Tool("look", "Looks.", {"type": "object"})]

    def does(self, phase: Phase, good: Any) -> Any:
        """Do the deed of this phase, then return the correct value."""
        deed = self._deeds.pop(phase, "")
        if deed == HANG:
            (self._folder / f"hung-{time.monotonic_ns()}").touch()
            threading.Event().wait()
        if deed in RAISES:
            RAISES[deed]()
        if deed in FATAL:
            FATAL[deed]()
        if deed in HARMLESS:
            HARMLESS[deed]()
        if not deed or deed in HARMLESS:
            return good
        strange = STRANGE[phase][deed]
        return strange(good) if callable(strange) else strange

    def reset(
        self, *, seed: int | None = None, deed: str = "", phase: str = ""
    ) -> Transition[MoveObservation]:
        self._total = 0
        if deed:
            self._deeds = {Phase(phase): deed}
        return self.does(Phase.RESET, Transition(MoveObservation(total=0)))

    def step(self, action: MoveAction) -> Transition[MoveObservation]:
        if action.deed:
            self._deeds = {action.phase: action.deed}
        self._total += action.add
        return self.does(Phase.STEP, Transition(MoveObservation(total=self._total), reward=1.0))

    @property
    def state(self) -> MoveState:
        return self.does(Phase.STATE, MoveState(total=self._total))

    def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return self.does(Phase.TOOL, {"seen": self._total})

    def close(self) -> None:
        self.does(Phase.CLOSE, None)


class MisbehavingOnLoopEnv(MisbehavingEnv):
    """The misbehaving environment on the server's event loop."""

    steps_on_event_loop = True


HOSTS: dict[str, tuple[type[MisbehavingEnv], dict[str, Any]]] = {
    "event loop": (MisbehavingOnLoopEnv, {}),
    "threads": (MisbehavingEnv, {"num_threads": 4}),
    "pool": (MisbehavingOnLoopEnv, {"isolation": "pool", "num_workers": 1}),
    "pool, threads": (MisbehavingEnv, {"isolation": "pool", "num_workers": 1, "num_threads": 4}),
    "process": (MisbehavingOnLoopEnv, {"isolation": "process"}),
}


def factory_in(folder: Path, host: str) -> tuple[Callable[[], MisbehavingEnv], dict[str, Any]]:
    """Return the factory and the server's options for a host."""
    environment, options = HOSTS[host]
    return partial(environment, folder=str(folder)), options
