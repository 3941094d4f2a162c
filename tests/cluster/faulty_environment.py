"""An environment whose actions can make it wait, raise an error or exit its process.

A pod receives this file as text and serves it, so the file imports no test code.
"""

from __future__ import annotations

import os
import time

from ludus.env import Action, Environment, Observation, State, Transition


class FaultAction(Action):
    wait_s: float = 0.0
    raises: bool = False
    exits: bool = False


class FaultyEnvironment(Environment[FaultAction, Observation, State]):
    """An environment with faults on request, whose episodes never terminate."""

    action_type = FaultAction
    observation_type = Observation

    def __init__(self) -> None:
        self._state = State()

    def reset(self, *, seed: int | None = None) -> Transition[Observation]:
        self._state = State()
        return Transition(Observation())

    def step(self, action: FaultAction) -> Transition[Observation]:
        self._state.step_count += 1
        time.sleep(action.wait_s)
        if action.raises:
            raise RuntimeError("the action requested an error")
        if action.exits:
            os._exit(1)
        return Transition(Observation(), reward=0.0)

    @property
    def state(self) -> State:
        return self._state
