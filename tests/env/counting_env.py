"""The one fake environment of these tests: it counts, and misbehaves when told to."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from ludus.env import Action, Environment, Message, Observation, State, Transition
from ludus.env.server import run_server_cli
from ludus.proto.errors import ActionParseError, EpisodeStateError, ErrorCode, IllegalActionError

NUM_STEPS = 5


class CountAction(Action):
    """Adds a number."""

    add: int


class CountObservation(Observation):
    """The sum so far, and a number that shows the seed."""

    total: int
    luck: int


class CountState(State):
    """The sum so far."""

    total: int = 0


class CountingFace:
    """ADD 1, ADD 2 or ADD 3."""

    def render(self, observation: CountObservation, *, first: bool) -> list[Message]:
        intro = "Count to the end. " if first else ""
        return [{"role": "user", "content": f"{intro}Total {observation.total}."}]

    def parse(self, text: str, observation: CountObservation) -> CountAction:
        word, _, number = text.strip().partition(" ")
        if word != "ADD" or not number.isdigit():
            raise ActionParseError(f"expected ADD and a number, got {text!r}")
        return CountAction(add=int(number))

    def legal_answers(self, observation: CountObservation) -> list[str]:
        return ["ADD 1", "ADD 2", "ADD 3"]


class CountingEnv(Environment[CountAction, CountObservation, CountState]):
    """Adds numbers for five steps; 0 is illegal, 13 raises, 99 sleeps, 7 truncates."""

    action_type = CountAction
    observation_type = CountObservation
    state_type = CountState
    name = "counting"
    description = "Counts."
    steps_on_event_loop = True
    text_face = CountingFace()

    def __init__(self) -> None:
        self._generator = random.Random(0)
        self._state = CountState()
        self._over = False
        self.closed = False

    @property
    def options(self) -> dict[str, Any]:
        return {"num_steps": NUM_STEPS}

    def reset(
        self, *, seed: int | None = None, start: int = 0, note: str = ""
    ) -> Transition[CountObservation]:
        self._generator = random.Random(seed)
        self._over = False
        self._state = CountState(total=start)
        return Transition(self._observe(note=note))

    def step(self, action: CountAction) -> Transition[CountObservation]:
        if self._over:
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
        self._over = terminated or truncated
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
    """The same in the server's threads."""

    steps_on_event_loop = False


if __name__ == "__main__":
    run_server_cli(CountingEnv)
