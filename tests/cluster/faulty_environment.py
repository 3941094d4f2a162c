"""An environment that waits, raises or ends its process when its player says so.

A pod gets this file as text and serves it from there, so it imports nothing of the tests.
"""

from __future__ import annotations

import os
import time

from ludus.env import Action, Environment, Observation, State, Transition


class Wish(Action):
    wait_s: float = 0.0
    raises: bool = False
    dies: bool = False


class FaultyEnvironment(Environment[Wish, Observation, State]):
    """It has no rules and no end."""

    action_type = Wish
    observation_type = Observation

    def __init__(self) -> None:
        self._state = State()

    def reset(self, *, seed: int | None = None) -> Transition[Observation]:
        self._state = State()
        return Transition(Observation())

    def step(self, action: Wish) -> Transition[Observation]:
        self._state.step_count += 1
        time.sleep(action.wait_s)
        if action.raises:
            raise RuntimeError("as it was wished")
        if action.dies:
            os._exit(1)
        return Transition(Observation(), reward=0.0)

    @property
    def state(self) -> State:
        return self._state
