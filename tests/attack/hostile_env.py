"""An environment that runs the code in its actions, so that a test can make it do anything.

The code sets `text` (the observation), `reward`, `messages` (what the renderer returns) and
`terminated`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ludus.env import Action, Environment, Observation, State, Tool, Transition
from ludus.proto.errors import ToolError


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


HOSTILE_TEXT = "\x1b]0;EVIL\x07\x9b2J\u202egnp\u200b\rEVIL\x08\x7f\u2028[red]EVIL[/red]"
"""Control characters, hidden characters and markup."""


class HostileTextAction(CodeAction):
    __doc__ = HOSTILE_TEXT
    kind: str = Field(default=HOSTILE_TEXT, description=HOSTILE_TEXT, title=HOSTILE_TEXT)


class HostileTextRenderer(HostileRenderer):
    """A renderer whose answers are hostile, too."""

    def legal_answers(self, observation: TextObservation) -> list[str]:
        return [HOSTILE_TEXT]


class HostileTextEnv(HostileEnv):
    """An environment in which every text is hostile."""

    action_type = HostileTextAction
    name = HOSTILE_TEXT
    description = HOSTILE_TEXT
    version = HOSTILE_TEXT
    text_renderer = HostileTextRenderer()

    @property
    def options(self) -> dict[str, Any]:
        return {HOSTILE_TEXT: HOSTILE_TEXT}

    @property
    def tools(self) -> tuple[Tool, ...]:
        schema = {"type": "object", "properties": {HOSTILE_TEXT: {"title": HOSTILE_TEXT}}}
        return (Tool(HOSTILE_TEXT, HOSTILE_TEXT, schema), Tool("look", HOSTILE_TEXT, schema))

    def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments:
            raise ToolError(HOSTILE_TEXT)
        return {HOSTILE_TEXT: HOSTILE_TEXT}

    def _run(self, code: str) -> Transition[TextObservation]:
        transition = super()._run(code)
        if transition.observation.text == "ok":
            transition.observation.text = HOSTILE_TEXT
            transition.info[HOSTILE_TEXT] = HOSTILE_TEXT
        return transition


class ToolsEnv(HostileEnv):
    """An environment whose tools say a text everywhere."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._text = text

    @property
    def options(self) -> dict[str, Any]:
        return {"text": self._text}

    @property
    def tools(self) -> list[Tool]:
        text = self._text
        schema = {"type": "object", "properties": {text: {"enum": [text]}}, "title": text}
        return [Tool(name, text, schema) for name in ("look", text)]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {self._text: [self._text]}


CHOICES = ("one", "two")
HUGE_REWARDS = (1e308, -1e308, 1e13, float("inf"), float("nan"), -1e12)
"""Rewards of which only the last is finite and small enough to be averaged."""


class ChoiceRenderer(HostileRenderer):
    """A renderer of two words."""

    def parse(self, text: str, observation: TextObservation) -> CodeAction:
        return CodeAction(code=CHOICES[text.strip() == CHOICES[1]])

    def legal_answers(self, observation: TextObservation) -> list[str]:
        return list(CHOICES)


class HostileRunEnv(HostileEnv):
    """A choice with hostile texts, in which every fourth seed gives rewards that overflow."""

    name = "hostile_run"
    text_renderer = ChoiceRenderer()

    def reset(self, *, seed: int | None = None, code: str = "") -> Transition[TextObservation]:
        self._state = State()
        self._seed = seed or 0
        return Transition(TextObservation(text=HOSTILE_TEXT))

    def step(self, action: CodeAction) -> Transition[TextObservation]:
        index, is_huge = divmod(self._seed, 4)
        reward = HUGE_REWARDS[index % len(HUGE_REWARDS)] if is_huge == 0 else 1.0
        if action.code == CHOICES[0]:
            reward /= 2
        info = {HOSTILE_TEXT: HOSTILE_TEXT}
        observation = TextObservation(text=HOSTILE_TEXT)
        return Transition(observation, reward=reward, terminated=True, info=info)
