"""Agents over HTTP with a real engine: is what it sampled what would be trained?

    openai client --HTTP--> endpoint --> ConversationTree --> TransformersEngine
       |                                       |                    |
       +-- wild agents, many at once           +--> sequences ======+  the same tokens and log-probs
                                                        |
                                                        +--> the model reads them once more, whole

Used by the tests with few episodes, by bench/agents.py with a thousand.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
import torch
from openai import AsyncOpenAI
from transformers import PreTrainedModel

from ludus.proto.config import RolloutConfig, TinyModel
from ludus.trainer.algorithms.logits import token_logprobs
from ludus.trainer.core.interfaces import GenerateFn
from ludus.trainer.core.types import SampledCompletion, Sampling, TokenSequence
from ludus.trainer.learner.warm_start import Exchange, to_sample, warm_start
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_model, make_tokenizer
from ludus.trainer.rollout.agents.conversation_tree import ConversationTree
from ludus.trainer.rollout.agents.endpoint.api_error import LimitError
from ludus.trainer.rollout.agents.endpoint.exchange import (
    ChatMessage,
    FunctionCall,
    PolicyRequest,
    PolicyResponse,
)
from ludus.trainer.rollout.agents.endpoint.server import AgentEndpoint, EndpointAccess
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from ludus.trainer.rollout.engines.transformers_engine import TransformersEngine
from tests.agents.random_policy import TOOL, WORDS, Sampled
from tests.agents.wild_agent import WildAgent, check_exact

LIMITS = RolloutConfig(max_completion_tokens=40, max_tokens=1024, max_turns=24)
_NUM_GAMES = 768
_NUM_AT_ONCE = 32


@dataclass(slots=True)
class Measured:
    """What was found."""

    num_episodes: int = 0
    num_answers: int = 0
    num_sequences: int = 0
    num_branches: int = 0
    num_tokens: int = 0
    """Sampled, kept and trained on."""
    num_calls: int = 0
    """Answers that called a tool."""
    largest_logprob_error: float = 0.0
    """Of a kept token, against the model that reads the whole sequence; nats."""


def warm_model(seed: int) -> tuple[PreTrainedModel, ChatTokenizer]:
    """A tiny model that has learned to say the words, and to write calls."""
    config = TinyModel(
        vocab_size=500,
        max_tokens=1024,
        warm_start_layers="all",
        warm_start_learning_rate=3e-3,
        warm_start_epochs=2,
    )
    draw = random.Random(f"warm model {seed}")
    texts = [*WORDS, json.dumps(TOOL), "<tool_call></tool_call>"] * 4
    tokenizer = make_tokenizer(texts, config.vocab_size)
    chat = ChatTokenizer(tokenizer)
    samples = []
    for _ in range(_NUM_GAMES):
        said = draw.choice(WORDS)
        if draw.random() < 0.5:
            call = json.dumps({"name": "look", "arguments": {"box": draw.choice(WORDS[:3])}})
            said = f"<tool_call>{call}</tool_call>"
        asked = {"role": "user", "content": draw.choice(WORDS)}
        samples.append(to_sample(chat, [Exchange([asked], said)]))  # type: ignore[list-item]
    model = make_model(config, tokenizer, seed)
    warm_start(model, samples, config, seed)
    return model, chat


async def measure(num_episodes: int, seed: int = 0) -> Measured:
    """What a number of wild episodes came to.

    Raises:
        AssertionError: a token was trained that was not sampled so, or sampled and not trained.
    """
    model, chat = warm_model(seed)
    generator = AsyncEngine(TransformersEngine(model, end_token_id=chat.end_token_id))
    endpoint = AgentEndpoint()
    await endpoint.start()
    slots, found = asyncio.Semaphore(_NUM_AT_ONCE), Measured()
    http = httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None))
    client = AsyncOpenAI(api_key="set for each episode", http_client=http, max_retries=0)

    async def play(number: int) -> None:
        async with slots:
            recorded = Recorded(generator)
            tree = ConversationTree(recorded, chat, LIMITS, Sampling(1.0, 1), key=number)
            with endpoint.episode(tree) as episode:
                agent = WildAgent(_OverHttp(client, episode.access), number)
                try:
                    await agent.play()
                except LimitError:
                    assert tree.refusal
            sequences = tree.sequences()
            check_exact(sequences, recorded.sampled)
            found.num_episodes += 1
            found.num_answers += tree.num_turns
            found.num_sequences += len(sequences)
            found.num_branches += tree.num_branches
            found.num_tokens += sum(int(one.loss_mask.sum()) for one in sequences)
            found.num_calls += sum("<tool_call>" in one.answer for one in tree.played_turns())
            error = await asyncio.to_thread(logprob_error, model, sequences)
            found.largest_logprob_error = max(found.largest_logprob_error, error)

    with closing(generator):
        await asyncio.gather(*(play(number) for number in range(num_episodes)))
    await http.aclose()
    await endpoint.stop()
    return found


@dataclass(slots=True)
class Recorded:
    """The engine, with a note of all that it samples."""

    generate: GenerateFn
    sampled: list[Sampled] = field(default_factory=list)

    async def __call__(
        self, prompt_ids: list[int], sampling: Sampling, seed: int
    ) -> SampledCompletion:
        one = await self.generate(prompt_ids, sampling, seed)
        self.sampled.append(
            Sampled(tuple(prompt_ids), tuple(one.token_ids), tuple(one.logprobs), seed)
        )
        return one


@dataclass(frozen=True, slots=True)
class _OverHttp:
    """An Responder that asks through the openai client, as an agent's process does."""

    client: AsyncOpenAI
    access: EndpointAccess

    async def answer(self, asked: PolicyRequest) -> list[PolicyResponse]:
        """[asked.num] answers."""
        client = self.client.with_options(
            base_url=self.access.base_url, api_key=self.access.api_key
        )
        fields: dict[str, Any] = {"n": asked.num, "parallel_tool_calls": not asked.max_one_call}
        if asked.tools:
            fields["tools"] = list(asked.tools)
        if asked.stop:
            fields["stop"] = list(asked.stop)
        if asked.max_tokens:
            fields["max_completion_tokens"] = asked.max_tokens
        completion = await client.chat.completions.create(
            model="any", messages=[_written(one) for one in asked.messages], **fields
        )
        return [_read(choice.message) for choice in completion.choices]


def _written(message: ChatMessage) -> Any:
    calls = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": c.name, "arguments": c.arguments},
        }
        for n, c in enumerate(message.calls)
    ]
    extra = {"tool_calls": calls} if calls else {}
    if message.role == "tool":
        extra = {"tool_call_id": "call_0"}  # type: ignore[dict-item]
    return {"role": message.role, "content": message.content, **extra}


def _read(message: Any) -> PolicyResponse:
    calls = tuple(
        FunctionCall(call.function.name, call.function.arguments)
        for call in message.tool_calls or []
    )
    return PolicyResponse(message.content or "", calls=calls)


@torch.inference_mode()
def logprob_error(model: PreTrainedModel, sequences: Sequence[TokenSequence]) -> float:
    """The largest difference between kept log-probs and those of the whole sequence, read once."""
    worst = 0.0
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids.astype(np.int64))[None]
        read = token_logprobs(model(input_ids=ids[:, :-1]).logits.float(), ids[:, 1:])[0].numpy()
        mask = sequence.loss_mask[1:]
        worst = max(worst, float(np.abs(read[mask] - sequence.logprobs[1:][mask]).max()))
    return worst
