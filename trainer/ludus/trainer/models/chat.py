"""Chat messages to tokens and back, without ever tokenizing the same text twice.

A conversation is one growing token sequence. The first messages go through the chat template
as a whole; later ones are appended as the template's text after the end of the assistant's
turn. What the policy sampled is never decoded and encoded again, so every prompt is an exact
prefix of the next one.

    first_prompt  <|user|>16 vs 10<|end|><|assistant|>
    sampled                                       HIT<|end|>
    next_prompt                                             <|user|>19 vs 10<|end|><|assistant|>

Without `keeps_thoughts` a conversation is rendered again for every turn (`whole_prompt`), so
that the template can take earlier thoughts out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from sys import getsizeof

from transformers import PreTrainedTokenizerBase

from ludus.env import Message
from ludus.proto.config import ModelConfig, PretrainedModel
from ludus.trainer.models.load import load_tokenizer
from ludus.trainer.models.sized_cache import SizedCache
from ludus.trainer.models.template import ChatTemplate, ToolSpec

_CACHE_BYTES = 32 << 20
"""Of each of the three caches, about."""
_BYTES_PER_TOKEN = 40
"""Of an int and the place that it has in a tuple."""
_BYTES_PER_ENTRY = 512
_MAX_CACHED_ANSWER = 64
"""Tokens: a move is said again and again, a train of thought never."""
_OPEN_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"

MessageKey = tuple[tuple[str, str], ...]


class ChatTokenizer:
    """Turns an environment's messages into prompt tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        enable_thinking: bool = False,
        keep_thinking: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, enable_thinking=enable_thinking)
        self.keeps_thoughts = keep_thinking
        """Whether a conversation only grows; otherwise every turn is rendered again."""
        self.end_token_id: int = self._template.end_token_id
        self._end_text: str = tokenizer.decode([self.end_token_id])
        # Environments repeat themselves: the same few texts come thousands of times.
        self._first = SizedCache(self._encode_first, _first_size, _CACHE_BYTES)
        self._next = SizedCache(self._encode_next, _next_size, _CACHE_BYTES)
        self._decode = SizedCache(self._decode_ids, _answer_size, _CACHE_BYTES)

    @classmethod
    def load(cls, model_path: str, config: ModelConfig) -> ChatTokenizer:
        """The tokenizer that belongs to a model's folder or id."""
        tokenizer = load_tokenizer(model_path)
        if not isinstance(config, PretrainedModel):
            return cls(tokenizer)
        return cls(
            tokenizer,
            enable_thinking=config.enable_thinking,
            keep_thinking=config.keep_thinking,
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """What it stands on."""
        return self._tokenizer

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a text that no template was applied to, with what begins a text."""
        begin = self._tokenizer.bos_token
        # A text to which a template was applied has it already, and twice is none that was trained.
        is_begun = begin is not None and text.startswith(str(begin))
        return list(self._tokenizer.encode(text, add_special_tokens=not is_begun))

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The text of a new conversation, up to where the assistant speaks."""
        return self._template.render(messages)

    def first_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """The tokens of a new conversation, up to where the assistant speaks."""
        return list(self._first((_key(messages), json.dumps(tools))))

    def next_prompt(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """The tokens between a sampled answer and the next one.

        Args:
            messages: what the environment said in between.
            ended: False when the answer lacks its end token; it is then put in, unsampled.
        """
        added = list(self._next(_key(messages)))
        return added if ended else [self.end_token_id, *added]

    def whole_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """The tokens of a conversation with earlier answers, as the template shows those."""
        return list(self._encode_first((_key(messages), json.dumps(tools))))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that went through the chat template already."""
        return list(self._encode(text))

    def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt, special tokens and all."""
        return self._tokenizer.decode(list(token_ids))

    def answer_ids(self, text: str) -> list[int]:
        """The tokens of an answer as the policy would sample it, end token included."""
        answer = self._template.space_before_answer + text
        return [*self._tokenizer.encode(answer, add_special_tokens=False), self.end_token_id]

    def shown_answer_ids(self, text: str) -> list[int]:
        """The tokens of an answer as the template shows it, with what it puts before the text.

        That may be an empty thought, which a model that thinks says rather than the bare answer.
        """
        answer = self._template.before_answer + text
        return [*self._tokenizer.encode(answer, add_special_tokens=False), self.end_token_id]

    def decode(self, token_ids: list[int]) -> str:
        """The text of sampled tokens, without special tokens."""
        if len(token_ids) > _MAX_CACHED_ANSWER:
            return self._decode_ids(token_ids)
        return self._decode(tuple(token_ids))

    def _decode_ids(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _encode_first(self, asked: tuple[MessageKey, str]) -> tuple[int, ...]:
        key, tools = asked
        return self._encode(self._template.render(_messages(key), json.loads(tools)))

    def _encode_next(self, key: MessageKey) -> tuple[int, ...]:
        text = self._template.after_answer(_messages(key))
        before, found, after = text.partition(self._end_text)
        if not found or before.strip():
            after = text  # the template ends no turn: the policy's own end token does
        # With the end token before it: some tokenizers begin a text differently than they continue.
        token_ids = self._encode(self._end_text + after)
        return token_ids[token_ids.index(self.end_token_id) + 1 :]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def strip_reasoning(text: str) -> str:
    """An answer without the thoughts before it; nothing where the thoughts do not end."""
    return split_reasoning(text)[1]


def split_reasoning(text: str) -> tuple[str, str]:
    """The thoughts before an answer, without their tags, and the answer."""
    begin = begin_of_answer(text)
    if begin == 0:
        return "", text
    thoughts = text[:begin].replace(_OPEN_THOUGHT, "").replace(_END_OF_THOUGHT, "")
    return thoughts.strip(), text[begin:].strip()


def begin_of_answer(text: str) -> int:
    """Where the thoughts have ended: at the text's end where they do not."""
    end = text.rfind(_END_OF_THOUGHT)
    if end >= 0:
        return end + len(_END_OF_THOUGHT)
    return len(text) if _OPEN_THOUGHT in text else 0


def _key(messages: Sequence[Message]) -> MessageKey:
    return tuple((message["role"], message["content"]) for message in messages)


def _messages(key: MessageKey) -> list[Message]:
    return [{"role": role, "content": content} for role, content in key]


def _first_size(asked: tuple[MessageKey, str], token_ids: tuple[int, ...]) -> int:
    key, tools = asked
    return _next_size(key, token_ids) + getsizeof(tools)


def _next_size(key: MessageKey, token_ids: tuple[int, ...]) -> int:
    texts = sum(getsizeof(role) + getsizeof(content) for role, content in key)
    return _BYTES_PER_ENTRY + texts + _BYTES_PER_TOKEN * len(token_ids)


def _answer_size(token_ids: tuple[int, ...], text: str) -> int:
    return _BYTES_PER_ENTRY + getsizeof(text) + _BYTES_PER_TOKEN * len(token_ids)
