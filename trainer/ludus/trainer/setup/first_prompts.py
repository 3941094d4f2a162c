"""The first prompts of an environment, and the canary prompts that are made from them."""

from __future__ import annotations

from functools import partial

from ludus.env import Message
from ludus.env.client import AsyncSession
from ludus.env.text.unicode import format_json
from ludus.env.types import StepResult
from ludus.proto.errors import ConfigError, UserError
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.models.chat import ChatTokenizer, count_chars, is_surely_longer
from ludus.trainer.rollout.adapters.environment_adapter import (
    EnvironmentAdapter,
    Opening,
    RendererError,
)
from ludus.trainer.rollout.adapters.tool_adapter import ToolAdapter, Toolbox
from ludus.trainer.rollout.episode import close_session, retry_while_full
from ludus.trainer.setup.environments import ConnectedEnvironment

MAX_FIRST_SEEDS = 4
"""Maximum number of seeds that are tried for a first prompt, per environment."""
_MAX_CANARY_ANSWERS = 8
_MAX_CANARY_TOKENS = 32
_MAX_CANARY_PROMPT_TOKENS = 64
"""Maximum number of tokens of a canary prompt. The learner and the workers score all of them for
every version, which would take as long as a small training step if the prompts were long."""
_MAX_CANARY_CHARACTERS = 1000
"""Maximum number of characters of an answer, and of a prompt that is too long to be encoded."""


async def make_canary_prompts(
    environment: ConnectedEnvironment, chat: ChatTokenizer, max_tokens: int
) -> tuple[ScoringRequest, ...]:
    """Return the canary prompts: the end of the environment's first prompt with each legal answer.

    An engine proves with these prompts that it uses the learner's weights. Legal answers are likely
    completions. The log-probs of unlikely tokens are the least precise in reduced precision.
    Without legal answers, the end of the prompt is scored.

    Args:
        max_tokens: maximum number of tokens of an episode. A prompt that surely has more is cut,
            because any text identifies weights.
    """
    opening, first_result = await fetch_first_opening(environment)
    if is_surely_longer(count_chars(opening.messages, opening.tools), max_tokens):
        opening = Opening([_make_short_message(opening.messages[-1]["content"])])
    prompt_ids = chat.encode_first_prompt(opening.messages, opening.tools)
    prompt_ids = prompt_ids[-_MAX_CANARY_PROMPT_TOKENS:]
    answers = list_legal_answers(first_result)[:_MAX_CANARY_ANSWERS]
    if not answers:
        prompt_length = max(1, len(prompt_ids) - _MAX_CANARY_TOKENS)
        return (ScoringRequest(prompt_ids[:prompt_length], prompt_ids[prompt_length:]),)
    return tuple(
        ScoringRequest(
            prompt_ids,
            chat.encode_completion(answer[:_MAX_CANARY_CHARACTERS], add_prefix=True)[
                :_MAX_CANARY_TOKENS
            ],
        )
        for answer in answers
    )


async def fetch_first_opening(
    environment: ConnectedEnvironment, seed: int = 0
) -> tuple[Opening, StepResult]:
    """Return an episode's opening and first result; if the seed fails, try the next seeds.

    Raises:
        ConfigError: the renderer fails in all episodes.
        Exception: the first failure, if all episodes fail.
    """
    failures: list[Exception] = []
    for offset in range(MAX_FIRST_SEEDS):
        open_session = partial(environment.client.open, seed=seed + offset)
        try:
            timeout_s = environment.config.reconnect_timeout_s
            session, first_result = await retry_while_full(open_session, timeout_s)
            try:
                return await _make_opening(environment, session, first_result), first_result
            finally:
                await close_session(session)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            failures.append(error)
    if isinstance(failures[0], RendererError):
        raise ConfigError(str(failures[0])) from failures[0]
    raise failures[0]


def make_adapter(
    environment: ConnectedEnvironment, session: AsyncSession, first_result: StepResult
) -> EnvironmentAdapter:
    """Return the adapter through which a player sees an open episode."""
    if not environment.config.tools:
        return EnvironmentAdapter(session, first_result, environment.renderer, 0.0)
    toolbox = Toolbox(environment.client, environment.description.name)
    return ToolAdapter(session, first_result, toolbox, 0.0)


def list_legal_answers(result: StepResult) -> list[str]:
    """Return the legal answers that an environment reports; empty if it has no text."""
    return result.text.legal_answers if result.text else []


async def _make_opening(
    environment: ConnectedEnvironment, session: AsyncSession, first_result: StepResult
) -> Opening:
    """Return the opening as the rollout workers will show it."""
    config = environment.config
    if (
        not config.tools
        and (config.rollout is not None or config.agent is not None)
        and first_result.text is None
    ):
        # Rollout functions and agents choose their own prompts; any text identifies weights.
        return Opening([_make_short_message(format_json(first_result.observation))])
    return await make_adapter(environment, session, first_result).make_opening()


def _make_short_message(text: str) -> Message:
    return {"role": "user", "content": text[:_MAX_CANARY_CHARACTERS]}
