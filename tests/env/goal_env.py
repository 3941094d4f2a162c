"""A counting environment that reports success or failure, and actions for each outcome."""

from __future__ import annotations

from dataclasses import replace

from ludus.env import Transition
from tests.env.counting_env import CountAction, CountingEnv, CountObservation

GOAL = 10
WINNING_ACTIONS = [{"add": 2}] * 5
LOSING_ACTIONS = [{"add": 1}] * 5
TRUNCATING_ACTIONS = [{"add": 7}]


class GoalEnv(CountingEnv):
    """A counting environment whose episodes succeed if their five numbers sum to ten."""

    name = "goal"

    def step(self, action: CountAction) -> Transition[CountObservation]:
        transition = super().step(action)
        if not transition.terminated and not transition.truncated:
            return transition
        return replace(transition, success=self.state.total == GOAL)
