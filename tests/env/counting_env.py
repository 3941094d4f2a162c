"""Counting environments for tests, some of which misbehave on request."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ludus.env import Action, Environment, Message, Observation, State, Transition
from ludus.proto.errors import ActionParseError, EpisodeStateError, ErrorCode, IllegalActionError

NUM_STEPS = 5


class CountAction(Action):
    """Add a number."""

    add: int


class CountObservation(Observation):
    """The sum so far, and a number that depends on the seed."""

    total: int
    luck: int


class CountState(State):
    """The sum so far."""

    total: int = 0


class CountingRenderer:
    """A renderer that shows the sum and parses ADD and a number."""

    def render(self, observation: CountObservation, *, first: bool) -> list[Message]:
        intro = "Count to the end. " if first else ""
        return [{"role": "user", "content": f"{intro}Total {observation.total}."}]

    def parse(self, text: str, observation: CountObservation) -> CountAction:
        verb, _, number = text.strip().partition(" ")
        if verb != "ADD" or not number.isdecimal():
            raise ActionParseError(f"expected ADD and a number, got {text!r}")
        return CountAction(add=int(number))

    def legal_answers(self, observation: CountObservation) -> list[str]:
        return ["ADD 1", "ADD 2", "ADD 3"]


class CountingEnv(Environment[CountAction, CountObservation, CountState]):
    """An environment that adds numbers for five steps.

    0 is illegal, 7 truncates the episode, 8 returns a tensor, 13 raises an error and 99 sleeps.
    """

    action_type = CountAction
    observation_type = CountObservation
    state_type = CountState
    name = "counting"
    description = "Counts."
    steps_on_event_loop = True
    text_renderer = CountingRenderer()

    def __init__(self) -> None:
        self._generator = random.Random(0)
        self._state = CountState()
        self._is_over = False
        self.closed = False

    @property
    def options(self) -> dict[str, Any]:
        return {"num_steps": NUM_STEPS}

    def reset(
        self, *, seed: int | None = None, start: int = 0, note: str = ""
    ) -> Transition[CountObservation]:
        self._generator = random.Random(seed)
        self._is_over = False
        self._state = CountState(total=start)
        return Transition(self._observe(note=note))

    def step(self, action: CountAction) -> Transition[CountObservation]:
        if self._is_over:
            raise EpisodeStateError("expected a reset, got a step", ErrorCode.EPISODE_OVER)
        if action.add == 0:
            raise IllegalActionError("expected to add something, got 0; add 1, 2 or 3")
        if action.add == 13:
            raise ValueError("unlucky")
        if action.add == 99:
            time.sleep(0.4)
        self._state.total += action.add
        self._state.step_count += 1
        terminated = self._state.step_count >= NUM_STEPS
        truncated = action.add == 7
        self._is_over = terminated or truncated
        tensors = {"trace": np.arange(3, dtype=np.float32)} if action.add == 8 else {}
        return Transition(
            self._observe(),
            reward=float(action.add),
            terminated=terminated,
            truncated=truncated,
            info={"added": action.add},
            tensors=tensors,
        )

    @property
    def state(self) -> CountState:
        return self._state

    def close(self) -> None:
        self.closed = True

    def _observe(self, note: str = "") -> CountObservation:
        metadata = {"note": note} if note else {}
        luck = self._generator.randrange(1_000_000)
        return CountObservation(total=self._state.total, luck=luck, metadata=metadata)


class ThreadedCountingEnv(CountingEnv):
    """A counting environment that steps in the server's threads."""

    steps_on_event_loop = False


class GatedCountingEnv(ThreadedCountingEnv):
    """A threaded counting environment in which a step that adds 98 waits for a gate."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def step(self, action: CountAction) -> Transition[CountObservation]:
        if action.add == 98:
            (self._folder / f"entered-{time.monotonic_ns()}").touch()
            while not (self._folder / "go").exists():
                time.sleep(0.005)
        return super().step(action)


class Gate:
    """A gate that blocks steps of its environments, in any process, until it is opened."""

    def __init__(self, folder: Path) -> None:
        self.factory = partial(GatedCountingEnv, folder=str(folder))
        self.folder = folder

    @property
    def num_entered(self) -> int:
        """Number of steps that have reached the gate."""
        return len(list(self.folder.glob("entered-*")))

    def open(self) -> None:
        (self.folder / "go").touch()


class SingletonCountingEnv(CountingEnv):
    """A counting environment that allows one instance per process."""

    one_per_process = True


class Misbehavior(IntEnum):
    """A misbehavior of an unruly environment, requested by adding this number."""

    REPORT = -1_000_001
    HANG = -1_000_002
    EXCEED_MEMORY_LIMIT = -1_000_003
    CRASH = -1_000_004
    EXIT = -1_000_005
    SYS_EXIT = -1_000_006
    SPIN = -1_000_007
    START_CHILD = -1_000_008


class UnrulyEnv(CountingEnv):
    """A counting environment that misbehaves if an action or the options of a reset request it."""

    name = "unruly"

    def reset(
        self, *, seed: int | None = None, start: int = 0, note: str = ""
    ) -> Transition[CountObservation]:
        if start in set(Misbehavior):
            _misbehave(Misbehavior(start))
        return super().reset(seed=seed, start=start, note=note)

    def step(self, action: CountAction) -> Transition[CountObservation]:
        if action.add not in set(Misbehavior):
            return super().step(action)
        info = _misbehave(Misbehavior(action.add))
        return Transition(self._observe(), info=info)


class UnrulyThreadedEnv(UnrulyEnv):
    """An unruly environment that steps in the server's threads."""

    steps_on_event_loop = False


class GloballyRandomEnv(CountingEnv):
    """A counting environment whose `luck` does not depend on the seed."""

    def _observe(self, note: str = "") -> CountObservation:
        return CountObservation(total=self._state.total, luck=random.SystemRandom().getrandbits(40))


def exit_during_creation() -> CountingEnv:
    """Exit the process instead of creating an environment."""
    os._exit(3)


def exit_on_second_creation(folder: str) -> CountingEnv:
    """Create an environment on the first call only; exit the process on later calls.

    A server makes the first call for its description.
    """
    marker_path = os.path.join(folder, "built")
    if os.path.exists(marker_path):
        os._exit(3)
    with open(marker_path, "w", encoding="utf-8"):
        return CountingEnv()


def fail_during_creation(reason: str = "no luck") -> CountingEnv:
    """Raise an error with this reason instead of creating an environment."""
    raise RuntimeError(reason)


def _consume_memory() -> None:
    arrays = []
    for _ in itertools.count():
        arrays.append(np.ones(2**21))
        time.sleep(0.005)


def _misbehave(misbehavior: Misbehavior) -> dict[str, Any]:
    match misbehavior:
        case Misbehavior.HANG:
            threading.Event().wait()
        case Misbehavior.EXCEED_MEMORY_LIMIT:
            _consume_memory()
        case Misbehavior.CRASH:
            ctypes.string_at(0)
        case Misbehavior.EXIT:
            os._exit(7)
        case Misbehavior.SYS_EXIT:
            sys.exit(7)
        case Misbehavior.SPIN:
            while True:
                pass
        case Misbehavior.START_CHILD:
            subprocess.Popen(["sleep", "60"])
    return {
        "pid": int(os.environ.get("LUDUS_WORKER_PID", os.getpid())),
        "luck": [random.random(), float(np.random.random())],
        "variables": sorted(os.environ),
        "heavy": [name for name in ("grpc", "fastapi", "uvicorn") if name in sys.modules],
    }


if __name__ == "__main__":
    from ludus.env.serving.application import ServerApplication

    arguments = sys.argv[1:]
    is_unruly = "--unruly" in arguments
    ServerApplication(UnrulyEnv if is_unruly else CountingEnv).main(
        [argument for argument in arguments if argument != "--unruly"]
    )
