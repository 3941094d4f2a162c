"""Tests of canary prompts: one for each legal completion of the first prompt."""

from __future__ import annotations

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.proto.config import LocalEnvironment
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.adapters.environment_adapter import make_renderer
from ludus.trainer.setup import first_prompts
from ludus.trainer.setup.environments import ConnectedEnvironment
from tests.rollout.chat_templates import FAMILIES, QWEN3, Family, make_family_tokenizer

MAX_PROMPT_TOKENS = 64
"""Number of tokens after which the beginning of a prompt is left out."""


async def make_environment(client: AsyncEnvClient) -> ConnectedEnvironment:
    """Return a connected environment that uses the client."""
    config = LocalEnvironment()
    return ConnectedEnvironment(
        config, "address", client, await client.describe(), make_renderer(config, "game")
    )


@pytest.mark.parametrize("enable_thinking", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
async def test_each_legal_completion_has_a_canary_prompt_from_the_template(
    client: AsyncEnvClient, family: Family, enable_thinking: bool
) -> None:
    tokenizer = make_family_tokenizer(family)
    chat = ChatTokenizer(tokenizer, enable_thinking=enable_thinking)
    environment = await make_environment(client)
    canary = await first_prompts.make_canary_prompts(environment, chat, 512)
    session, result = await client.open(seed=0)
    await session.close()
    assert result.text is not None
    assert len(canary) == len(result.text.legal_answers) == 2
    first_messages = environment.renderer.render_messages(result, is_first=True)
    for prompt, text in zip(canary, result.text.legal_answers, strict=True):
        start = max(0, len(chat.encode_first_prompt(first_messages)) - MAX_PROMPT_TOKENS)
        prompt_ids = chat.encode_whole_prompt([*first_messages, make_reply(text)])[start:]
        canary_ids = prompt.prompt_ids + prompt.completion_ids
        assert prompt.completion_ids[-1] == chat.end_token_id
        assert canary_ids[:-1] == prompt_ids[: len(canary_ids) - 1]


async def test_canary_completion_contains_reasoning_for_a_thinking_model(
    client: AsyncEnvClient,
) -> None:
    tokenizer = make_family_tokenizer(QWEN3)
    chat = ChatTokenizer(tokenizer, enable_thinking=True)
    canary = await first_prompts.make_canary_prompts(await make_environment(client), chat, 512)
    assert all("</think>" in tokenizer.decode(prompt.completion_ids) for prompt in canary)


async def test_canary_uses_the_end_of_the_prompt_without_legal_completions(
    client: AsyncEnvClient, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = await make_environment(client)
    [answer_canary, _] = await first_prompts.make_canary_prompts(environment, chat, 512)
    monkeypatch.setattr(first_prompts, "list_legal_answers", lambda _: [])
    [canary] = await first_prompts.make_canary_prompts(environment, chat, 512)
    assert canary.prompt_ids + canary.completion_ids == answer_canary.prompt_ids
    assert 0 < len(canary.completion_ids) <= 32


def make_reply(text: str) -> dict[str, str]:
    """Return an assistant message."""
    return {"role": "assistant", "content": text}
