"""Tests of conversations: tokens, turns, rewards and the start of new sequences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ludus.env import Message
from ludus.proto.config import RolloutConfig
from ludus.trainer.core.types import SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.conversation import Conversation, ConversationFullError
from tests.rollout.chat_templates import CHATML, QWEN3, Family, make_family_tokenizer
from tests.rollout.scripted_policy import ScriptedPolicy

SAMPLING = Sampling(temperature=1.0, max_tokens=1)
LIMITS = RolloutConfig(max_completion_tokens=40, max_tokens=2000, max_turns=8)
THOUGHT = "<think>\nbust?\n</think>\n\nHIT"


def make_prompt(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


def make_conversation(
    family: Family,
    script: Iterator[str],
    limits: RolloutConfig = LIMITS,
    *,
    keep_thinking: bool = True,
) -> tuple[Conversation, ScriptedPolicy]:
    """Return a conversation with a scripted policy that may output reasoning."""
    chat = ChatTokenizer(
        make_family_tokenizer(family), enable_thinking=True, keep_thinking=keep_thinking
    )
    policy = ScriptedPolicy(chat, script)
    return Conversation(policy, chat, limits, SAMPLING, key=3), policy


async def complete_prompts(conversation: Conversation, *prompts: str) -> None:
    """Complete each prompt; reward the completions with 1, 2 and so on."""
    for reward, prompt in enumerate(prompts, start=1):
        conversation.add(make_prompt(prompt))
        await conversation.complete()
        conversation.add_reward(reward)


async def test_consecutive_turns_form_one_sequence_with_a_reward_per_turn() -> None:
    conversation, policy = make_conversation(CHATML, iter(["HIT", "STAND"]))
    await complete_prompts(conversation, "16 vs 10", "19 vs 10")
    [sequence] = conversation.make_sequences(include_unanswered=False)
    assert sequence.token_ids[: len(policy.prompts[1])].tolist() == policy.prompts[1]
    assert [turn.reward for turn in sequence.turns] == [1, 2]
    for turn, text in zip(sequence.turns, ["HIT", "STAND"], strict=True):
        assert all(sequence.loss_mask[turn.start : turn.end])
        token_ids = sequence.token_ids[turn.start : turn.end].tolist()
        assert conversation.chat.decode(token_ids) == text
    assert sum(sequence.loss_mask) == sum(turn.end - turn.start for turn in sequence.turns)


async def test_kept_thinking_stays_in_one_sequence() -> None:
    conversation, policy = make_conversation(QWEN3, iter([THOUGHT, "STAND"]))
    await complete_prompts(conversation, "16 vs 10", "19 vs 10")
    [sequence] = conversation.make_sequences(include_unanswered=False)
    assert len(sequence.turns) == 2
    assert "bust?" in conversation.chat.decode(policy.prompts[1])


async def test_changed_history_starts_a_new_sequence() -> None:
    conversation, policy = make_conversation(
        QWEN3, iter([THOUGHT, THOUGHT, "STAND"]), keep_thinking=False
    )
    await complete_prompts(conversation, "16 vs 10", "18 vs 10", "19 vs 10")
    sequences = conversation.make_sequences(include_unanswered=False)
    assert [len(sequence.turns) for sequence in sequences] == [1, 1, 1]
    assert [sequence.turns[0].reward for sequence in sequences] == [1, 2, 3]
    for sequence, prompt in zip(sequences, policy.prompts, strict=True):
        assert sequence.token_ids[: sequence.turns[0].start].tolist() == prompt
        assert "bust?" not in conversation.chat.decode(prompt)
        assert any(sequence.loss_mask)


async def test_template_without_rewrites_gives_one_sequence() -> None:
    conversation, _ = make_conversation(CHATML, iter(["HIT", "STAND"]), keep_thinking=False)
    await complete_prompts(conversation, "16 vs 10", "19 vs 10")
    assert len(conversation.make_sequences(include_unanswered=False)) == 1


@pytest.mark.parametrize("keep_thinking", [True, False])
async def test_unanswered_messages_follow_the_last_turn_if_they_fit(keep_thinking: bool) -> None:
    conversation, _ = make_conversation(CHATML, iter(["HIT", "HIT"]), keep_thinking=keep_thinking)
    await complete_prompts(conversation, "16 vs 10")
    expected_sequences = conversation.make_sequences(include_unanswered=True)
    conversation.add(make_prompt("19 vs 10"))
    assert conversation.has_room
    [sequence] = conversation.make_sequences(include_unanswered=True)
    unanswered_ids = sequence.token_ids[sequence.turns[-1].end :].tolist()
    assert "19 vs 10" in conversation.chat.decode(unanswered_ids)
    assert not any(sequence.loss_mask[sequence.turns[-1].end :])
    assert conversation.make_sequences(include_unanswered=False) == expected_sequences
    conversation.add(make_prompt("a long story " * 200))
    assert conversation.make_sequences(include_unanswered=True) == expected_sequences


async def test_unanswered_messages_are_omitted_if_the_history_would_change() -> None:
    conversation, _ = make_conversation(QWEN3, iter([THOUGHT]), keep_thinking=False)
    await complete_prompts(conversation, "16 vs 10")
    expected_sequences = conversation.make_sequences(include_unanswered=False)
    conversation.add(make_prompt("19 vs 10"))
    assert conversation.has_room
    assert conversation.make_sequences(include_unanswered=True) == expected_sequences
    conversation.add_reward(4)
    assert conversation.turns[0].reward == 5


@pytest.mark.parametrize("limits", [{"max_turns": 1}, {"max_tokens": 80}], ids=["turns", "tokens"])
async def test_completion_beyond_the_limits_fails(limits: dict[str, int]) -> None:
    bounded_limits = LIMITS.model_copy(update=limits)
    conversation, policy = make_conversation(CHATML, iter(["HIT", "HIT"]), bounded_limits)
    await complete_prompts(conversation, "16 vs 10")
    conversation.add(make_prompt("19 vs 10"))
    assert not conversation.has_room
    with pytest.raises(ConversationFullError, match="end the episode as truncated"):
        await conversation.complete()
    assert len(policy.prompts) == 1


async def test_turns_have_distinct_seeds_and_the_environment_token_limit() -> None:
    calls: list[tuple[int, int]] = []

    async def generate(prompt_ids: list[int], sampling: Sampling, seed: int) -> SampledCompletion:
        calls.append((seed, sampling.max_tokens))
        return SampledCompletion([5, 6], [-1.0, -1.0], 0, has_end_token=False)

    chat = ChatTokenizer(make_family_tokenizer(CHATML))
    for _ in range(2):
        await complete_prompts(Conversation(generate, chat, LIMITS, SAMPLING, key=3), "a", "b")
    await complete_prompts(Conversation(generate, chat, LIMITS, SAMPLING, key=4), "a")
    seeds = [seed for seed, _ in calls]
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 3
    assert {max_tokens for _, max_tokens in calls} == {40}


async def test_generator_cannot_change_the_recorded_prompt() -> None:
    async def generate(prompt_ids: list[int], sampling: Sampling, seed: int) -> SampledCompletion:
        prompt_ids.clear()
        return SampledCompletion([5], [-1.0], 0, has_end_token=False)

    chat = ChatTokenizer(make_family_tokenizer(CHATML))
    conversation = Conversation(generate, chat, LIMITS, SAMPLING, key=3)
    await complete_prompts(conversation, "16 vs 10")
    [sequence] = conversation.make_sequences()
    assert sequence.token_ids.tolist() == [*chat.encode_first_prompt(make_prompt("16 vs 10")), 5]


async def test_reward_before_the_first_completion_fails() -> None:
    conversation, _ = make_conversation(CHATML, iter([]))
    with pytest.raises(ValueError, match="has no completion yet"):
        conversation.add_reward(1.0)
