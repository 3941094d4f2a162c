"""Conversations as tokens: equal to those of rollouts, with only the responses trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from ludus.env import Message
from ludus.proto.config import RolloutConfig, SftData
from ludus.proto.errors import ConfigError
from ludus.trainer.core.types import SampledCompletion, Sampling
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tool_calls import ToolSpec
from ludus.trainer.rollout.conversation import Conversation
from ludus.trainer.sft.conversations import (
    BatchOrder,
    ConversationSet,
    encode_examples,
    split_conversations,
)
from ludus.trainer.sft.examples import read_examples
from tests.rollout.chat_templates import (
    CALL_IDS,
    CHANNELS,
    FAMILIES,
    NEXT_ROLE,
    OPEN_THOUGHT,
    QWEN3,
    QWEN25,
    Family,
)
from tests.rollout.chat_templates import make_family_tokenizer as make_tokenizer
from tests.sft.chats import write_rows

TOOL: ToolSpec = {
    "type": "function",
    "function": {"name": "draw", "parameters": {"type": "object", "properties": {}}},
}
TALK: list[Message] = [
    {"role": "user", "content": "hard 16 vs 10 <|im_end|>"},
    {"role": "assistant", "content": "HIT"},
    {"role": "user", "content": "hard 19 vs 10"},
    {"role": "assistant", "content": "I stand.\n\nSTAND"},
]
THOUGHTS: list[Message] = [
    {"role": "user", "content": "16"},
    {"role": "assistant", "content": "<think>\nlow\n</think>\n\nHIT"},
    {"role": "user", "content": "19"},
    {"role": "assistant", "content": "<think>\nhigh\n</think>\n\nSTAND"},
]


def encode_chat(
    folder: Path,
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    **config: object,
) -> ConversationSet:
    """Encode one conversation, which is read from a file."""
    path = write_rows(folder / "chat.jsonl", [{"messages": messages, "tools": tools}])
    data = SftData.model_validate({"path": path, "max_tokens": 1024, **config})
    return encode_examples(
        read_examples(path, split="train", field="data"), tokenizer, data, "data"
    )


def play(
    tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[ToolSpec], opens: bool
) -> list[tuple[list[int], list[bool]]]:
    """Play the conversation as a rollout in which the policy samples the responses."""
    responses = [message["content"] for message in messages if message["role"] == "assistant"]
    if opens:
        responses = [response.removeprefix("<think>\n") for response in responses]

    async def generate(prompt: list[int], sampling: Sampling, seed: int) -> SampledCompletion:
        token_ids = tokenizer.encode_completion(responses.pop(0))
        return SampledCompletion(token_ids, [0.0] * len(token_ids), 0, has_end_token=True)

    limits = RolloutConfig(max_tokens=4096)
    conversation = Conversation(generate, tokenizer, limits, Sampling(1.0, 16), key=0)
    conversation.offer_tools(tools)
    for message in messages:
        if message["role"] == "assistant":
            asyncio.run(conversation.complete())
        else:
            conversation.add([message])
    sequences = conversation.make_sequences()
    return [(list(map(int, s.token_ids)), s.loss_mask.tolist()) for s in sequences]


def list_sequences(conversations: ConversationSet) -> list[tuple[list[int], list[bool]]]:
    bounds = zip(conversations.offsets[:-1], conversations.offsets[1:], strict=True)
    return [
        (
            conversations.token_ids[start:end].tolist(),
            conversations.is_trained[start:end].tolist(),
        )
        for start, end in bounds
    ]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_tokens_are_those_of_a_rollout(family: Family, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(make_tokenizer(family))
    expected_sequences = play(tokenizer, TALK, (), opens=False)
    assert list_sequences(encode_chat(tmp_path, tokenizer, TALK)) == expected_sequences


@pytest.mark.parametrize("keeps_thoughts", [True, False])
@pytest.mark.parametrize("family", [QWEN3, OPEN_THOUGHT], ids=str)
def test_thoughts_are_those_of_a_rollout(
    family: Family, keeps_thoughts: bool, tmp_path: Path
) -> None:
    tokenizer = ChatTokenizer(
        make_tokenizer(family), enable_thinking=True, keep_thinking=keeps_thoughts
    )
    expected_sequences = play(tokenizer, THOUGHTS, (), opens=tokenizer.thoughts.is_open)
    conversations = encode_chat(tmp_path, tokenizer, THOUGHTS)
    assert list_sequences(conversations) == expected_sequences
    assert len(expected_sequences) == (1 if keeps_thoughts else 2)
    assert len(conversations) == 1
    assert len(conversations.make_batch([0]).sequences) == len(expected_sequences)


def test_tools_and_their_results_are_those_of_a_rollout(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(make_tokenizer(QWEN25))
    call = '<tool_call>\n{"name": "draw", "arguments": {}}\n</tool_call>'
    messages: list[Message] = [
        {"role": "user", "content": "Draw."},
        {"role": "assistant", "content": call},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "It is 7."},
    ]
    conversations = encode_chat(tmp_path, tokenizer, messages, [TOOL])
    assert list_sequences(conversations) == play(tokenizer, messages, [TOOL], opens=False)
    assert '"name": "draw"' in tokenizer.tokenizer.decode(conversations.token_ids)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n"])
def test_response_that_contains_the_end_token_is_refused(end: str, tmp_path: Path) -> None:
    chat = ChatTokenizer(make_tokenizer(QWEN25))
    messages = [*TALK[:1], Message(role="assistant", content=f"HIT{end}")]
    with pytest.raises(ConfigError, match=r"row 1: the response ends with <\|im_end\|>"):
        encode_chat(tmp_path, chat, messages)


def test_result_of_a_call_has_the_form_of_the_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CALL_IDS)
    messages: list[Message] = [
        {"role": "user", "content": "Draw."},
        {"role": "assistant", "content": "[TOOL_CALLS]draw[CALL_ID]abc[ARGS]{}"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "It is 7."},
    ]
    conversations = encode_chat(tmp_path, ChatTokenizer(tokenizer), messages, [TOOL])
    text = tokenizer.decode(conversations.token_ids)
    assert "[ARGS]{}<|end|>result of abc: 7<|end|>assistant: It is 7.<|end|>" in text


def test_response_before_a_result_ends_with_the_token_of_the_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(NEXT_ROLE)
    end_ids = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    messages: list[Message] = [
        {"role": "user", "content": "Draw."},
        {"role": "assistant", "content": "draw"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "It is 7."},
    ]
    chat = ChatTokenizer(tokenizer, end_token_ids=end_ids)
    conversations = encode_chat(tmp_path, chat, messages)
    assert tokenizer.decode(conversations.token_ids) == (
        "<|user|>Draw.<|assistant|>draw<|observation|>7<|assistant|>It is 7.<|user|>"
    )
    trained_ids = conversations.token_ids[conversations.is_trained].tolist()
    assert tokenizer.decode(trained_ids) == "draw<|observation|>It is 7.<|user|>"


def test_trained_tokens_are_exactly_the_responses_with_their_end(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(make_tokenizer(QWEN25))
    messages = [*TALK, Message(role="user", content="Thanks.")]
    conversations = encode_chat(tmp_path, tokenizer, messages)
    trained_ids = conversations.token_ids[conversations.is_trained].tolist()
    assert tokenizer.tokenizer.decode(trained_ids) == "HIT<|im_end|>I stand.\n\nSTAND<|im_end|>"
    batch = conversations.make_batch([0, 0])
    assert batch.num_samples == 2
    assert batch.advantages[0].tolist() == batch.loss_masks[0].astype(float).tolist()


def test_template_with_an_empty_thought_refuses_reasoning(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(make_tokenizer(QWEN3), enable_thinking=False)
    with pytest.raises(ConfigError, match=r"row 1: .*set model.enable_thinking = true"):
        encode_chat(tmp_path, tokenizer, THOUGHTS)


def test_template_that_opens_a_thought_refuses_responses_without_one(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(make_tokenizer(OPEN_THOUGHT), enable_thinking=True)
    with pytest.raises(ConfigError, match=r"row 1: .* starts a thought .* add the thought"):
        encode_chat(tmp_path, tokenizer, TALK)


@pytest.mark.parametrize(
    "response",
    ["HIT", "<|final|>HIT", "<|thoughts|>low<|end|><|start|>assistant<|final|>HIT"],
)
def test_response_has_the_special_tokens_around_thoughts_and_answers(
    response: str, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(CHANNELS)
    chat = ChatTokenizer(tokenizer, keep_thinking=False)
    talk: list[Message] = [{"role": "user", "content": "16 <|final|>"}]
    talk.append({"role": "assistant", "content": response})
    conversations = encode_chat(tmp_path, chat, talk)
    trained_ids = conversations.token_ids[conversations.is_trained].tolist()
    text = response if "<|final|>" in response else f"<|final|>{response}"
    assert trained_ids == tokenizer.encode(f"{text}<|return|>", add_special_tokens=False)


def test_long_conversations_are_refused_dropped_or_truncated(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "hard 16", "completion": "HIT"},
        {"prompt": "hard 16", "completion": "HIT " * 40},
        {"prompt": "hard 16 " * 40, "completion": "HIT"},
    ]
    path = write_rows(tmp_path / "long.jsonl", rows)

    def encode(overlong: str) -> ConversationSet:
        data = SftData.model_validate({"path": path, "max_tokens": 40, "overlong": overlong})
        examples = read_examples(path, split="train", field="data")
        return encode_examples(examples, tokenizer, data, "data")

    with pytest.raises(ConfigError, match=r"2 of 3 conversations .* = 40 .* longest .*row [23]"):
        encode("refuse")
    dropped = encode("drop")
    assert (len(dropped), dropped.num_dropped, dropped.num_truncated) == (1, 2, 0)
    # The prompt of the third conversation alone is too long, so it has nothing to train on.
    truncated = encode("truncate")
    assert (len(truncated), truncated.num_dropped, truncated.num_truncated) == (2, 1, 1)
    assert truncated.offsets[-1] - truncated.offsets[-2] == 40


def test_data_without_a_short_conversation_is_refused(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="all 1 conversations are longer"):
        encode_chat(tmp_path, tokenizer, TALK, max_tokens=3, overlong="drop")


def test_every_pass_has_each_conversation_once_in_another_order() -> None:
    order = BatchOrder(range(10), batch_size=4, seed=0)
    positions = [index for step in range(5) for index in order.choose(step)]
    first_pass, second_pass = positions[:10], positions[10:]
    assert sorted(first_pass) == sorted(second_pass) == list(range(10))
    assert first_pass != second_pass
    assert BatchOrder(range(10), batch_size=4, seed=0).choose(3) == order.choose(3)
    assert BatchOrder(range(10), batch_size=4, seed=1).choose(0) != order.choose(0)


@pytest.mark.parametrize(
    ("num_conversations", "size", "num_held_out"),
    [(100, 0.05, 5), (100, 0, 0), (10, 0.01, 1), (2, 0.9, 1), (1, 0.5, 0)],
)
def test_split_holds_out_at_least_one_conversation(
    num_conversations: int, size: float, num_held_out: int
) -> None:
    train_indices, held_out_indices = split_conversations(num_conversations, size, seed=0)
    assert len(held_out_indices) == num_held_out
    assert sorted([*train_indices, *held_out_indices]) == list(range(num_conversations))
