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
    """Phase of a session in which an environment can misbehave."""

    BUILD = "build"
    RESET = "reset"
    STEP = "step"
    RENDER = "render"
    ANSWERS = "answers"
    PARSE = "parse"
    STATE = "state"
    TOOL = "tool"
    CLOSE = "close"


class ErrorWithoutCode(EnvError):
    """An EnvError without a code or a message."""

    def __init__(self) -> None:
        pass


class UnprintableError(Exception):
    """An error whose text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("the text of this error cannot be read")


def _raise(error: BaseException) -> Any:
    raise error


RAISING_MISBEHAVIORS: dict[str, Callable[[], Any]] = {
    "ValueError": lambda: _raise(ValueError("unlucky")),
    "SystemExit": lambda: _raise(SystemExit(7)),
    "KeyboardInterrupt": lambda: _raise(KeyboardInterrupt()),
    "GeneratorExit": lambda: _raise(GeneratorExit()),
    "CancelledError": lambda: _raise(asyncio.CancelledError()),
    "StopIteration": lambda: _raise(StopIteration()),
    "a surrogate": lambda: _raise(ValueError("\ud800 is not valid text")),
    "a long message": lambda: _raise(ValueError("long " * 50_000)),
    "an error without text": lambda: _raise(UnprintableError()),
    "an error without code": lambda: _raise(ErrorWithoutCode()),
    "recursion": lambda: RAISING_MISBEHAVIORS["recursion"](),
}
HANG = "hang"
FILL_DISK = "fill the disk"
EXIT = "exit"
CRASH = "crash"


def _fill_disk() -> None:
    for index in range(2048):
        Path(tempfile.gettempdir(), f"filled-{index}").write_bytes(b"x" * 8192)
    threading.Event().wait()


def _print() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.write("output of an environment\n" * 10_000)
        stream.flush()


def _fork(run_in_child: Callable[[], Any]) -> None:
    """Fork; return in the child, and in the parent after the child has exited."""
    pid = os.fork()
    if pid == 0:
        run_in_child()
        return
    for _ in range(1000):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise RuntimeError("the forked child did not exit within 10 s")


FATAL_MISBEHAVIORS: dict[str, Callable[[], Any]] = {
    EXIT: lambda: os._exit(7),
    CRASH: lambda: ctypes.string_at(0),
    FILL_DISK: _fill_disk,
}
"""Deeds that end the process, either immediately or when a limit is exceeded."""
HARMLESS_MISBEHAVIORS: dict[str, Callable[[], Any]] = {
    "fork": lambda: _fork(lambda: None),
    "fork, and raise in the child": lambda: _fork(RAISING_MISBEHAVIORS["SystemExit"]),
    "print": _print,
}
"""Deeds that must not affect other sessions."""
_WRONG_TRANSITIONS: dict[str, Callable[[Transition[Any]], Any]] = {
    "None": lambda step: None,
    "a reward of NaN": lambda step: Transition(step.observation, reward=float("nan")),
    "an infinite reward": lambda step: Transition(step.observation, reward=float("-inf")),
    "a reward that is a string": lambda step: Transition(step.observation, reward="much"),
    "a tensor that is a list": lambda step: Transition(step.observation, tensors={"a": [1, 2]}),
    "a tensor of objects": lambda step: Transition(
        step.observation, tensors={"a": np.array([object()])}
    ),
    "a tensor without a name": lambda step: Transition(step.observation, tensors={3: np.zeros(2)}),
    "info that is not JSON": lambda step: Transition(step.observation, info={"value": object()}),
    "a result that is too large": lambda step: Transition(
        step.observation, tensors={"a": np.zeros(MAX_RESULT_BYTES + 1, np.uint8)}
    ),
}
_WRONG_LEGAL_ANSWERS: dict[str, Any] = {
    "integers": [1, 2],
    "a string": "ADD",
    "None": None,
}
WRONG_VALUES: dict[Phase, dict[str, Any]] = {
    Phase.RESET: _WRONG_TRANSITIONS,
    Phase.STEP: _WRONG_TRANSITIONS,
    Phase.RENDER: {"a set": {1}},
    Phase.ANSWERS: _WRONG_LEGAL_ANSWERS,
    Phase.STATE: {"None": None, "a string": "state"},
    Phase.TOOL: {"a set": {1}},
}


class AddAction(Action):
    """A number to add, and a misbehavior for a phase of this step or of a later call."""

    add: int = 1
    misbehavior: str = ""
    phase: Phase = Phase.STEP


class TotalObservation(Observation):
    """The sum so far."""

    total: int


class TotalState(State):
    """The sum so far."""

    total: int = 0


class _Renderer:
    def __init__(self, environment: MisbehavingEnv) -> None:
        self._environment = environment

    def render(self, observation: TotalObservation, *, first: bool) -> list[Message]:
        messages: list[Message] = [{"role": "user", "content": f"Total {observation.total}."}]
        return self._environment.run_phase(Phase.RENDER, messages)

    def parse(self, text: str, observation: TotalObservation) -> AddAction:
        return self._environment.run_phase(Phase.PARSE, AddAction())

    def legal_answers(self, observation: TotalObservation) -> list[str]:
        return self._environment.run_phase(Phase.ANSWERS, ["ADD"])


class MisbehavingEnv(Environment[AddAction, TotalObservation, TotalState]):
    """An environment that adds numbers forever and misbehaves on request.

    Args:
        folder: Folder for marker files. A file `build` contains the misbehavior of the constructor.
    """

    action_type = AddAction
    observation_type = TotalObservation
    state_type = TotalState
    name = "misbehaving"

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._total = 0
        self._deeds: dict[Phase, str] = {}
        self.text_renderer = _Renderer(self)
        build_deed_path = self._folder / "build"
        if build_deed_path.exists():
            self._deeds[Phase.BUILD] = build_deed_path.read_text()
        self.run_phase(Phase.BUILD, None)

    @property
    def tools(self) -> list[Tool]:
        return [Tool("look", "Returns the total.", {"type": "object"})]

    def run_phase(self, phase: Phase, correct_value: Any) -> Any:
        """Misbehave if a misbehavior is set for this phase; otherwise return the correct value."""
        misbehavior = self._deeds.pop(phase, "")
        if misbehavior == HANG:
            (self._folder / f"hung-{time.monotonic_ns()}").touch()
            threading.Event().wait()
        if misbehavior in RAISING_MISBEHAVIORS:
            RAISING_MISBEHAVIORS[misbehavior]()
        if misbehavior in FATAL_MISBEHAVIORS:
            FATAL_MISBEHAVIORS[misbehavior]()
        if misbehavior in HARMLESS_MISBEHAVIORS:
            HARMLESS_MISBEHAVIORS[misbehavior]()
        if not misbehavior or misbehavior in HARMLESS_MISBEHAVIORS:
            return correct_value
        wrong_value = WRONG_VALUES[phase][misbehavior]
        return wrong_value(correct_value) if callable(wrong_value) else wrong_value

    def reset(
        self, *, seed: int | None = None, misbehavior: str = "", phase: str = ""
    ) -> Transition[TotalObservation]:
        self._total = 0
        if misbehavior:
            self._deeds = {Phase(phase): misbehavior}
        return self.run_phase(Phase.RESET, Transition(TotalObservation(total=0)))

    def step(self, action: AddAction) -> Transition[TotalObservation]:
        if action.misbehavior:
            self._deeds = {action.phase: action.misbehavior}
        self._total += action.add
        return self.run_phase(
            Phase.STEP, Transition(TotalObservation(total=self._total), reward=1.0)
        )

    @property
    def state(self) -> TotalState:
        return self.run_phase(Phase.STATE, TotalState(total=self._total))

    def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return self.run_phase(Phase.TOOL, {"total": self._total})

    def close(self) -> None:
        self.run_phase(Phase.CLOSE, None)


class MisbehavingOnLoopEnv(MisbehavingEnv):
    """A misbehaving environment that steps on the server's event loop."""

    steps_on_event_loop = True


HOSTS: dict[str, tuple[type[MisbehavingEnv], dict[str, Any]]] = {
    "event loop": (MisbehavingOnLoopEnv, {}),
    "threads": (MisbehavingEnv, {"num_threads": 4}),
    "pool": (MisbehavingOnLoopEnv, {"isolation": "pool", "num_workers": 1}),
    "pool, threads": (MisbehavingEnv, {"isolation": "pool", "num_workers": 1, "num_threads": 4}),
    "process": (MisbehavingOnLoopEnv, {"isolation": "process"}),
}


def get_factory_and_options(
    folder: Path, host: str
) -> tuple[Callable[[], MisbehavingEnv], dict[str, Any]]:
    """Return the factory and the server's options for a host."""
    environment, options = HOSTS[host]
    return partial(environment, folder=str(folder)), options
