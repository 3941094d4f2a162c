"""An environment whose tools are its actions, as in OpenEnv; one of them ends the episode."""

from __future__ import annotations

from typing import Any

from ludus.env import Action, Environment, Observation, State, Transition
from ludus.env.types import Tool


class CallAction(Action):
    """A call of a tool."""

    type: str
    tool_name: str
    arguments: dict[str, Any]


class CallResult(Observation):
    """The result of a call, with the number of calls in this episode."""

    result: dict[str, Any]


class EndingEnv(Environment[CallAction, CallResult, State]):
    """An environment in which the tool "finish" ends the episode with a reward."""

    action_type = CallAction
    observation_type = CallResult
    state_type = State
    name = "ending"

    def __init__(self) -> None:
        self._num_calls = 0

    def reset(self, *, seed: int | None = None) -> Transition[CallResult]:
        self._num_calls = 0
        return Transition(CallResult(result={}))

    def step(self, action: CallAction) -> Transition[CallResult]:
        self._num_calls += 1
        result = CallResult(result={"data": {"calls": self._num_calls}})
        is_end = action.tool_name == "finish"
        return Transition(result, reward=2.0 * is_end, terminated=is_end)

    @property
    def tools(self) -> list[Tool]:
        schema = {"type": "object", "properties": {}}
        return [Tool("count", "Counts a call.", schema), Tool("finish", "Ends it.", schema)]

    @property
    def state(self) -> State:
        return State()
