"""A policy whose answers are written down: stands for a generator in tests of episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from ludus.env.client import AsyncEnvClient
from ludus.proto.config import RolloutConfig
from ludus.trainer.core.types import Completion, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.episode import Player
from ludus.trainer.rollout.renderer import ServerRenderer

SAMPLING = Sampling(temperature=1.0, max_tokens=8)
LIMITS = RolloutConfig(max_completion_tokens=8, max_tokens=256)


class ScriptedPolicy:
    """Says the next answer of the script; an answer that ends in "..." lacks its end token."""

    def __init__(
        self, chat: ChatTokenizer, script: Iterator[str], on_call: Callable[[], None] | None = None
    ) -> None:
        self._chat = chat
        self._script = script
        self._on_call = on_call
        self.prompts: list[list[int]] = []
        self.seeds: list[int] = []
        self.version = 0

    async def __call__(self, prompt_ids: list[int], sampling: Sampling, seed: int) -> Completion:
        """The next answer, each token with log-prob -1."""
        await asyncio.sleep(0)
        self.prompts.append(list(prompt_ids))
        self.seeds.append(seed)
        if self._on_call is not None:
            self._on_call()
        text = next(self._script)
        token_ids = self._chat.encode_completion(text.removesuffix("..."))
        stopped = not text.endswith("...")
        token_ids = token_ids if stopped else token_ids[:-1]
        return Completion(token_ids, [-1.0] * len(token_ids), self.version, stopped)


def make_player(
    client: AsyncEnvClient,
    chat: ChatTokenizer,
    script: Iterator[str],
    limits: RolloutConfig = LIMITS,
    on_call: Callable[[], None] | None = None,
    max_sessions: int = 0,
    **parts: Any,
) -> tuple[Player, ScriptedPolicy]:
    """A player that answers by script; `parts` are further fields of it."""
    policy = ScriptedPolicy(chat, script, on_call)
    return Player(
        "game", client, policy, chat, ServerRenderer(), limits, max_sessions, **parts
    ), policy
