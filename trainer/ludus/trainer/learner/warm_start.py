"""The warm start of a model made from nothing.

It teaches the format only: the answers it copies are random legal ones, so the model begins
as a player that knows how to speak and nothing of the game.
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
from ludus.trainer.core.streams import Stream, random_of
from ludus.trainer.core.types import TrainingSample
from ludus.trainer.learner.micro_batches import one_micro_batch, unscored_sample
from ludus.trainer.learner.model import Policy
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.template import ToolSpec, tools_in_words

_SAMPLES_PER_UPDATE = 16


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the environment said, and what a player answered."""

    messages: list[Message]
    answer: str
    tools: Sequence[ToolSpec] = ()
    """That the first of a conversation lists."""


Conversation = list[Exchange]


def warm_start(
    model: LlamaForCausalLM, samples: Sequence[TrainingSample], config: TinyModel, seed: int
) -> float:
    """The mean cross-entropy per answer token in the last pass, after training on `samples`."""
    policy = Policy(model).train()
    head_only = config.warm_start_layers == "head"
    trained = model.get_output_embeddings() if head_only else model
    optimizer = torch.optim.AdamW(
        trained.parameters(), lr=config.warm_start_learning_rate, weight_decay=0.0
    )
    per_epoch = math.ceil(len(samples) / _SAMPLES_PER_UPDATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=config.warm_start_learning_rate,
        total_steps=per_epoch * config.warm_start_epochs,
    )
    shuffler = random_of(seed, Stream.WARM_START_ORDER)
    losses: list[float] = []
    for _ in range(config.warm_start_epochs):
        order = shuffler.sample(range(len(samples)), len(samples))
        losses = []
        for start in range(0, len(order), _SAMPLES_PER_UPDATE):
            chosen = [samples[i] for i in order[start : start + _SAMPLES_PER_UPDATE]]
            loss = _cross_entropy(policy, chosen)
            policy.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return float(np.mean(losses))


def to_sample(chat: ChatTokenizer, conversation: Conversation) -> TrainingSample:
    """The conversation as tokens, with the answers as the tokens to learn."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    for exchange in conversation:
        prompt_ids = (
            chat.next_prompt(exchange.messages, ended=True)
            if token_ids
            else chat.first_prompt(exchange.messages, exchange.tools)
        )
        answer_ids = chat.answer_ids(exchange.answer)
        token_ids += prompt_ids + answer_ids
        loss_mask += [False] * len(prompt_ids) + [True] * len(answer_ids)
    return unscored_sample(token_ids, loss_mask)


def texts_of(conversations: Sequence[Conversation]) -> Iterator[str]:
    """The texts a tokenizer learns its words from."""
    for conversation in conversations:
        if conversation and conversation[0].tools:
            yield tools_in_words(conversation[0].tools)["content"]
        for exchange in conversation:
            yield from (message["content"] for message in exchange.messages)
            yield exchange.answer


def _cross_entropy(policy: Policy, samples: Sequence[TrainingSample]) -> torch.Tensor:
    micro_batch = one_micro_batch(samples)
    logprobs = micro_batch.of_samples(policy(micro_batch.rows, temperature=1.0).logprobs)
    return -logprobs[micro_batch.mask].mean()
