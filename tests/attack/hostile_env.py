"""An environment that runs the code in its actions, so that a test can make it do anything.

The code sets `text` (the observation), `reward`, `messages` (what the renderer returns) and
`terminated`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ludus.env import Action, Environment, Observation, State, Transition


class CodeAction(Action):
    """Run Python code."""

    code: str = ""


class TextObservation(Observation):
    """A text, and the messages for the policy."""

    text: str = ""
    messages: Any = Field(default=None)


class HostileRenderer:
    """A renderer that shows what the code says."""

    def render(self, observation: TextObservation, *, first: bool) -> Any:
        if observation.messages is not None:
            return observation.messages
        return [{"role": "user", "content": observation.text}]

    def parse(self, text: str, observation: TextObservation) -> CodeAction:
        return CodeAction(code=text)

    def legal_answers(self, observation: TextObservation) -> list[str]:
        return []


class HostileEnv(Environment[CodeAction, TextObservation, State]):
    """The environment; `code` is an option of a reset, too."""

    action_type = CodeAction
    observation_type = TextObservation
    state_type = State
    name = "hostile"
    description = "Runs code."
    text_renderer = HostileRenderer()

    def __init__(self, code: str = "") -> None:
        self._state = State()
        self._code = code

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def reset(self, *, seed: int | None = None, code: str = "") -> Transition[TextObservation]:
        self._state = State()
        return self._run(code or self._code)

    def step(self, action: CodeAction) -> Transition[TextObservation]:
        self._state.step_count += 1
        return self._run(action.code)

    @property
    def state(self) -> State:
        return self._state

    def _run(self, code: str) -> Transition[TextObservation]:
        names: dict[str, Any] = {"text": "ok", "reward": 1.0, "messages": None}
        exec(code, names)
        observation = TextObservation(text=names["text"], messages=names["messages"])
        is_over = bool(names.get("terminated", False))
        return Transition(observation, reward=names["reward"], terminated=is_over)
