"""Reward and rollout functions for the configurations of tests."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from ludus.env import Message, StepResult
from ludus.env.client import AsyncSession
from ludus.proto.errors import ActionParseError
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.rollout.conversation import Conversation
from ludus.trainer.rollout.episode import EpisodeEnd

RECORDED_CALLS: list[dict[str, list[Any]]] = []
"""Arguments of each call of `remember`."""
THREAD_IDS: set[int] = set()
LOOP_EVENT = threading.Event()
TEST_END_EVENT = threading.Event()


def record_arguments(**columns: list[Any]) -> list[float]:
    """Record the arguments; return 0 for each episode."""
    RECORDED_CALLS.append(columns)
    THREAD_IDS.add(threading.get_ident())
    return [0.0] * len(columns["prompts"])


def count_words(completions: list[list[Message]]) -> list[int]:
    """Return the number of words of each completion."""
    return [
        sum(
            len(message["content"].split())
            for message in messages
            if message["role"] == "assistant"
        )
        for messages in completions
    ]


async def return_if_finished(
    episode_return: list[float], *, terminated: list[bool], unknown: str = "default"
) -> list[float | None]:
    """Return `episode_return` for each finished episode, otherwise None."""
    await asyncio.sleep(0)
    assert unknown == "default"
    return [
        reward if is_finished else None
        for reward, is_finished in zip(episode_return, terminated, strict=True)
    ]


def skip_first_score(completion_ids: list[list[int]]) -> list[float | None]:
    return [None, *(float(len(token_ids)) for token_ids in completion_ids[1:])]


def read_added_field(added: list[int | None]) -> list[float]:
    """Return the field `added` of the environment's info, or 0 if it is None."""
    return [float(number or 0) for number in added]


def require_unknown_column(moon: list[str]) -> list[float]:
    return [0.0] * len(moon)


def return_too_few(prompts: list[list[Message]]) -> list[float]:
    return [1.0] * (len(prompts) - 1)


def return_no_list(prompts: list[list[Message]]) -> float:
    return 1.0


def return_huge(prompts: list[list[Message]]) -> list[float]:
    return [-1e308] * len(prompts)


def return_long_integer(prompts: list[list[Message]]) -> list[int]:
    return [10**400] * len(prompts)


def return_nan(prompts: list[list[Message]]) -> list[float]:
    return [float("nan")] * len(prompts)


def return_words(prompts: list[list[Message]]) -> list[str]:
    return ["good"] * len(prompts)


def raise_key_error(prompts: list[list[Message]]) -> list[float]:
    raise KeyError("answer")


def exit_process(prompts: list[list[Message]]) -> list[float]:
    """Exit the process, as code that a policy has written may do."""
    exec("exit(3)")
    return []


async def exit_from_event_loop(prompts: list[list[Message]]) -> list[float]:
    raise SystemExit(3)


async def exit_in_episode(
    session: AsyncSession, first_result: StepResult, conversation: Conversation
) -> EpisodeEnd:
    raise SystemExit(3)


async def wait_forever(prompts: list[list[Message]]) -> list[float]:
    await asyncio.Event().wait()
    return []


def wait_for_loop(prompts: list[list[Message]]) -> list[float]:
    """Return 1 for each episode if `LOOP_EVENT` is set within 20 s, otherwise 0."""
    return [float(LOOP_EVENT.wait(20))] * len(prompts)


def wait_for_test_end(prompts: list[list[Message]]) -> list[float]:
    """Block until `TEST_END_EVENT` is set; return 0 for each episode."""
    TEST_END_EVENT.wait(60)
    return [0.0] * len(prompts)


def take_positional_only(prompts: list[list[Message]], /) -> list[float]:
    return [1.0] * len(prompts)


async def play_in_pairs(
    session: AsyncSession, first_result: StepResult, conversation: Conversation
) -> EpisodeEnd:
    """Sample a thought and an action per step; return the thoughts as a field of the episode."""
    assert first_result.text is not None
    conversation.add(first_result.text.messages)
    thoughts: list[str] = []
    while True:
        thoughts.append(await conversation.complete())
        conversation.add([{"role": "user", "content": "And now your move."}])
        action_text = await conversation.complete()
        if action_text == "GIVE UP":
            raise ActionParseError("expected a move")
        result = await session.step(text=action_text)
        conversation.add_reward(result.reward or 0.0)
        if result.done:
            fields = {"thoughts": thoughts}
            return EpisodeEnd(RolloutStatus.TERMINATED, fields, success=result.success)
        assert result.text is not None
        conversation.add(result.text.messages)


async def play_without_end(
    session: AsyncSession, first_result: StepResult, conversation: Conversation
) -> None:
    """Return None instead of an `EpisodeEnd`."""


def count_thoughts(thoughts: list[list[str]]) -> list[float]:
    """Return the number of thoughts of each episode."""
    return [float(len(episode_thoughts)) for episode_thoughts in thoughts]
