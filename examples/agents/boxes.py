"""An environment with three boxes, one of which contains the key.

A tool looks into a box, and the answer names the box with the key. An answer counts only if the
agent has looked into that box. An agent that looks until it sees the key and then names its box
always succeeds.
"""

from __future__ import annotations

import random
from typing import Any

from ludus.env import Action, Environment, Message, Observation, State, Transition
from ludus.env.types import Tool
from ludus.proto.errors import ActionParseError, ToolError

COLORS = ("red", "green", "blue")


class Choice(Action):
    """The agent's answer: the box with the key."""

    box: str


class Question(Observation):
    """The names of the boxes."""

    boxes: list[str]


class _Renderer:
    def render(self, observation: Question, *, first: bool) -> list[Message]:
        return [{"role": "user", "content": "Where is the key?" if first else "over"}]

    def parse(self, text: str, observation: Question) -> Choice:
        if text.strip() not in observation.boxes:
            raise ActionParseError(f"expected one of {observation.boxes}, got {text[:80]!r}")
        return Choice(box=text.strip())

    def legal_answers(self, observation: Question) -> list[str]:
        return observation.boxes


class Boxes(Environment[Choice, Question, State]):
    """A single question. The reward is 1 for the correct box if the agent has looked into it."""

    action_type = Choice
    observation_type = Question
    name = "boxes"
    description = "Find the key."
    steps_on_event_loop = True
    text_renderer = _Renderer()

    def __init__(self) -> None:
        self._key = COLORS[0]
        self._opened_boxes: set[str] = set()

    def reset(self, *, seed: int | None = None) -> Transition[Question]:
        # A prefix in the seed gives random numbers that differ from those of other environments.
        rng = random.Random() if seed is None else random.Random(f"boxes {seed}")
        self._key = rng.choice(COLORS)
        self._opened_boxes = set()
        return Transition(Question(boxes=list(COLORS)))

    def step(self, action: Choice) -> Transition[Question]:
        is_found = action.box == self._key and action.box in self._opened_boxes
        question = Question(boxes=list(COLORS))
        return Transition(question, reward=float(is_found), terminated=True, success=is_found)

    @property
    def tools(self) -> list[Tool]:
        box = {"type": "string", "enum": list(COLORS)}
        schema = {"type": "object", "properties": {"box": box}, "required": ["box"]}
        return [Tool("look", "Looks into a box.", schema)]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name != "look":
            return super().call_tool(name, arguments)
        if arguments.get("box") not in COLORS:
            raise ToolError(f"expected one of the boxes {list(COLORS)}, got {arguments}")
        self._opened_boxes.add(arguments["box"])
        return {"holds": "key" if arguments["box"] == self._key else "nothing"}

    @property
    def state(self) -> State:
        return State()
