"""Makes ready what a run begins with: a model to train, and a probe to recognise it by."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from ludus.env.client import AsyncEnvClient
from ludus.env.types import StepResult
from ludus.proto.config import PretrainedModel, RunConfig, TinyModel
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.trainer.learner.warm_start import (
    Conversation,
    Exchange,
    texts_of,
    to_sample,
    warm_start,
)
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_model, make_tokenizer, save
from ludus.trainer.rollout.face import Face
from ludus.trainer.types import Probe

_NUM_CONCURRENT_GAMES = 256
_MAX_PROBE_TOKENS = 32


async def prepare_model(run: RunConfig, client: AsyncEnvClient, face: Face, folder: Path) -> str:
    """The id or folder of the model that training starts from; a tiny one is made in `folder`."""
    match run.model:
        case PretrainedModel(path=path):
            _check_path(path)
            return path
        case TinyModel() as config:
            conversations = await _random_games(run, client, face, config.warm_start_games)
            await asyncio.to_thread(_make_tiny, config, conversations, run.seed, folder)
            return str(folder)


async def make_probe(client: AsyncEnvClient, face: Face, chat: ChatTokenizer) -> Probe:
    """The environment's first prompt and its legal answers: what the policy is asked in earnest."""
    session, first = await client.open(seed=0)
    await session.close()
    prompt_ids = chat.first_prompt(face.messages(first, first=True))
    answers = [token for answer in _legal_answers(first) for token in chat.answer_ids(answer)]
    return Probe(prompt_ids, (answers or prompt_ids)[:_MAX_PROBE_TOKENS])


async def _random_games(
    run: RunConfig, client: AsyncEnvClient, face: Face, num_games: int
) -> list[Conversation]:
    """Games played with random legal answers, in the order of their seeds."""
    places = asyncio.Semaphore(_NUM_CONCURRENT_GAMES)

    async def play(seed: int) -> Conversation:
        async with places:
            return await _random_game(run, client, face, seed)

    first = run.seed * 1_000_003 % 2**30
    return list(await asyncio.gather(*(play(first + i) for i in range(num_games))))


async def _random_game(
    run: RunConfig, client: AsyncEnvClient, face: Face, seed: int
) -> Conversation:
    choose = random.Random(seed)
    session, result = await client.open(seed=seed)
    conversation: Conversation = []
    while not result.done and len(conversation) < run.rollout.max_turns:
        answers = _legal_answers(result)
        if not answers:
            raise ConfigError(
                "model.kind = 'tiny' learns the format from legal answers, but the environment "
                "lists none; take model.kind = 'pretrained' with an instruction-tuned model"
            )
        answer = choose.choice(answers)
        messages = face.messages(result, first=not conversation)
        conversation.append(Exchange(messages, answer))
        result = await session.step(**face.action(answer, result))
    await session.close()
    return conversation


def _make_tiny(
    config: TinyModel, conversations: Sequence[Conversation], seed: int, folder: Path
) -> None:
    # More threads than a tiny model can feed only wait for each other.
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(texts_of(conversations), config.vocab_size)
    chat = ChatTokenizer(tokenizer)
    model = make_model(config, tokenizer, seed)
    samples = [to_sample(chat, conversation) for conversation in conversations]
    fitting = [sample for sample in samples if len(sample.token_ids) <= config.max_tokens]
    if not fitting:
        shortest = min(len(sample.token_ids) for sample in samples)
        raise ConfigError(
            f"model.max_tokens = {config.max_tokens} holds no whole game: the shortest of "
            f"{len(samples)} takes {shortest} tokens; raise it, and rollout.max_tokens"
        )
    warm_start(model, fitting, config, seed)
    save(model, tokenizer, folder)


def _legal_answers(result: StepResult) -> list[str]:
    return result.text.legal_answers if result.text else []


def _check_path(path: str) -> None:
    """Nothing; a folder that is meant but not there is refused before anything heavy starts."""
    is_folder = path.startswith((".", "/", "~")) or path.count("/") > 1
    if is_folder and not (Path(path).expanduser() / "config.json").is_file():
        raise NotFoundError(
            f"model.path = '{path}': no model there; expected a folder with config.json, or a "
            "Hugging Face id like 'Qwen/Qwen3-1.7B'"
        )
