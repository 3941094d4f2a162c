"""Prompt and answer as the one sequence of tokens that a reward model reads.

    format "chat"   messages --chat template--> text --tokenizer--> tokens
    format "text"   the contents, one after the other ------------> tokens

A model is asked as it was trained: its configuration holds the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard, cast

from transformers import PreTrainedTokenizerBase

from ludus.env import Message
from ludus.proto.errors import ConfigError
from ludus.trainer.models.template import ChatTemplate
from ludus.trainer.reward_model.preferences import Said

Format = Literal["chat", "text"]


class Texts:
    """Makes tokens of what was said."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, format: Format, max_tokens: int) -> None:
        """`max_tokens`: of a longer sequence the beginning is cut off.

        Raises:
            ConfigError: the format is "chat", and the tokenizer has no chat template.
        """
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.format = format
        self._template = (
            ChatTemplate(tokenizer, enable_thinking=False) if format == "chat" else None
        )
        self.num_cut = 0
        """Sequences that were too long."""

    def encode(self, prompt: Said, answer: Said) -> list[int]:
        """The tokens, at most `max_tokens`: of what is longer, the last ones.

        Raises:
            ConfigError: there are none, or some are not the tokenizer's, or it was not said in
                text, messages or tokens.
        """
        _check_said(prompt)
        _check_said(answer)
        if not (prompt or answer):
            raise ConfigError("expected a prompt or an answer, got neither")
        if _is_tokens(prompt) or _is_tokens(answer):
            token_ids = self._checked([*self._tokens(prompt), *self._tokens(answer)])
        else:
            text = self._text(cast("str | Sequence[Message]", prompt), answer)
            special = self._template is None
            token_ids = self._tokens_of(text, special=special)
        if not token_ids:
            raise ConfigError("expected a prompt or an answer, got neither")
        if len(token_ids) > self.max_tokens:
            self.num_cut += 1
        return token_ids[-self.max_tokens :]

    def _text(self, prompt: str | Sequence[Message], answer: Said) -> str:
        said = cast("str | Sequence[Message]", answer)
        if self._template is None:
            return _contents(prompt) + _contents(said)
        messages = [*_messages(prompt, "user"), *_messages(said, "assistant")]
        return self._template.render(messages, prompt=False)

    def _tokens(self, said: Said) -> Sequence[int]:
        if _is_tokens(said):
            return said
        return self._tokens_of(_contents(cast("str | Sequence[Message]", said)), special=False)

    def _tokens_of(self, text: str, *, special: bool) -> list[int]:
        try:
            token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        except TypeError:
            # JSON can escape halves of a character, which no tokenizer takes.
            raise ConfigError(f"expected a text of whole characters, got {text!r:.60}") from None
        return token_ids

    def _checked(self, token_ids: list[int]) -> list[int]:
        strange = [one for one in token_ids if not 0 <= one < len(self._tokenizer)]
        if strange:
            raise ConfigError(
                f"expected token ids below {len(self._tokenizer)}, the size of the model's "
                f"vocabulary, got {strange[0]}; leave padding out, or give texts"
            )
        return token_ids


def format_for(tokenizer: PreTrainedTokenizerBase, wanted: str) -> Format:
    """The format that is meant: "auto" is the chat template where there is one."""
    if wanted == "auto":
        return "text" if tokenizer.chat_template is None else "chat"
    return cast(Format, wanted)


def _check_said(said: Any) -> None:
    if isinstance(said, str):
        return
    if isinstance(said, Sequence) and (
        all(isinstance(one, int) for one in said)
        or all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in said)
    ):
        return
    raise ConfigError(
        'expected a text, a list of messages {"role": ..., "content": ...}, or a list of token '
        f"ids, got {said!r:.60}"
    )


def _is_tokens(said: Said) -> TypeGuard[Sequence[int]]:
    return not isinstance(said, str) and bool(said) and isinstance(said[0], int)


def _contents(said: str | Sequence[Message]) -> str:
    return said if isinstance(said, str) else "".join(message["content"] for message in said)


def _messages(said: str | Sequence[Message], role: str) -> list[Message]:
    if isinstance(said, str):
        return [{"role": role, "content": said}] if said else []
    return list(said)
