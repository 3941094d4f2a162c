"""Chat messages to tokens and back, without ever tokenizing the same text twice.

A conversation is one growing token sequence. The first observation goes through the chat
template as a whole; each later one is appended as the template's text after the end of the
assistant's turn. What the policy sampled is never decoded and encoded again, so every prompt
is an exact prefix of the next one.
"""

from __future__ import annotations

from functools import lru_cache

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ludus.env import Message
from ludus.proto.config import ModelConfig, PretrainedModel
from ludus.proto.errors import ConfigError

# Stands for the assistant's text while the template around it is taken apart.
_PLACEHOLDER = "assistant-turn-placeholder"
_CACHED_TEXTS = 65536

MessageKey = tuple[tuple[str, str], ...]


class ChatTokenizer:
    """Turns an environment's messages into prompt tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, enable_thinking: bool = False):
        if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
            raise ConfigError(
                f"model '{tokenizer.name_or_path}' expected a chat template and an end token, "
                "got none; take an instruction-tuned model"
            )
        self._tokenizer = tokenizer
        self._template_args = {"enable_thinking": enable_thinking}
        self.end_token_id: int = tokenizer.eos_token_id
        self._end_text: str = tokenizer.decode([tokenizer.eos_token_id])
        # Environments repeat themselves: the same few texts come thousands of times.
        self._first = lru_cache(_CACHED_TEXTS)(self._encode_first)
        self._next = lru_cache(_CACHED_TEXTS)(self._encode_next)
        self._decode = lru_cache(_CACHED_TEXTS)(self._decode_ids)

    @classmethod
    def load(cls, model_path: str, config: ModelConfig) -> ChatTokenizer:
        """The tokenizer that belongs to a model's folder or id."""
        thinking = isinstance(config, PretrainedModel) and config.enable_thinking
        return cls(AutoTokenizer.from_pretrained(model_path), enable_thinking=thinking)

    def first_prompt(self, messages: list[Message]) -> list[int]:
        """The tokens of a new conversation, up to where the assistant speaks."""
        return list(self._first(_key(messages)))

    def next_prompt(self, messages: list[Message], *, ended: bool) -> list[int]:
        """The tokens between a sampled answer and the next one.

        Args:
            messages: what the environment said in between.
            ended: False when the answer lacks its end token; it is then put in, unsampled.
        """
        added = list(self._next(_key(messages)))
        return added if ended else [self.end_token_id, *added]

    def answer_ids(self, text: str) -> list[int]:
        """The tokens of an answer as the policy would sample it, end token included."""
        return [*self._tokenizer.encode(text, add_special_tokens=False), self.end_token_id]

    def decode(self, token_ids: list[int]) -> str:
        """The text of sampled tokens, without special tokens."""
        return self._decode(tuple(token_ids))

    def _decode_ids(self, token_ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _encode_first(self, key: MessageKey) -> tuple[int, ...]:
        return self._encode(self._render(key))

    def _encode_next(self, key: MessageKey) -> tuple[int, ...]:
        before: MessageKey = (("user", "-"), ("assistant", _PLACEHOLDER))
        _, found, rest = self._render(before + key).partition(_PLACEHOLDER)
        if not found or not rest.startswith(self._end_text):
            raise ConfigError(
                f"the chat template of '{self._tokenizer.name_or_path}' does not end an "
                f"assistant's turn with {self._end_text!r}; take a model whose template does"
            )
        return self._encode(rest.removeprefix(self._end_text))

    def _render(self, key: MessageKey) -> str:
        messages = [{"role": role, "content": content} for role, content in key]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._template_args
        )
        return str(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _key(messages: list[Message]) -> MessageKey:
    return tuple((message["role"], message["content"]) for message in messages)
