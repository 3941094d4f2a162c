"""An environment and functions for run configurations that fail on certain inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ludus.env import Message, StepResult, Transition
from ludus.env.client import AsyncSession
from ludus.trainer.rollout.conversation import Conversation
from ludus.trainer.rollout.episode import EpisodeEnd
from tests.env.counting_env import (
    CountAction,
    CountingEnv,
    CountingRenderer,
    CountObservation,
)

RESET_FAILURE_SEED = 666
RENDER_FAILURE_SEED = 667
NAN_REWARD_SEED = 668
HUGE_REWARD_SEED = 669
LARGE_RETURN_SEED = 670
"""Seed of an episode whose rewards are allowed, but whose return is not."""
UNKNOWN_ROLE_SEED = 671
_REWARD_SCALES = {
    NAN_REWARD_SEED: float("nan"),
    HUGE_REWARD_SEED: -1e308,
    LARGE_RETURN_SEED: 4e11,
}


class FragileRenderer(CountingRenderer):
    """A renderer that fails for totals of -1 and 3 and cannot parse text without a number."""

    def render(self, observation: CountObservation, *, first: bool) -> list[Message]:
        if observation.total in (-1, 3):
            raise KeyError("no picture")
        if observation.total == -2:
            return [{"role": "\x1b[2J", "content": "Total -2."}]
        return super().render(observation, first=first)

    def parse(self, text: str, observation: CountObservation) -> CountAction:
        return CountAction(add=int(text.removeprefix("ADD")))


class FragileEnv(CountingEnv):
    """A counting environment that fails for certain seeds, actions and totals."""

    name = "fragile"
    text_renderer = FragileRenderer()
    _reward_scale = 1.0

    def reset(
        self, *, seed: int | None = None, start: int = 0, note: str = ""
    ) -> Transition[CountObservation]:
        if seed == RESET_FAILURE_SEED:
            raise FileNotFoundError("level 666")
        self._reward_scale = _REWARD_SCALES.get(seed, 1.0) if seed is not None else 1.0
        starts = {RENDER_FAILURE_SEED: -1, UNKNOWN_ROLE_SEED: -2}
        return super().reset(seed=seed, start=starts.get(seed or 0, start))

    def step(self, action: CountAction) -> Transition[CountObservation]:
        transition = super().step(action)
        assert transition.reward is not None
        return Transition(
            transition.observation,
            reward=transition.reward * self._reward_scale,
            terminated=transition.terminated,
        )


class LongRenderer(CountingRenderer):
    """A renderer whose messages have a million characters."""

    def render(self, observation: CountObservation, *, first: bool) -> list[Message]:
        return [{"role": "user", "content": "Total 0. " * 111_112}]


class LongEnv(FragileEnv):
    """A counting environment that shows long messages."""

    text_renderer = LongRenderer()


class SometimesLongRenderer(LongRenderer):
    """A renderer whose messages are long for one total."""

    def render(self, observation: CountObservation, *, first: bool) -> list[Message]:
        if observation.total:
            return CountingRenderer.render(self, observation, first=first)
        return super().render(observation, first=first)


class SometimesLongEnv(FragileEnv):
    """A counting environment that shows long messages for seed 0."""

    text_renderer = SometimesLongRenderer()

    def reset(
        self, *, seed: int | None = None, start: int = 0, note: str = ""
    ) -> Transition[CountObservation]:
        return super().reset(seed=seed, start=2 if seed else 0, note=note)


WRONG_MESSAGES: Mapping[str, Any] = {
    "empty": [],
    "none": None,
    "text": "Total?",
    "a tuple in a list": [("user", "Total?")],
    "no content": [{"role": "user"}],
    "number": [{"role": "user", "content": 1}],
    "no role": [{"content": "Total?"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Total?"}]}],
    "no user": [{"role": "system", "content": "Total?"}],
}
"""Values that a renderer must not return at the start of an episode."""


class WrongRenderer(CountingRenderer):
    """A renderer that returns a wrong value."""

    def __init__(self, key: str) -> None:
        self._messages = WRONG_MESSAGES[key]

    def render(self, observation: CountObservation, *, first: bool) -> list[Message]:
        messages: list[Message] = self._messages
        return messages


class WrongRendererEnv(CountingEnv):
    """A counting environment whose renderer returns the value with this key of WRONG_MESSAGES."""

    def __init__(self, key: str = "empty") -> None:
        super().__init__()
        self.text_renderer = WrongRenderer(key)


def render_nothing(observation: dict[str, Any], first: bool) -> list[Message]:
    return []


def render(observation: dict[str, Any], first: bool) -> list[Message]:
    """Return the total as a message; raise an error if the total is above 1."""
    if observation["total"] > 1:
        raise IndexError("the total is above 1")
    return [{"role": "user", "content": f"Total {observation['total']}."}]


def render_with_unknown_role(observation: dict[str, Any], first: bool) -> list[Message]:
    return [{"role": "\x1b[2J", "content": "Total?"}]


def render_as_string(observation: dict[str, Any], first: bool) -> str:
    return "Total?"


def parse(text: str, observation: dict[str, Any]) -> dict[str, int]:
    """Return the number in the text."""
    return {"add": int(text.removeprefix("ADD"))}


async def play_and_divide_by_zero(
    session: AsyncSession, first_result: StepResult, conversation: Conversation
) -> EpisodeEnd:
    """Sample one completion, then raise an error in a separate task."""
    assert first_result.text is not None
    conversation.add(first_result.text.messages)
    await conversation.complete()

    async def divide() -> float:
        return 1 / 0

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(divide())
    raise AssertionError("unreachable")
