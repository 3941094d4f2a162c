"""Comparison of sampled and trained tokens, for agents over HTTP with a real engine.

    openai client --HTTP--> endpoint --> ConversationTree --> TransformersEngine
       |                                       |                    |
       +-- many wild agents at once            +--> sequences ======+  the same tokens and log-probs
                                                        |
                                                        +--> the model computes the log-probs again

The tests play a few episodes; bench/agents.py plays a thousand.
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
from ludus.trainer.algorithms.losses import token_logprobs
from ludus.trainer.core.interfaces import GenerateFunction
from ludus.trainer.core.types import SampledCompletion, Sampling, TokenSequence
from ludus.trainer.learner.warm_start import Exchange, tokenize_conversation, warm_start
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_model, make_tokenizer
from ludus.trainer.rollout.agents.conversation_tree import ConversationTree
from ludus.trainer.rollout.agents.endpoint.exchange import (
    ChatMessage,
    FunctionCall,
    LimitError,
    PolicyRequest,
    PolicyResponse,
)
from ludus.trainer.rollout.agents.endpoint.server import AgentEndpoint, EndpointAccess
from ludus.trainer.rollout.engines.async_engine import AsyncEngine
from ludus.trainer.rollout.engines.transformers_engine import TransformersEngine
from tests.agents.random_policy import TOOL, WORDS, Sample
from tests.agents.wild_agent import WildAgent, assert_trained_tokens_are_exact

LIMITS = RolloutConfig(max_completion_tokens=40, max_tokens=1024, max_turns=24)
_NUM_SAMPLES = 768
_MAX_CONCURRENT_EPISODES = 32


@dataclass(slots=True)
class Measurement:
    """Results of the comparison."""

    num_episodes: int = 0
    num_answers: int = 0
    num_sequences: int = 0
    num_branches: int = 0
    num_tokens: int = 0
    """Number of tokens that are trained on."""
    num_calls: int = 0
    """Number of completions that called a tool."""
    largest_logprob_error: float = 0.0
    """Largest difference from the log-probs of the whole sequence, in nats."""


def train_warm_model(seed: int) -> tuple[PreTrainedModel, ChatTokenizer]:
    """Train a tiny model to sample the words and to write calls."""
    config = TinyModel(
        vocab_size=500,
        max_tokens=1024,
        warm_start_layers="all",
        warm_start_learning_rate=3e-3,
        warm_start_epochs=2,
    )
    rng = random.Random(f"warm model {seed}")
    texts = [*WORDS, json.dumps(TOOL), "<tool_call></tool_call>"] * 4
    tokenizer = make_tokenizer(texts, config.vocab_size)
    chat = ChatTokenizer(tokenizer)
    samples = []
    for _ in range(_NUM_SAMPLES):
        completion = rng.choice(WORDS)
        if rng.random() < 0.5:
            call = json.dumps({"name": "look", "arguments": {"box": rng.choice(WORDS[:3])}})
            completion = f"<tool_call>{call}</tool_call>"
        message = {"role": "user", "content": rng.choice(WORDS)}
        samples.append(tokenize_conversation(chat, [Exchange([message], completion)]))  # type: ignore[list-item]
    model = make_model(config, tokenizer, seed)
    warm_start(model, samples, config, seed)
    return model, chat


async def measure(num_episodes: int, seed: int = 0) -> Measurement:
    """Play episodes of wild agents and return the measurement.

    Raises:
        AssertionError: the trained tokens differ from the sampled ones.
    """
    model, chat = train_warm_model(seed)
    generator = AsyncEngine(TransformersEngine(model, end_token_ids=chat.end_token_ids))
    endpoint = AgentEndpoint()
    await endpoint.start()
    semaphore, results = asyncio.Semaphore(_MAX_CONCURRENT_EPISODES), Measurement()
    http = httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None))
    client = AsyncOpenAI(api_key="set for each episode", http_client=http, max_retries=0)

    async def play(index: int) -> None:
        async with semaphore:
            engine = RecordingEngine(generator)
            tree = ConversationTree(engine, chat, LIMITS, Sampling(1.0, 1), key=index)
            with endpoint.open_episode(tree) as episode:
                agent = WildAgent(_HttpResponder(client, episode.access), index)
                try:
                    await agent.play()
                except LimitError:
                    assert tree.refusal
            sequences = tree.make_sequences()
            assert_trained_tokens_are_exact(sequences, engine.samples)
            results.num_episodes += 1
            results.num_answers += tree.num_turns
            results.num_sequences += len(sequences)
            results.num_branches += tree.num_branches
            results.num_tokens += sum(int(sequence.loss_mask.sum()) for sequence in sequences)
            results.num_calls += sum("<tool_call>" in turn.text for turn in tree.turns)
            error = await asyncio.to_thread(compute_logprob_error, model, sequences)
            results.largest_logprob_error = max(results.largest_logprob_error, error)

    with closing(generator):
        await asyncio.gather(*(play(index) for index in range(num_episodes)))
    await http.aclose()
    await endpoint.stop()
    return results


@dataclass(slots=True)
class RecordingEngine:
    """An engine that records everything that it samples."""

    generate: GenerateFunction
    samples: list[Sample] = field(default_factory=list)

    async def __call__(
        self, prompt_ids: list[int], sampling: Sampling, seed: int
    ) -> SampledCompletion:
        completion = await self.generate(prompt_ids, sampling, seed)
        token_ids, logprobs = tuple(completion.token_ids), tuple(completion.logprobs)
        self.samples.append(Sample(tuple(prompt_ids), token_ids, logprobs, seed))
        return completion


@dataclass(frozen=True, slots=True)
class _HttpResponder:
    """A responder that sends requests with the openai client, as an agent process does."""

    client: AsyncOpenAI
    access: EndpointAccess

    async def respond(self, request: PolicyRequest) -> list[PolicyResponse]:
        """Return [request.num_completions] responses."""
        client = self.client.with_options(
            base_url=self.access.base_url, api_key=self.access.api_key
        )
        fields: dict[str, Any] = {
            "n": request.num_completions,
            "parallel_tool_calls": not request.is_limited_to_one_call,
        }
        if request.tools:
            fields["tools"] = list(request.tools)
        if request.stop_texts:
            fields["stop"] = list(request.stop_texts)
        if request.max_tokens:
            fields["max_completion_tokens"] = request.max_tokens
        completion = await client.chat.completions.create(
            model="any",
            messages=[_make_message_fields(message) for message in request.messages],
            **fields,
        )
        return [_read_response(choice.message) for choice in completion.choices]


def _make_message_fields(message: ChatMessage) -> Any:
    calls = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(message.calls)
    ]
    extra_fields = {"tool_calls": calls} if calls else {}
    if message.role == "tool":
        extra_fields = {"tool_call_id": "call_0"}  # type: ignore[dict-item]
    return {"role": message.role, "content": message.content, **extra_fields}


def _read_response(message: Any) -> PolicyResponse:
    calls = tuple(
        FunctionCall(call.function.name, call.function.arguments)
        for call in message.tool_calls or []
    )
    return PolicyResponse(message.content or "", calls=calls)


@torch.inference_mode()
def compute_logprob_error(model: PreTrainedModel, sequences: Sequence[TokenSequence]) -> float:
    """Return the largest difference between recorded log-probs and those of whole sequences."""
    max_error = 0.0
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids.astype(np.int64))[None]
        logits = model(input_ids=ids[:, :-1]).logits.float()
        logprobs = token_logprobs(logits, ids[:, 1:])[0].numpy()
        mask = sequence.loss_mask[1:]
        error = np.abs(logprobs[mask] - sequence.logprobs[1:][mask]).max()
        max_error = max(max_error, float(error))
    return max_error
