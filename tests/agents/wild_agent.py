"""An agent that edits its history at random, and a check of the resulting training tokens."""

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
from tests.agents.random_policy import TOOL, WORDS, Sample


class WildAgent:
    """An agent that continues, retries, edits and shortens histories, in parallel requests."""

    def __init__(self, policy: Responder, seed: int) -> None:
        self._policy = policy
        self._rng = random.Random(f"wild agent {seed}")
        self._histories: list[list[ChatMessage]] = [[ChatMessage("user", "Where is the key?")]]

    async def play(self) -> None:
        """Send a few rounds of one to three parallel requests."""
        for _ in range(self._rng.randrange(1, 5)):
            await asyncio.gather(
                *(self._send_request() for _ in range(self._rng.choice((1, 1, 2, 3))))
            )

    async def _send_request(self) -> None:
        rng = self._rng
        history = list(rng.choice(self._histories))
        match rng.randrange(8):
            case 0:  # Compaction.
                history = [ChatMessage("system", "Summary: " + rng.choice(WORDS)), *history[-2:]]
            case 1 if len(history) > 2:  # Edit.
                index = rng.randrange(len(history))
                history[index] = replace(history[index], content=rng.choice(WORDS))
            case 2 if len(history) > 2:  # Sliding window.
                history = history[2:]
        request = PolicyRequest(
            tuple(history),
            tools=rng.choice(((), (TOOL,), (TOOL,))),
            num_completions=rng.choice((1, 1, 1, 2)),
            stop_texts=rng.choice(((), ("STOP",))),
            max_tokens=rng.choice((None, 5)),
            is_limited_to_one_call=rng.random() < 0.3,
        )
        for response in await self._policy.respond(request):
            reply = self.draw_reply(response)
            self._histories.append([*history, repeat_response(response), reply])

    def draw_reply(self, response: PolicyResponse) -> ChatMessage:
        """Return a random reply: a tool result after a call, a user message otherwise."""
        text = self._rng.choice(WORDS)
        return ChatMessage("tool", text) if response.calls else ChatMessage("user", text)


def repeat_response(response: PolicyResponse) -> ChatMessage:
    """Return the message in which a client repeats a response.

    The text is stripped, the JSON has different spaces, and the reasoning is missing.
    """
    calls = tuple(
        FunctionCall(call.name, call.arguments.replace(": ", ":")) for call in response.calls
    )
    return ChatMessage("assistant", response.content.strip(), calls)


def assert_trained_tokens_are_exact(
    sequences: tuple[TokenSequence, ...], samples: Sequence[Sample]
) -> None:
    """Check that every completion, or its start if cut, is trained on once, after its prompt."""
    remaining_samples = Counter(samples)
    turns = [(sequence, turn) for sequence in sequences for turn in sequence.turns]
    # Long turns are matched first, because a short turn can be the start of several completions.
    for sequence, turn in sorted(turns, key=lambda pair: pair[1].start - pair[1].end):
        prompt = tuple(sequence.token_ids[: turn.start].tolist())
        token_ids = tuple(sequence.token_ids[turn.start : turn.end].tolist())
        logprobs = sequence.logprobs[turn.start : turn.end]
        matches = [
            completion
            for completion in remaining_samples
            if completion.prompt_ids == prompt
            and completion.token_ids[: len(token_ids)] == token_ids
            and np.allclose(completion.logprobs[: len(token_ids)], logprobs)
        ]
        assert matches, "a trained turn was not sampled after this prompt"
        remaining_samples[matches[0]] -= 1
        remaining_samples += Counter()
    assert not remaining_samples, "a sampled completion is not trained on"
    for sequence in sequences:
        assert not sequence.logprobs[~sequence.loss_mask].any()
