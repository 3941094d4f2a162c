"""Boxes, one of which holds the key: a tool looks into one box, the answer names the right one.

Who names a box without having looked into it is not believed. Who looks on until the key is found,
and then says where it was, always wins.
"""

from __future__ import annotations

import random
from typing import Any

from ludus.env import Action, Environment, Message, Observation, State, Transition
from ludus.env.types import Tool
from ludus.proto.errors import ActionParseError, ToolError

COLOURS = ("red", "green", "blue")


class Choice(Action):
    """The box in which the key is said to be."""

    box: str


class Question(Observation):
    """Which boxes there are."""

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
    """One question; the right box is worth 1 once it was looked into."""

    action_type = Choice
    observation_type = Question
    name = "boxes"
    description = "Find the key."
    steps_on_event_loop = True
    text_renderer = _Renderer()

    def __init__(self) -> None:
        self._key = COLOURS[0]
        self._seen: set[str] = set()

    def reset(self, *, seed: int | None = None) -> Transition[Question]:
        # A text of its own: others, too, may draw from a small number.
        draw = random.Random() if seed is None else random.Random(f"boxes {seed}")
        self._key = draw.choice(COLOURS)
        self._seen = set()
        return Transition(Question(boxes=list(COLOURS)))

    def step(self, action: Choice) -> Transition[Question]:
        found = action.box == self._key and action.box in self._seen
        question = Question(boxes=list(COLOURS))
        return Transition(question, reward=float(found), terminated=True, success=found)

    @property
    def tools(self) -> list[Tool]:
        box = {"type": "string", "enum": list(COLOURS)}
        schema = {"type": "object", "properties": {"box": box}, "required": ["box"]}
        return [Tool("look", "Looks into a box.", schema)]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name != "look":
            return super().call_tool(name, arguments)
        if arguments.get("box") not in COLOURS:
            raise ToolError(f"expected one of the boxes {list(COLOURS)}, got {arguments}")
        self._seen.add(arguments["box"])
        return {"holds": "key" if arguments["box"] == self._key else "nothing"}

    @property
    def state(self) -> State:
        return State()
