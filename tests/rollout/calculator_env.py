"""A small environment with tools: sums, and a calculator that the policy may call."""

from __future__ import annotations

import random
from typing import Any

from ludus.env import Action, Environment, Message, Observation, State, Transition
from ludus.env.types import Tool
from ludus.proto.errors import ActionParseError, ToolError


class Answer(Action):
    """The proposed sum."""

    value: int


class Question(Observation):
    """Two numbers to add."""

    a: int
    b: int


class _Renderer:
    def render(self, observation: Question, *, first: bool) -> list[Message]:
        return [{"role": "user", "content": f"What is {observation.a} + {observation.b}?"}]

    def parse(self, text: str, observation: Question) -> Answer:
        if not text.strip().isdecimal():
            raise ActionParseError(f"expected a number, got {text!r}")
        return Answer(value=int(text))

    def legal_answers(self, observation: Question) -> list[str]:
        return []


class CalculatorEnv(Environment[Answer, Question, State]):
    """An environment that asks for one sum; the correct answer has reward 1."""

    action_type = Answer
    observation_type = Question
    state_type = State
    name = "calculator"
    text_renderer = _Renderer()

    def __init__(self) -> None:
        self._question = Question(a=0, b=0)
        self._num_calls = 0

    def reset(self, *, seed: int | None = None) -> Transition[Question]:
        rng = random.Random(seed)
        self._question = Question(a=rng.randrange(100), b=rng.randrange(100))
        return Transition(self._question)

    def step(self, action: Answer) -> Transition[Question]:
        is_correct = action.value == self._question.a + self._question.b
        counters = {"num_calls": self._num_calls}
        return Transition(self._question, reward=float(is_correct), terminated=True, info=counters)

    @property
    def tools(self) -> list[Tool]:
        integer_schema = {"type": "integer"}
        schema = {"type": "object", "properties": {"a": integer_schema, "b": integer_schema}}
        return [
            Tool("add", "Adds two numbers.", schema),
            Tool("recite", "Says a digit many times.", {"type": "object"}),
        ]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name == "recite":
            return {"digits": "七" * 100_000}
        if name != "add":
            return super().call_tool(name, arguments)
        self._num_calls += 1
        a, b = arguments.get("a"), arguments.get("b")
        if not isinstance(a, int) or not isinstance(b, int):
            raise ToolError(f"expected two integers a and b, got {arguments}")
        return {"sum": a + b}

    @property
    def state(self) -> State:
        return State()
