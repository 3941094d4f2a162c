"""Conversation trees train exactly on the sampled tokens, however an agent edits its history."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from ludus.proto.config import GrpoConfig, RolloutConfig
from ludus.trainer.core.types import Rollout, RolloutGroup, RolloutStatus, Sampling
from ludus.trainer.data.batch import make_batch
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.agents.conversation_tree import ConversationTree
from ludus.trainer.rollout.agents.endpoint.exchange import (
    ChatMessage,
    LimitError,
    PolicyRequest,
    PolicyResponse,
)
from tests.agents.random_policy import TOOL, RandomPolicy, make_tiny_chat
from tests.agents.wild_agent import WildAgent, assert_trained_tokens_are_exact, repeat_response

LIMITS = RolloutConfig(max_completion_tokens=60, max_tokens=3000, max_turns=64)
NUM_EPISODES = 1000


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return make_tiny_chat()


def make_tree(
    chat: ChatTokenizer, seed: int = 0, limits: RolloutConfig = LIMITS
) -> tuple[ConversationTree, RandomPolicy]:
    policy = RandomPolicy(chat, seed)
    return ConversationTree(policy, chat, limits, Sampling(1.0, 1), key=seed), policy


def make_user_message(text: str) -> ChatMessage:
    return ChatMessage("user", text)


async def complete(tree: ConversationTree, *messages: ChatMessage, **fields: Any) -> PolicyResponse:
    return (await tree.respond(PolicyRequest(messages, **fields)))[0]


@pytest.mark.long
@pytest.mark.slow
async def test_random_agent_episodes_train_exactly_on_sampled_tokens(
    chat: ChatTokenizer,
) -> None:
    num_sequences = num_long_sequences = 0
    for seed in range(NUM_EPISODES):
        tree, policy = make_tree(chat, seed)
        await WildAgent(tree, seed).play()
        sequences = tree.make_sequences()
        assert_trained_tokens_are_exact(sequences, policy.samples)
        num_sequences += len(sequences)
        num_long_sequences += sum(len(sequence.turns) > 1 for sequence in sequences)
    # The check is only meaningful if some histories continue and some branch.
    assert num_sequences > 2 * NUM_EPISODES
    assert num_long_sequences > NUM_EPISODES // 3


@pytest.mark.slow
async def test_growing_history_is_one_sequence(
    chat: ChatTokenizer,
) -> None:
    for seed in range(20):
        tree, policy = make_tree(chat, seed)
        history = [make_user_message("Where?")]
        for _ in range(4):
            response = await complete(tree, *history, tools=(TOOL,))
            agent = WildAgent(tree, seed)
            history += [repeat_response(response), agent.draw_reply(response)]
        [sequence] = tree.make_sequences()
        assert len(sequence.turns) == 4
        assert [len(sample.prompt_ids) for sample in policy.samples] == [
            turn.start for turn in sequence.turns
        ]


async def test_retry_is_a_branch_that_trains_only_on_the_new_completion(
    chat: ChatTokenizer,
) -> None:
    tree, _ = make_tree(chat, 5)
    first_response = await complete(tree, make_user_message("a"))
    history = (make_user_message("a"), first_response.chat_message, make_user_message("b"))
    await complete(tree, *history)
    await complete(tree, *history)
    first_branch, second_branch = tree.make_sequences()
    assert (len(first_branch.turns), len(second_branch.turns)) == (2, 1)
    start = first_branch.turns[1].start
    assert first_branch.token_ids[:start].tolist() == second_branch.token_ids[:start].tolist()
    assert tree.num_branches == 1


async def test_equal_prompts_have_equal_seeds_in_any_order_unless_repeated(
    chat: ChatTokenizer,
) -> None:
    seeds: list[dict[int, int]] = []
    for order in (("a", "b"), ("b", "a")):
        tree, policy = make_tree(chat, 3)
        for text in (*order, "a"):
            await complete(tree, make_user_message(text))
        seeds.append({hash(sample.prompt_ids): sample.seed for sample in policy.samples[:2]})
        assert len({sample.seed for sample in policy.samples}) == 3
    assert seeds[0] == seeds[1]


async def test_agent_seed_determines_sampling_within_an_episode(
    chat: ChatTokenizer,
) -> None:
    seeds = []
    for key in (1, 2):
        tree, policy = make_tree(chat, key)
        for seed in (7, 7, 8):
            await complete(tree, make_user_message("a"), seed=seed)
        seeds.append([sample.seed for sample in policy.samples])
        assert seeds[-1][0] == seeds[-1][1] != seeds[-1][2]
    assert not set(seeds[0]) & set(seeds[1])


@pytest.mark.slow
async def test_stripped_reasoning_keeps_training_tokens_exact() -> None:
    chat = make_tiny_chat(keep_thinking=False)
    for seed in range(50):
        tree, policy = make_tree(chat, seed)
        await WildAgent(tree, seed).play()
        assert_trained_tokens_are_exact(tree.make_sequences(), policy.samples)


async def test_request_beyond_limits_is_rejected_and_turns_are_kept(chat: ChatTokenizer) -> None:
    limits = LIMITS.model_copy(update={"max_turns": 2, "max_tokens": 150})
    tree, _ = make_tree(chat, 1, limits)
    with pytest.raises(LimitError, match=r"rollout\.max_tokens = 150") as length_error:
        await complete(tree, make_user_message("a b c d e " * 40))
    assert (length_error.value.status, length_error.value.code) == (400, "context_length_exceeded")
    await asyncio.gather(
        complete(tree, make_user_message("a")), complete(tree, make_user_message("b"))
    )
    with pytest.raises(LimitError, match=r"rollout\.max_turns = 2") as turn_limit_error:
        await complete(tree, make_user_message("c"))
    assert turn_limit_error.value.status == 403
    assert tree.num_turns == 2
    with pytest.raises(LimitError):
        tree.refuse_if_full()


async def test_cancelled_request_leaves_no_turn(chat: ChatTokenizer) -> None:
    tree, policy = make_tree(chat, 1, LIMITS.model_copy(update={"max_turns": 1}))

    policy.is_blocked = True
    request_task = asyncio.ensure_future(complete(tree, make_user_message("a")))
    await asyncio.sleep(0)
    request_task.cancel()
    await asyncio.wait([request_task])
    policy.is_blocked = False
    await complete(tree, make_user_message("a"))
    assert tree.num_turns == 1


async def test_last_turn_has_the_reward_and_branches_share_the_advantage(
    chat: ChatTokenizer,
) -> None:
    rollouts = []
    for seed, reward in enumerate((1.0, 0.0)):
        tree, _ = make_tree(chat, seed)
        first_response = await complete(tree, make_user_message("a"))
        await complete(
            tree, make_user_message("a"), first_response.chat_message, make_user_message("b")
        )
        await complete(tree, make_user_message("c"))
        tree.add_reward(reward)
        sequences = tree.make_sequences()
        assert [turn.reward for branch in sequences for turn in branch.turns] == [0.0, 0.0, reward]
        rollouts.append(
            Rollout("game", 0, sequences, reward, reward, (), RolloutStatus.TERMINATED, 0)
        )
    batch = make_batch([RolloutGroup(0, "game", tuple(rollouts))], GrpoConfig())
    assert batch.num_samples == 4
    signs = [
        set(np.sign(batch.advantages[sample_index][batch.loss_masks[row]]))
        for sample_index, row in enumerate(batch.sequence_of_sample)
    ]
    assert signs == [{1.0}, {1.0}, {-1.0}, {-1.0}]
