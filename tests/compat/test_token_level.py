"""Episodes of token-level environments, with exact tokens and a reward per token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from ludus.env.adapters.gymnasium.token_level import TokenLevelEnvironment
from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.proto.config import PpoConfig, RolloutConfig
from ludus.trainer.compat.gymformer.token_level import TokenConversation, TokenLevelRunner
from ludus.trainer.core.types import (
    Rollout,
    RolloutGroup,
    RolloutStatus,
    SampledCompletion,
    Sampling,
)
from ludus.trainer.data.batch import make_batch
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer
from ludus.trainer.rollout.adapters.environment_adapter import ServerRenderer
from tests.env.token_env import END_TOKEN, TOKENS_ENV_ID
from tests.rollout.scripted_policy import ScriptedPlayer

SAMPLING = Sampling(temperature=1.0, max_tokens=4)
LIMITS = RolloutConfig(max_completion_tokens=4, max_tokens=32)


class ScriptedTokenPolicy:
    """A policy that returns scripted completions in order."""

    def __init__(self, script: Iterator[list[int]]) -> None:
        self._script = script
        self.prompts: list[list[int]] = []

    async def __call__(
        self, prompt_ids: list[int], sampling: Sampling, seed: int
    ) -> SampledCompletion:
        self.prompts.append(list(prompt_ids))
        token_ids = next(self._script)
        return SampledCompletion(
            token_ids, [-1.0 - token_id for token_id in token_ids], 0, has_end_token=False
        )


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer(["hard 16 vs 10", "HIT", "STAND"] * 5, 320))


@pytest_asyncio.fixture
async def client() -> AsyncIterator[AsyncEnvClient]:
    async with (
        EnvServer(lambda: TokenLevelEnvironment(TOKENS_ENV_ID), ServerOptions(port=0)) as server,
        await AsyncEnvClient.connect(server.grpc_address) as environment_client,
    ):
        yield environment_client


async def play(
    client: AsyncEnvClient, chat: ChatTokenizer, *script: list[int], limits: RolloutConfig = LIMITS
) -> tuple[Rollout, ScriptedTokenPolicy]:
    policy = ScriptedTokenPolicy(iter(script))
    runner = TokenLevelRunner(
        environment="tokens",
        client=client,
        generate=policy,
        chat=chat,
        renderer=ServerRenderer("game"),
        limits=limits,
    )
    return await ScriptedPlayer(runner).play_episode(3), policy


async def test_prompt_contains_only_environment_tokens(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    rollout, policy = await play(client, chat, [8, END_TOKEN])
    _, prompt_token = policy.prompts[0]
    [sequence] = rollout.sequences
    assert sequence.token_ids.tolist() == [0, prompt_token, 8, END_TOKEN]
    assert sequence.loss_mask.tolist() == [False, False, True, True]
    assert rollout.status is RolloutStatus.TERMINATED


async def test_rewards_are_assigned_per_token(client: AsyncEnvClient, chat: ChatTokenizer) -> None:
    rollout, _ = await play(client, chat, [1, 2, 3, 4], [7, 8, 40, END_TOKEN])
    group = RolloutGroup(0, "tokens", (rollout,))
    [rewards] = make_batch([group], PpoConfig()).rewards
    assert rewards.tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 0, 0]
    assert rollout.episode_return == sum(rewards)


async def test_tokens_after_the_end_token_are_not_trained_on(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    rollout, _ = await play(client, chat, [8, END_TOKEN, 10, 11])
    [sequence] = rollout.sequences
    assert sequence.token_ids[2:].tolist() == [8, END_TOKEN]
    assert sequence.logprobs.tolist() == [0, 0, -9, -10]


async def test_environment_tokens_are_in_the_prompt_and_masked(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    rollout, policy = await play(client, chat, [5, 6, 7], [END_TOKEN])
    assert policy.prompts[1] == [*policy.prompts[0], 5, 50]
    [sequence] = rollout.sequences
    assert sequence.loss_mask.tolist() == [False, False, True, False, True]


async def test_an_episode_without_room_for_a_completion_is_truncated(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    limits = LIMITS.model_copy(update={"max_tokens": 9})
    rollout, _ = await play(client, chat, [1, 1, 1, 1], [1], limits=limits)
    assert rollout.status is RolloutStatus.TRUNCATED
    assert len(rollout.sequences[0].token_ids) == 6


async def test_unknown_token_id_is_an_invalid_action(
    client: AsyncEnvClient, chat: ChatTokenizer
) -> None:
    rollout, _ = await play(client, chat, [1, 60_000])
    assert rollout.status is RolloutStatus.INVALID_ACTION
    assert rollout.episode_return == LIMITS.known_invalid_action_reward


async def test_number_of_rewards_must_match_the_sampled_tokens(chat: ChatTokenizer) -> None:
    policy = ScriptedTokenPolicy(iter([[1, 2]]))
    conversation = TokenConversation(policy, chat, LIMITS, SAMPLING, key=0)
    conversation.add_tokens([3])
    with pytest.raises(ValueError, match="got 1 rewards"):
        conversation.keep_rewarded_tokens([1.0])
    await conversation.complete_tokens()
    with pytest.raises(ValueError, match="got 3"):
        conversation.keep_rewarded_tokens([1.0, 0.0, 0.0])
