"""Tests that a conversation, encoded turn by turn, equals the chat template's output."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from ludus.env import Message
from ludus.proto.errors import ConfigError
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.models.tiny import make_tokenizer

TEXTS = ["hard 16 vs 10", "HIT", "STAND", "soft 18 vs A"] * 5


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(TEXTS, vocab_size=320)


def make_prompt(content: str) -> list[Message]:
    """Return a prompt with one user message."""
    return [{"role": "user", "content": content}]


def test_two_turns_equal_the_full_chat_template(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = ChatTokenizer(tokenizer)
    token_ids = chat.encode_first_prompt(make_prompt("hard 16 vs 10"))
    token_ids += chat.encode_completion("HIT")
    token_ids += chat.encode_next_prompt(make_prompt("hard 19 vs 10"), has_end_token=True)
    expected_ids = tokenizer.apply_chat_template(
        [
            *make_prompt("hard 16 vs 10"),
            {"role": "assistant", "content": "HIT"},
            *make_prompt("hard 19 vs 10"),
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert token_ids == expected_ids


def test_end_token_is_added_after_an_incomplete_completion(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = ChatTokenizer(tokenizer)
    next_ids = chat.encode_next_prompt(make_prompt("hard 19 vs 10"), has_end_token=True)
    assert chat.encode_next_prompt(make_prompt("hard 19 vs 10"), has_end_token=False) == [
        chat.end_token_id,
        *next_ids,
    ]


def test_non_ascii_text_is_encoded_and_decoded_unchanged(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = ChatTokenizer(tokenizer)
    assert chat.decode(chat.encode_completion("naïve ♠ 東")) == "naïve ♠ 東"


def test_frequent_words_are_one_token_and_any_text_is_encodable(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = ChatTokenizer(tokenizer)
    assert len(chat.encode_completion("HIT")) == 2, (
        "HIT is not encoded as one token and the end token"
    )
    assert len(chat.encode_completion("xyzzy")) > 2


def test_template_without_assistant_messages_is_rejected(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
        "{% endfor %}"
    )
    with pytest.raises(ConfigError, match="refuses conversations with the roles user, assistant"):
        ChatTokenizer(tokenizer)


def test_template_that_cannot_be_parsed_is_rejected(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for message in messages %}\n{{ message.content "
    with pytest.raises(ConfigError, match="cannot be parsed: line 2: unexpected end of template"):
        ChatTokenizer(tokenizer)


def test_tokenizer_without_chat_template_is_rejected(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="instruction-tuned"):
        ChatTokenizer(tokenizer)


def test_caller_can_modify_the_returned_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = ChatTokenizer(tokenizer)
    prompt_ids = chat.encode_first_prompt(make_prompt("hard 16 vs 10"))
    expected_ids = list(prompt_ids)
    prompt_ids.append(0)
    assert chat.encode_first_prompt(make_prompt("hard 16 vs 10")) == expected_ids
