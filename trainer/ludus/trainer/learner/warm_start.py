"""The warm start of a model with random weights.

The warm start teaches only the format. Its example responses are chosen at random from the valid
responses. So the model then answers in the right format, but does not know how to play.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaForCausalLM

from ludus.env import Message
from ludus.proto.config import TinyModel
from ludus.trainer.core.streams import Stream, make_random
from ludus.trainer.core.types import TrainingSample
from ludus.trainer.learner.micro_batches import make_unscored_sample, pack_one_micro_batch
from ludus.trainer.learner.model import PolicyModel
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.probes import make_tool_list_message
from ludus.trainer.models.tool_calls import ToolSpec

_SAMPLES_PER_UPDATE = 16


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages of the environment and the response of a player."""

    messages: list[Message]
    response: str
    tools: Sequence[ToolSpec] = ()
    """Tools that the first exchange of a conversation lists."""


Conversation = list[Exchange]


def warm_start(
    model: LlamaForCausalLM, samples: Sequence[TrainingSample], config: TinyModel, seed: int
) -> float:
    """Train on `samples`; return the mean cross-entropy per sampled token in the last epoch."""
    policy = PolicyModel(model)
    trains_head_only = config.warm_start_layers == "head"
    trained_module = model.get_output_embeddings() if trains_head_only else model
    optimizer = torch.optim.AdamW(
        trained_module.parameters(), lr=config.warm_start_learning_rate, weight_decay=0.0
    )
    num_updates = math.ceil(len(samples) / _SAMPLES_PER_UPDATE) * config.warm_start_epochs
    rate_schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=config.warm_start_learning_rate, total_steps=num_updates
    )
    shuffler = make_random(seed, Stream.WARM_START_ORDER)
    losses: list[float] = []
    for _ in range(config.warm_start_epochs):
        shuffled_samples = shuffler.sample(samples, len(samples))
        losses = []
        for start in range(0, len(samples), _SAMPLES_PER_UPDATE):
            end = start + _SAMPLES_PER_UPDATE
            micro_batch = pack_one_micro_batch(shuffled_samples[start:end])
            output = policy(micro_batch.rows, temperature=1.0)
            loss = -micro_batch.gather_samples(output.logprobs)[micro_batch.mask].mean()
            policy.zero_grad()
            loss.backward()
            optimizer.step()
            rate_schedule.step()
            losses.append(loss.item())
    return float(np.mean(losses))


def tokenize_conversation(tokenizer: ChatTokenizer, conversation: Conversation) -> TrainingSample:
    """Tokenize a conversation, and mark the tokens of its responses as sampled."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    next_messages = [*(exchange.messages for exchange in conversation[1:]), list[Message]()]
    for exchange, followers in zip(conversation, next_messages, strict=True):
        if token_ids:
            prompt_ids = tokenizer.encode_next_prompt(
                exchange.messages, has_end_token=True, end_token_id=token_ids[-1]
            )
        else:
            prompt_ids = tokenizer.encode_first_prompt(exchange.messages, exchange.tools)
        response_ids = tokenizer.encode_completion(
            exchange.response, end_token_id=tokenizer.find_end_token(followers)
        )
        token_ids += prompt_ids + response_ids
        loss_mask += [False] * len(prompt_ids) + [True] * len(response_ids)
    return make_unscored_sample(token_ids, loss_mask)


def list_conversation_texts(conversations: Sequence[Conversation]) -> Iterator[str]:
    """Yield all texts of the conversations, for training a tokenizer."""
    for conversation in conversations:
        if conversation and conversation[0].tools:
            yield make_tool_list_message(conversation[0].tools)["content"]
        for exchange in conversation:
            yield from (message["content"] for message in exchange.messages)
            yield exchange.response
