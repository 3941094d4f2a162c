"""The policy that is trained, as a program asks it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from ludus.env import Message
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.trainer.actors.processes import Workers
from ludus.trainer.core.streams import Stream, key_of
from ludus.trainer.core.types import Completion
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.player import sampling_of


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy said to a prompt, as text and as tokens."""

    text: str
    """Without special tokens."""
    prompt_ids: list[int]
    completion: Completion


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy that is trained, as the rollout workers hold it."""

    run: LanguageModelRun
    workers: Workers
    chat: ChatTokenizer
    settled: Callable[[], Awaitable[None]]
    """Waits until no newer weights are on their way."""

    async def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        num: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> list[str]:
        """`num` answers to a user's words, or to the messages of a conversation.

        Args:
            temperature: 0 takes the likeliest token; None is that of the rollouts.
            max_tokens: of an answer; None is rollout.max_completion_tokens.
            seed: decides what is sampled.

        Raises:
            ConfigError: prompt and answer are longer than rollout.max_tokens, or an argument is no
                number that can be.
        """
        answers = await self.answers(
            self.prompt_ids(prompt),
            num=num,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
        )
        return [answer.text for answer in answers]

    def prompt_ids(self, prompt: str | Sequence[Message]) -> list[int]:
        """The tokens of a user's words, or of a conversation, up to where the policy speaks."""
        messages: Sequence[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
        return self.chat.first_prompt(messages)

    async def answers(
        self,
        prompt_ids: Sequence[int],
        *,
        num: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> list[Answer]:
        """`num` answers to a prompt of tokens; see `generate`.

        Args:
            top_p: None is that of the rollouts.
        """
        if num < 1:
            raise ConfigError(f"expected 1 answer or more, got num = {num}")
        rollout = self.run.rollout
        sampling = sampling_of(rollout, temperature)
        if max_tokens is not None:
            sampling = replace(sampling, max_tokens=max_tokens)
        if top_p is not None:
            sampling = replace(sampling, top_p=top_p)
        most = rollout.max_tokens
        if len(prompt_ids) + sampling.max_tokens > most:
            raise ConfigError(
                f"expected a prompt that leaves room for an answer of {sampling.max_tokens} tokens "
                f"within rollout.max_tokens = {most}, got one of {len(prompt_ids)}; shorten it, or "
                "lower max_tokens"
            )
        keys = [key_of(self.run.seed, Stream.ANSWER, seed, number) for number in range(num)]
        await self.settled()
        completions = await self.workers.complete(prompt_ids, sampling, keys)
        return [
            Answer(self.chat.decode(one.token_ids), list(prompt_ids), one) for one in completions
        ]
