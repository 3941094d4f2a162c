"""An agent that does with its history what agents do, and what must hold whatever it does."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ludus.trainer.core.types import TokenSequence
from ludus.trainer.rollout.agents.endpoint.exchange import (
    ChatMessage,
    FunctionCall,
    PolicyRequest,
    PolicyResponse,
    Responder,
)
from tests.agents.random_policy import TOOL, WORDS, Sampled


class WildAgent:
    """Does with its history what agents do: goes on, asks again, side by side, edits, shortens."""

    def __init__(self, policy: Responder, seed: int) -> None:
        self._policy = policy
        self._draw = random.Random(f"wild agent {seed}")
        self._histories: list[list[ChatMessage]] = [[ChatMessage("user", "Where is the key?")]]

    async def play(self) -> None:
        """A few rounds of one to three requests at once."""
        for _ in range(self._draw.randrange(1, 5)):
            await asyncio.gather(*(self._ask() for _ in range(self._draw.choice((1, 1, 2, 3)))))

    async def _ask(self) -> None:
        draw = self._draw
        history = list(draw.choice(self._histories))
        match draw.randrange(8):
            case 0:  # compaction
                history = [ChatMessage("system", "Summary: " + draw.choice(WORDS)), *history[-2:]]
            case 1 if len(history) > 2:  # an edit
                place = draw.randrange(len(history))
                history[place] = replace(history[place], content=draw.choice(WORDS))
            case 2 if len(history) > 2:  # a window
                history = history[2:]
        asked = PolicyRequest(
            tuple(history),
            tools=draw.choice(((), (TOOL,), (TOOL,))),
            num=draw.choice((1, 1, 1, 2)),
            stop=draw.choice(((), ("STOP",))),
            max_tokens=draw.choice((None, 5)),
            max_one_call=draw.random() < 0.3,
        )
        for said in await self._policy.respond(asked):
            self._histories.append([*history, sent_back(said), self._reply(said)])

    def _reply(self, said: PolicyResponse) -> ChatMessage:
        text = self._draw.choice(WORDS)
        return ChatMessage("tool", text) if said.calls else ChatMessage("user", text)


def sent_back(said: PolicyResponse) -> ChatMessage:
    """An answer as clients send it back: words stripped, JSON written anew, thoughts left out."""
    calls = tuple(FunctionCall(call.name, call.arguments.replace(": ", ":")) for call in said.calls)
    return ChatMessage("assistant", said.content.strip(), calls)


def check_exact(sequences: tuple[TokenSequence, ...], sampled: Sequence[Sampled]) -> None:
    """Every answer is trained once, after its own prompt; what was cut off is a prefix of it."""
    left = Counter(sampled)
    turns = [(sequence, turn) for sequence in sequences for turn in sequence.turns]
    # The longest first: a short one may be the beginning of several, which a long one is not.
    for sequence, turn in sorted(turns, key=lambda one: one[1].start - one[1].end):
        prompt = tuple(sequence.token_ids[: turn.start].tolist())
        said = tuple(sequence.token_ids[turn.start : turn.end].tolist())
        logprobs = sequence.logprobs[turn.start : turn.end]
        match = [
            one
            for one in left
            if one.prompt_ids == prompt
            and one.token_ids[: len(said)] == said
            and np.allclose(one.logprobs[: len(said)], logprobs)
        ]
        assert match, "an answer is trained that was not sampled so"
        left[match[0]] -= 1
        left += Counter()
    assert not left, "an answer was sampled and is not trained"
    for sequence in sequences:
        assert not sequence.logprobs[~sequence.loss_mask].any()
