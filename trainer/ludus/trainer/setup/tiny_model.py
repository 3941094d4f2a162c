"""The model that training starts from; a tiny model is created and warmed up here.

A tiny model learns the format of completions from episodes with random legal answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path

import torch

from ludus.env.client import AsyncSession
from ludus.env.types import StepResult
from ludus.proto.config import LanguageModelRun, PretrainedModel, TinyModel
from ludus.proto.errors import ConfigError, EpisodesFailedError, UserError
from ludus.trainer.core.model_paths import MODEL_CONFIG_FILE
from ludus.trainer.core.output import warn_user
from ludus.trainer.core.streams import Stream, derive_warm_start_seed, make_random
from ludus.trainer.data.failures import count_failures, describe_error, find_most_common_reason
from ludus.trainer.learner.lora import check_targets
from ludus.trainer.learner.warm_start import (
    Conversation,
    Exchange,
    list_conversation_texts,
    tokenize_conversation,
    warm_start,
)
from ludus.trainer.models.chat import ChatTokenizer, count_chars, is_surely_longer
from ludus.trainer.models.tiny import make_model, make_tokenizer, save
from ludus.trainer.rollout.adapters.environment_adapter import NO_TEXT_REASON, RendererError
from ludus.trainer.rollout.agents.random_responses import play_with_random_responses
from ludus.trainer.rollout.agents.runner import AgentHost
from ludus.trainer.rollout.conversation import ConversationFullError
from ludus.trainer.rollout.episode import close_session, retry_while_full
from ludus.trainer.setup.environments import ConnectedEnvironment
from ludus.trainer.setup.first_prompts import list_legal_answers, make_adapter

_log = logging.getLogger(__name__)

_NUM_CONCURRENT_EPISODES = 256


@dataclass(frozen=True, slots=True)
class _WarmStartEpisode:
    """An episode of the warm start."""

    conversations: list[Conversation]
    """One conversation, or all conversations of an agent."""
    episode_return: float
    """NaN if an agent played the episode."""


async def prepare_model(
    run: LanguageModelRun, environments: Mapping[str, ConnectedEnvironment], folder: Path
) -> str:
    """Return the id or folder of the model that training starts from; make a tiny model.

    A tiny model is made only once, so that a resumed run has the same reference model.
    """
    match run.model:
        case PretrainedModel(path=path, lora=lora):
            if lora is not None:
                await asyncio.to_thread(check_targets, path, lora)
            return path
        case TinyModel() as config:
            if not (folder / MODEL_CONFIG_FILE).is_file():
                conversations = await _play_warm_start(run, config, environments)
                await asyncio.to_thread(make_tiny_model, config, conversations, run.seed, folder)
            return str(folder)


def make_tiny_model(
    config: TinyModel, conversations: Sequence[Conversation], seed: int, folder: Path
) -> None:
    """Write a tiny model whose vocabulary and format come from these conversations."""
    # For a tiny model, several threads are slower, because they mostly wait for each other.
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(list_conversation_texts(conversations), config.vocab_size)
    chat = ChatTokenizer(tokenizer)
    model = make_model(config, tokenizer, seed)
    samples = [tokenize_conversation(chat, conversation) for conversation in conversations]
    short_samples = [sample for sample in samples if len(sample.token_ids) <= config.max_tokens]
    if not short_samples:
        min_length = min(len(sample.token_ids) for sample in samples)
        raise ConfigError(
            f"model.max_tokens = {config.max_tokens} is too small for a whole episode: the "
            f"shortest of {len(samples)} has {min_length} tokens; raise it, and rollout.max_tokens"
        )
    loss = warm_start(model, short_samples, config, seed)
    _log.info(
        "the warm start trained on %d of %d episodes: a cross-entropy of %.3f per completion token",
        len(short_samples),
        len(samples),
        loss,
    )
    save(model, tokenizer, folder)


async def _play_warm_start(
    run: LanguageModelRun, config: TinyModel, environments: Mapping[str, ConnectedEnvironment]
) -> list[Conversation]:
    """Play episodes with random legal answers, in each environment according to its weight.

    Failed episodes are left out.
    """
    weights = [environment.config.weight for environment in environments.values()]
    semaphore = asyncio.Semaphore(_NUM_CONCURRENT_EPISODES)
    failures: list[str] = []

    async def play(
        index: int, environment: ConnectedEnvironment, episode: int
    ) -> list[_WarmStartEpisode]:
        """Return the episode; record a failure and return an empty list if it fails."""
        async with semaphore:
            try:
                return [await _play_episode(run, index, environment, episode, agents.get(index))]
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - third-party code may raise anything
                failures.append(describe_error(error))
                return []

    async with AsyncExitStack() as exit_stack:
        agents = {
            index: await AgentHost.start(environment.config.agent, exit_stack)
            for index, environment in enumerate(environments.values())
            if environment.config.agent is not None
        }
        episode_counts = zip(
            environments.values(), _split_by_weight(config.warm_start_games, weights), strict=True
        )
        batches = (
            asyncio.gather(*(play(index, environment, episode) for episode in range(num_episodes)))
            for index, (environment, num_episodes) in enumerate(episode_counts)
        )
        episode_lists = await asyncio.gather(*batches)
    episodes = {
        name: list(chain(*lists)) for name, lists in zip(environments, episode_lists, strict=True)
    }
    conversations = [
        conversation
        for episode in chain(*episodes.values())
        for conversation in episode.conversations
    ]
    if failures:
        _report_failures(failures, config.warm_start_games, has_no_episode=not conversations)
    for name, environment in environments.items():
        _log_episodes(name, episodes[name], _get_max_turns(run, environment))
    return conversations


def _report_failures(failures: Sequence[str], num_episodes: int, *, has_no_episode: bool) -> None:
    """Log the most common failure of the warm start; fail if all episodes failed."""
    message = (
        f"{len(failures)} of {num_episodes} episodes of the warm start failed; the most common "
        f"reason: {find_most_common_reason(count_failures(failures))}"
    )
    if has_no_episode:
        raise EpisodesFailedError(message)
    _log.warning("%s", message)


def _log_episodes(name: str, episodes: Sequence[_WarmStartEpisode], max_turns: int) -> None:
    """Log the episodes of environment `name`; warn if random answers all had the same result."""
    if not episodes:
        return
    num_turns = [sum(map(len, episode.conversations)) for episode in episodes]
    _log.info(
        "the warm start in '%s': %d episodes of %.1f turns on average, at most %d",
        name,
        len(episodes),
        sum(num_turns) / len(episodes),
        max(num_turns),
    )
    returns = {episode.episode_return for episode in episodes}
    if any(map(math.isnan, returns)):
        return
    # Episodes with one question end after one step too, but some random answers to it are right.
    if len(episodes) == 1 or max_turns == 1 or max(num_turns) > 1 or len(returns) > 1:
        return
    warn_user(
        f"all {len(episodes)} episodes of the warm start in '{name}' ended after one step, each "
        f"with a reward of {returns.pop():g}, although the answers are random; if its episodes are "
        f"meant to have one step, set environments.{name}.max_turns = 1; otherwise check whether "
        "they end too early, or whether their secret can be guessed from the seed"
    )


def _split_by_weight(total_count: int, weights: Sequence[float]) -> list[int]:
    """Split `total_count` into whole numbers in proportion to the weights."""
    bounds = [round(total_count * weight_sum / sum(weights)) for weight_sum in accumulate(weights)]
    return [end - start for start, end in pairwise([0, *bounds])]


async def _play_episode(
    run: LanguageModelRun,
    environment_index: int,
    environment: ConnectedEnvironment,
    episode_index: int,
    agent: AgentHost | None,
) -> _WarmStartEpisode:
    generator = make_random(run.seed, Stream.WARM_START_ANSWER, environment_index, episode_index)
    seed = derive_warm_start_seed(run.seed, environment_index, episode_index)
    open_session = partial(environment.client.open, seed=seed)
    session, first_result = await retry_while_full(open_session, run.rollout.group_timeout_s)
    max_turns = _get_max_turns(run, environment)
    assert isinstance(run.model, TinyModel)
    max_tokens = run.model.max_tokens
    try:
        if agent is not None:
            adapter = make_adapter(environment, session, first_result)
            conversations = await play_with_random_responses(
                agent, adapter, seed, generator, max_turns
            )
            return _WarmStartEpisode(_select_short(conversations, max_tokens), math.nan)
        return await _answer_randomly(
            environment, session, first_result, generator, max_turns, max_tokens
        )
    except RendererError as error:
        raise ConfigError(str(error)) from error
    finally:
        await close_session(session)


def _get_max_turns(run: LanguageModelRun, environment: ConnectedEnvironment) -> int:
    return environment.config.max_turns or run.rollout.max_turns


async def _answer_randomly(
    environment: ConnectedEnvironment,
    session: AsyncSession,
    result: StepResult,
    generator: random.Random,
    max_turns: int,
    max_tokens: int,
) -> _WarmStartEpisode:
    conversation: Conversation = []
    episode_return = 0.0
    while not result.done and len(conversation) < max_turns:
        answers = list_legal_answers(result)
        if not answers:
            raise ConfigError(
                "model.kind = 'tiny' learns the format from legal answers, but the environment "
                f"'{environment.description.name}' {_explain_no_answers(result)}, or use "
                "model.kind = 'pretrained' with an instruction-tuned model"
            )
        answer = generator.choice(answers)
        messages = environment.renderer.render_messages(result, is_first=not conversation)
        conversation.append(Exchange(messages, answer))
        _select_short([conversation], max_tokens)
        result = await session.step(**environment.renderer.parse_action(answer, result))
        episode_return += result.reward or 0.0
    return _WarmStartEpisode([conversation], episode_return)


def _select_short(conversations: Sequence[Conversation], max_tokens: int) -> list[Conversation]:
    """Return the conversations that are short enough to be encoded."""
    lengths = list(map(_count_conversation_chars, conversations))
    if all(is_surely_longer(length, max_tokens) for length in lengths):
        raise ConversationFullError(
            f"a conversation has {min(lengths)} characters, which exceed model.max_tokens = "
            f"{max_tokens}; shorten what the environment shows, or raise model.max_tokens"
        )
    return [
        conversation
        for conversation, length in zip(conversations, lengths, strict=True)
        if not is_surely_longer(length, max_tokens)
    ]


def _count_conversation_chars(conversation: Conversation) -> int:
    return sum(
        count_chars(exchange.messages, exchange.tools) + len(exchange.response)
        for exchange in conversation
    )


def _explain_no_answers(result: StepResult) -> str:
    """Explain why there are no legal answers, and what to change."""
    if result.text is None and result.tensors:
        return f"has no text_renderer, {NO_TEXT_REASON}"
    if result.text is None:
        return "has no text_renderer; define one, with render, parse and legal_answers"
    has_actions = bool(result.observation.get("legal_actions"))
    concession = ", although the observation has legal_actions" if has_actions else ""
    return (
        f"has a text_renderer whose legal_answers() is empty{concession}; list the answers as text "
        "there"
    )
