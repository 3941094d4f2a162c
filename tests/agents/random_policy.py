"""Stands for an engine: it says words, calls and nonsense at random, in tokens of its own choosing.

The same text is sampled in several ways of writing it as tokens, as real policies do it: whoever
decodes and encodes again gets other tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass

from ludus.trainer.core.types import SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer

WORDS = ("red", "green", "blue box", "the key is here", "STOP", "one STOP two", "a\nb", "ü?")
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks into a box.",
        "parameters": {"type": "object", "properties": {"box": {"type": "string"}}},
    },
}


def tiny_chat(*, keep_thinking: bool = True) -> ChatTokenizer:
    """A tokenizer that knows the words."""
    texts = [*WORDS, json.dumps(TOOL), "<tool_call><think></think></tool_call>"] * 4
    return ChatTokenizer(make_tokenizer(texts, 500), keep_thinking=keep_thinking)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was asked of the engine, and what it sampled."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    seed: int


class RandomPolicy:
    """Answers at random, after a while; keeps all that it has sampled."""

    def __init__(self, chat: ChatTokenizer, seed: int) -> None:
        self._chat = chat
        self._draw = random.Random(f"random policy {seed}")
        self.sampled: list[Sampled] = []

    async def __call__(
        self, prompt_ids: list[int], sampling: Sampling, seed: int
    ) -> SampledCompletion:
        """An answer, cut off where it is longer than it may be."""
        for _ in range(self._draw.randrange(4)):
            await asyncio.sleep(0)
        token_ids = self._written(self._text())[: sampling.max_tokens]
        logprobs = [-self._draw.random() - 0.01 for _ in token_ids]
        self.sampled.append(Sampled(tuple(prompt_ids), tuple(token_ids), tuple(logprobs), seed))
        stopped = token_ids[-1] == self._chat.end_token_id
        return SampledCompletion(token_ids, logprobs, 0, stopped)

    def _text(self) -> str:
        draw = self._draw
        text = draw.choice(WORDS)
        if draw.random() < 0.4:
            call = json.dumps({"name": "look", "arguments": {"box": draw.choice(WORDS)}})
            text += f"<tool_call>\n{call}\n</tool_call>" * draw.choice((1, 1, 2))
        if draw.random() < 0.2:
            text = f"<think>{draw.choice(WORDS)}</think>{text}"
        return text

    def _written(self, text: str) -> list[int]:
        """The text as tokens, cut in two at a random place where that leaves it the same."""
        whole = self._chat.encode_completion(text)
        place = self._draw.randrange(1, len(text) + 1)
        parts = [
            *self._chat.encode_completion(text[:place])[:-1],
            *self._chat.encode_completion(text[place:]),
        ]
        return parts if self._chat.decode(parts) == text else whole
