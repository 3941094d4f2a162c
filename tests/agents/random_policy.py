"""A random policy that replaces the engine and samples words, tool calls and reasoning.

As with a real policy, a text can have several encodings. Decoding sampled tokens and encoding
the text again can therefore give different tokens.
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


def make_tiny_chat(*, keep_thinking: bool = True) -> ChatTokenizer:
    """Return a tokenizer for the words."""
    texts = [*WORDS, json.dumps(TOOL), "<tool_call><think></think></tool_call>"] * 4
    return ChatTokenizer(make_tokenizer(texts, 500), keep_thinking=keep_thinking)


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the tokens that were sampled after it."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    seed: int


class RandomPolicy:
    """A policy that samples at random after a delay and records its samples."""

    def __init__(self, chat: ChatTokenizer, seed: int) -> None:
        self._chat = chat
        self._rng = random.Random(f"random policy {seed}")
        self.samples: list[Sample] = []
        self.is_blocked = False
        """True if every call waits forever."""

    async def __call__(
        self, prompt_ids: list[int], sampling: Sampling, seed: int
    ) -> SampledCompletion:
        """Return a completion, cut to the maximum number of tokens."""
        if self.is_blocked:
            await asyncio.Event().wait()
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)
        token_ids = self._encode(self._draw_text())[: sampling.max_tokens]
        logprobs = [-self._rng.random() - 0.01 for _ in token_ids]
        self.samples.append(Sample(tuple(prompt_ids), tuple(token_ids), tuple(logprobs), seed))
        has_end_token = token_ids[-1] == self._chat.end_token_id
        return SampledCompletion(token_ids, logprobs, 0, has_end_token)

    def _draw_text(self) -> str:
        rng = self._rng
        text = rng.choice(WORDS)
        if rng.random() < 0.4:
            call = json.dumps({"name": "look", "arguments": {"box": rng.choice(WORDS)}})
            text += f"<tool_call>\n{call}\n</tool_call>" * rng.choice((1, 1, 2))
        if rng.random() < 0.2:
            text = f"<think>{rng.choice(WORDS)}</think>{text}"
        return text

    def _encode(self, text: str) -> list[int]:
        """Encode the text, in two parts if the parts decode to the same text."""
        token_ids = self._chat.encode_completion(text)
        split_index = self._rng.randrange(1, len(text) + 1)
        parts = [
            *self._chat.encode_completion(text[:split_index])[:-1],
            *self._chat.encode_completion(text[split_index:]),
        ]
        return parts if self._chat.decode(parts) == text else token_ids
