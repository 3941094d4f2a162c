"""An environment whose actions are Python code, such as code that a model wrote."""

from __future__ import annotations

import sys
from typing import Any

from ludus.env import Action, Environment, Observation, State, Transition
from ludus.env.sandbox.processes import give_up_privileges
from ludus.env.sandbox.seccomp import refuse_system_calls


class CodeAction(Action):
    """Python code that may set the variable `result`."""

    code: str


class CodeEnv(Environment[CodeAction, Observation, State]):
    """An environment that runs the action's code and returns `result` or the error in `info`."""

    action_type = CodeAction
    observation_type = Observation
    state_type = State
    name = "code"
    steps_on_event_loop = True

    def __init__(self, notes: str = "") -> None:
        self._notes = notes

    def reset(self, *, seed: int | None = None) -> Transition[Observation]:
        return Transition(Observation())

    def step(self, action: CodeAction) -> Transition[Observation]:
        scope: dict[str, Any] = {"notes": self._notes}
        try:
            exec(action.code, scope)
        except BaseException as error:  # noqa: BLE001 - the code may raise anything
            report = {"error": type(error).__name__, "message": str(error)}
        else:
            report = {"result": scope.get("result")}
        return Transition(Observation(), reward=0.0, info=report)

    @property
    def state(self) -> State:
        return State()


class OfflineCodeEnv(CodeEnv):
    """An environment that declares that it needs no network."""

    needs_network = False


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--restricted" in arguments:
        # Simulate a pod without capabilities, whose runtime forbids namespaces. Do this first,
        # because the limits apply only to this thread and the threads that it starts later.
        give_up_privileges()
        refuse_system_calls(shares_processes=False)

    from ludus.env.serving.application import ServerApplication

    ServerApplication(CodeEnv).main(
        [argument for argument in arguments if argument != "--restricted"]
    )
