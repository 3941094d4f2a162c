"""Encoding of a prompt and an answer as one sequence of tokens.

    format "chat"   messages --chat template--> text --tokenizer--> tokens
    format "text"   concatenated contents ---------> tokenizer --> tokens

The model's configuration contains the format, so scoring uses the format of the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeGuard, cast

from transformers import PreTrainedTokenizerBase

from ludus.env import Message
from ludus.proto.errors import ConfigError
from ludus.trainer.models.template import ChatTemplate

Format = Literal["chat", "text"]
Content: TypeAlias = str | Sequence[Message] | Sequence[int]
"""A text, messages, or token ids."""


class TextEncoder:
    """Encodes prompts and answers.

    Args:
        max_tokens: maximum number of tokens; longer sequences lose their beginning.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, format: Format, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.format = format
        self._template = (
            ChatTemplate(tokenizer, enable_thinking=False) if format == "chat" else None
        )
        self.num_cut = 0
        """Number of sequences that were too long."""

    def encode(self, prompt: Content, answer: Content) -> list[int]:
        """Return the last `max_tokens` tokens of the prompt and the answer."""
        prompt, answer = parse_content(prompt, "a prompt"), parse_content(answer, "an answer")
        if not (prompt or answer):
            raise ConfigError("the prompt and the answer are both empty; give at least one")
        if _is_tokens(prompt) or _is_tokens(answer):
            token_ids = [*self._encode_part(prompt), *self._encode_part(answer)]
            self._check_token_ids(token_ids)
        else:
            text = self._join(
                cast("str | Sequence[Message]", prompt), cast("str | Sequence[Message]", answer)
            )
            token_ids = self._encode_text(text, special=self._template is None)
        if not token_ids:
            raise ConfigError("the prompt and the answer have no tokens; give at least one token")
        if len(token_ids) > self.max_tokens:
            self.num_cut += 1
        return token_ids[-self.max_tokens :]

    def _join(self, prompt: str | Sequence[Message], answer: str | Sequence[Message]) -> str:
        if self._template is None:
            return _text(prompt) + _text(answer)
        messages = [*_make_messages(prompt, "user"), *_make_messages(answer, "assistant")]
        return self._template.render(messages, prompt=False)

    def _encode_part(self, content: Content) -> Sequence[int]:
        if _is_tokens(content):
            return content
        return self._encode_text(_text(cast("str | Sequence[Message]", content)), special=False)

    def _encode_text(self, text: str, *, special: bool) -> list[int]:
        try:
            token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        except TypeError:
            # JSON can contain lone surrogates, which tokenizers reject.
            raise ConfigError(f"the text contains half of a character: {text!r:.60}") from None
        return token_ids

    def _check_token_ids(self, token_ids: list[int]) -> None:
        bad_ids = [token_id for token_id in token_ids if not 0 <= token_id < len(self._tokenizer)]
        if bad_ids:
            raise ConfigError(
                f"token ids must be below {len(self._tokenizer)}, the size of the model's "
                f"vocabulary, got {bad_ids[0]}; leave padding out, or give texts"
            )


def choose_format(tokenizer: PreTrainedTokenizerBase, format: str) -> Format:
    """Return the format; "auto" is "chat" if the tokenizer has a chat template."""
    if format == "auto":
        return "text" if tokenizer.chat_template is None else "chat"
    return cast(Format, format)


def _is_tokens(content: Content) -> TypeGuard[Sequence[int]]:
    return not isinstance(content, str) and bool(content) and isinstance(content[0], int)


def _text(content: str | Sequence[Message]) -> str:
    if isinstance(content, str):
        return content
    return "".join(message["content"] for message in content)


def _make_messages(content: str | Sequence[Message], role: str) -> list[Message]:
    if isinstance(content, str):
        return [{"role": role, "content": content}] if content else []
    return list(content)


def parse_content(value: object, name: str) -> Content:
    """Return a text, messages or token ids.

    Raises:
        ConfigError: the value is something else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return value
        if all(_is_message(item) for item in value):
            return [Message(role=item["role"], content=item["content"]) for item in value]
    raise ConfigError(
        f"{name} must be a text, a list of messages "
        f'{{"role": ..., "content": ...}}, or a list of token ids, got {value!r:.60}'
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
