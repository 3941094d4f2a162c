"""Makes ready what a run begins with: a model to train, and a canary prompt to recognise it by."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from ludus.env.client import AsyncSession
from ludus.env.types import StepResult
from ludus.proto.config import (
    LanguageModelRun,
    ModelCritic,
    PpoConfig,
    PretrainedModel,
    RewardModelTerm,
    TinyModel,
)
from ludus.proto.errors import ConfigError, EpisodesFailedError, NotFoundError, UserError
from ludus.trainer.agents.warm_start import AgentGames
from ludus.trainer.core.streams import Stream, random_of, warm_start_seed
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.data.failures import commonest, count_failures, describe
from ludus.trainer.learner.critic import check_same_tokens
from ludus.trainer.learner.lora import check_targets
from ludus.trainer.learner.warm_start import (
    Conversation,
    Exchange,
    conversation_texts,
    to_sample,
    warm_start,
)
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.load import check_language_model, check_reward_model
from ludus.trainer.models.tiny import make_model, make_tokenizer, save
from ludus.trainer.rollout.environment_adapter import EnvironmentAdapter, Opening
from ludus.trainer.rollout.episode import close_session, when_there_is_room
from ludus.trainer.rollout.player import limits_of
from ludus.trainer.rollout.renderer import NO_PICTURES
from ludus.trainer.rollout.tool_adapter import ToolAdapter, Toolbox
from ludus.trainer.setup.environments import Environment

_log = logging.getLogger(__name__)

_NUM_CONCURRENT_GAMES = 256
_NUM_FIRST_SEEDS = 4
"""Episodes that are looked at before a run begins."""
_MAX_CANARY_ANSWERS = 8
_MAX_CANARY_TOKENS = 32
_MODEL_CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class _Game:
    """A game of the warm start."""

    conversations: list[Conversation]
    """One, or those that an agent had."""
    episode_return: float


async def prepare_model(
    run: LanguageModelRun, environments: Mapping[str, Environment], folder: Path
) -> str:
    """The id or folder of the model that training starts from; a tiny one is made in `folder`.

    It is the same model each time, and made once: a run that is resumed measures its distance
    from where it began.
    """
    match run.model:
        case PretrainedModel(path=path, lora=lora):
            if lora is not None:
                await asyncio.to_thread(check_targets, path, lora)
            return path
        case TinyModel() as config:
            if not (folder / _MODEL_CONFIG_FILE).is_file():
                conversations = await _random_games(run, config, environments)
                await asyncio.to_thread(make_tiny_model, config, conversations, run.seed, folder)
            return str(folder)


async def make_canary(environment: Environment, chat: ChatTokenizer) -> tuple[ScoringRequest, ...]:
    """The environment's first prompt with each legal answer: what the policy may well say.

    In reduced precision log-probs of unlikely tokens differ most where nothing is wrong. Where
    answers are not known, the end of the prompt is asked for.
    """
    opening, first = await _first_opening(environment)
    prompt_ids = chat.first_prompt(opening.messages, opening.tools)
    answers = _legal_answers(first)[:_MAX_CANARY_ANSWERS]
    if not answers:
        num_given = max(1, len(prompt_ids) - _MAX_CANARY_TOKENS)
        return (ScoringRequest(prompt_ids[:num_given], prompt_ids[num_given:]),)
    return tuple(
        ScoringRequest(prompt_ids, chat.encode_rendered_completion(answer)[:_MAX_CANARY_TOKENS])
        for answer in answers
    )


async def check_first_prompts(
    run: LanguageModelRun, environments: Mapping[str, Environment], chat: ChatTokenizer
) -> None:
    """Check that each environment's episodes begin with a prompt that leaves room for an answer.

    Some may be too long: such an episode is void. What a rollout function or an agent shows is its
    own affair.

    Raises:
        ConfigError: it is too long whatever the seed.
    """
    for name, environment in environments.items():
        if environment.config.rollout is not None or environment.config.agent is not None:
            continue
        limits = limits_of(run, name)
        lengths = []
        for seed in range(_NUM_FIRST_SEEDS):
            opening, _ = await _first_opening(environment, seed)
            lengths.append(len(chat.first_prompt(opening.messages, opening.tools)))
            if lengths[-1] + limits.max_completion_tokens <= limits.max_tokens:
                break
        else:
            raise ConfigError(
                f"environment '{name}': expected first prompts that leave room for an answer of "
                f"rollout.max_completion_tokens = {limits.max_completion_tokens} within "
                f"rollout.max_tokens = {limits.max_tokens}, got prompts of {min(lengths)} tokens "
                "and more; raise rollout.max_tokens, or shorten what the environment shows"
            )


async def _first_opening(environment: Environment, seed: int = 0) -> tuple[Opening, StepResult]:
    """What the episode of `seed` shows first; where that one fails, another one's.

    Raises:
        Exception: of the first, where all that are tried fail.
    """
    failures: list[Exception] = []
    for number in range(_NUM_FIRST_SEEDS):
        open_ = partial(environment.client.open, seed=seed + number)
        try:
            timeout_s = environment.config.reconnect_timeout_s
            session, first = await when_there_is_room(open_, timeout_s)
            try:
                return await _opening(environment, session, first), first
            finally:
                await close_session(session)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to code that is not ours
            failures.append(error)
    raise failures[0]


async def _opening(environment: Environment, session: AsyncSession, first: StepResult) -> Opening:
    """What an episode shows first, as the rollout workers will show it."""
    config = environment.config
    if (
        not config.tools
        and (config.rollout is not None or config.agent is not None)
        and first.text is None
    ):
        # Rollout functions and agents show what they like; any text tells weights apart.
        return Opening([{"role": "user", "content": json.dumps(first.observation)[:1000]}])
    return await _adapter(environment, session, first).opening()


def _adapter(
    environment: Environment, session: AsyncSession, first: StepResult
) -> EnvironmentAdapter:
    """The environment's side of an episode that has begun."""
    if not environment.config.tools:
        return EnvironmentAdapter(session, first, environment.renderer, 0.0)
    toolbox = Toolbox(environment.client, environment.description.name)
    return ToolAdapter(session, first, toolbox, 0.0)


async def _random_games(
    run: LanguageModelRun, config: TinyModel, environments: Mapping[str, Environment]
) -> list[Conversation]:
    """Games played with random legal answers, of each environment its share.

    Games that fail are left out.

    Raises:
        EpisodesFailedError: all of them fail.
    """
    weights = [environment.config.weight for environment in environments.values()]
    shares = _shares(config.warm_start_games, weights)
    slots = asyncio.Semaphore(_NUM_CONCURRENT_GAMES)
    failures: list[str] = []

    async def play(place: int, environment: Environment, number: int) -> _Game | None:
        async with slots:
            try:
                return await _random_game(run, place, environment, number, agents.get(place))
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary to code that is not ours
                failures.append(describe(error))
                return None

    async with AsyncExitStack() as stack:
        agents = {
            place: await AgentGames.start(environment.config.agent, stack)
            for place, environment in enumerate(environments.values())
            if environment.config.agent is not None
        }
        games = [
            asyncio.gather(*(play(place, environment, number) for number in range(share)))
            for place, (environment, share) in enumerate(
                zip(environments.values(), shares, strict=True)
            )
        ]
        ended = await asyncio.gather(*games)
    whole = [[game for game in some if game is not None] for some in ended]
    played = [one for some in whole for game in some for one in game.conversations]
    if failures:
        text = (
            f"{len(failures)} of {sum(shares)} games of the warm start have failed, most often: "
            f"{commonest(count_failures(failures))}"
        )
        if not played:
            raise EpisodesFailedError(text)
        _log.warning("%s", text)
    for (name, environment), some in zip(environments.items(), whole, strict=True):
        _tell(name, some, _max_turns(run, environment))
    return played


def _tell(name: str, games: Sequence[_Game], max_turns: int) -> None:
    """Log what was played in environment `name`; warn where chance seems to have no part in it."""
    if not games:
        return
    num_turns = [sum(map(len, game.conversations)) for game in games]
    _log.info(
        "the warm start in '%s': %d games of %.1f turns on average, at most %d",
        *(name, len(games), sum(num_turns) / len(games), max(num_turns)),
    )
    returns = {game.episode_return for game in games}
    if any(map(math.isnan, returns)):
        return  # an agent played them, and nobody asked what they earned
    # Questions with one answer each end so, too; but some of the random answers are right.
    if len(games) == 1 or max_turns == 1 or max(num_turns) > 1 or len(returns) > 1:
        return
    text = (
        f"all {len(games)} games of the warm start in '{name}' ended after one step, each with a "
        f"reward of {returns.pop():g}, though the answers are random; where that is how its "
        f"episodes are, set environments.{name}.max_turns = 1; else see whether they end too "
        "early, or what they hide can be guessed from their seed"
    )
    _log.warning("%s", text)
    sys.stderr.write(f"warning: {text}\n")


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `total`, in proportion to the weights but for rounding."""
    bounds = [round(total * so_far / sum(weights)) for so_far in accumulate(weights)]
    return [bound - before for before, bound in pairwise([0, *bounds])]


async def _random_game(
    run: LanguageModelRun,
    place: int,
    environment: Environment,
    number: int,
    agent: AgentGames | None,
) -> _Game:
    """Game `number` of the environment that stands at `place` in the run."""
    choose = random_of(run.seed, Stream.WARM_START_ANSWER, place, number)
    seed = warm_start_seed(run.seed, place, number)
    open_ = partial(environment.client.open, seed=seed)
    opened = await when_there_is_room(open_, run.rollout.group_timeout_s)
    max_turns = _max_turns(run, environment)
    try:
        if agent is not None:
            adapter = _adapter(environment, *opened)
            return _Game(await agent.play(adapter, seed, choose, max_turns), math.nan)
        return await _answered_at_random(environment, *opened, choose, max_turns)
    finally:
        await close_session(opened[0])


def _max_turns(run: LanguageModelRun, environment: Environment) -> int:
    return environment.config.max_turns or run.rollout.max_turns


async def _answered_at_random(
    environment: Environment,
    session: AsyncSession,
    result: StepResult,
    choose: random.Random,
    max_turns: int,
) -> _Game:
    conversation: Conversation = []
    episode_return = 0.0
    while not result.done and len(conversation) < max_turns:
        answers = _legal_answers(result)
        if not answers:
            raise ConfigError(
                "model.kind = 'tiny' learns the format from legal answers, but the environment "
                f"'{environment.description.name}' {_why_none(result)}, or take model.kind = "
                "'pretrained' with an instruction-tuned model"
            )
        answer = choose.choice(answers)
        messages = environment.renderer.messages(result, first=not conversation)
        conversation.append(Exchange(messages, answer))
        result = await session.step(**environment.renderer.action(answer, result))
        episode_return += result.reward or 0.0
    return _Game([conversation], episode_return)


def _why_none(result: StepResult) -> str:
    """Why there are no legal answers, and what gives some."""
    if result.text is None and result.tensors:
        return f"has no text_renderer, {NO_PICTURES}"
    if result.text is None:
        return "has no text_renderer; give it one, with render, parse and legal_answers"
    listed = result.observation.get("legal_actions")
    though = ", though the observation has legal_actions" if listed else ""
    return f"has a text_renderer whose legal_answers() lists none{though}; list them as text there"


def make_tiny_model(
    config: TinyModel, conversations: Sequence[Conversation], seed: int, folder: Path
) -> None:
    """Write a tiny model that knows the words of these conversations, and to speak as they do.

    Raises:
        ConfigError: none of them fits into it, or it cannot be written.
    """
    # More threads than a tiny model can feed only wait for each other.
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(conversation_texts(conversations), config.vocab_size)
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
    loss = warm_start(model, fitting, config, seed)
    _log.info(
        "the warm start has learned from %d of %d games: a cross-entropy of %.3f per answer token",
        *(len(fitting), len(samples), loss),
    )
    save(model, tokenizer, folder)


def _legal_answers(result: StepResult) -> list[str]:
    return result.text.legal_answers if result.text else []


def check_reward_models(run: LanguageModelRun) -> None:
    """Refuse reward models that are not there, or say more than one number; no weights are read.

    Raises:
        NotFoundError: there is no model.
        ConfigError: it is no reward model.
    """
    for name, environment in run.environments.items():
        field = f"{run.section_of(name)}.rewards.path"
        for path in {
            term.path for term in environment.rewards if isinstance(term, RewardModelTerm)
        }:
            if is_folder(path) and not (Path(path).expanduser() / _MODEL_CONFIG_FILE).is_file():
                raise NotFoundError(
                    f"{field} = '{path}': no reward model there; expected a folder with "
                    "config.json, as `ludus train-reward` writes it, or a Hugging Face id"
                )
            place = str(Path(path).expanduser()) if is_folder(path) else path
            check_reward_model(place, field)


def check_critic(run: LanguageModelRun) -> None:
    """Refuse a critic that is not there, or reads other tokens than the policy writes.

    The tokens of a tiny model are not known before it is made.

    Raises:
        NotFoundError: there is no model.
        ConfigError: it has other tokens.
    """
    critic = run.algorithm.critic if isinstance(run.algorithm, PpoConfig) else None
    if not isinstance(critic, ModelCritic) or critic.path is None:
        return
    place = Path(critic.path).expanduser()
    if is_folder(critic.path) and not (place / _MODEL_CONFIG_FILE).is_file():
        raise NotFoundError(
            f"algorithm.critic.path = '{critic.path}': no model there; expected a folder with "
            "config.json, or a Hugging Face id; leave path out to begin as a copy of the policy"
        )
    if isinstance(run.model, PretrainedModel):
        path = str(place) if is_folder(critic.path) else critic.path
        check_same_tokens(path, run.model.path)


def check_models(run: LanguageModelRun) -> None:
    """Check what a run loads beside its environments: policy, critic, reward models.

    Raises:
        UserError: one of them is not there, or not what it should be.
    """
    if isinstance(run.model, PretrainedModel):
        check_model_path(run.model.path)
    check_critic(run)
    check_reward_models(run)


def is_folder(model_path: str) -> bool:
    """Whether a model's path means a folder, and not a Hugging Face id."""
    return model_path.startswith((".", "/", "~")) or model_path.count("/") > 1


def check_model_path(path: str) -> None:
    """Refuse a model that is not there, before anything heavy starts.

    Raises:
        NotFoundError: there is no model in it.
    """
    if is_folder(path) and not (Path(path).expanduser() / _MODEL_CONFIG_FILE).is_file():
        raise NotFoundError(
            f"model.path = '{path}': no model there; expected a folder with config.json, or a "
            "Hugging Face id like 'Qwen/Qwen3-1.7B'"
        )
    check_language_model(str(Path(path).expanduser()) if is_folder(path) else path)
