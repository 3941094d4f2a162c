"""Conversion of chat messages to tokens and back, without encoding sampled tokens again.

A conversation is one growing token sequence. The first messages are rendered with the chat
template as a whole. The text of later messages is appended after the end of the assistant's turn.
Sampled tokens are never decoded and encoded again, so every prompt is an exact prefix of the next.

    first prompt  <|user|>16 vs 10<|end|><|assistant|>
    sampled                                       HIT<|end|>
    next prompt                                             <|user|>19 vs 10<|end|><|assistant|>

Without `keeps_thoughts`, a conversation is rendered again for every turn (`encode_whole_prompt`),
so that the template can remove earlier thoughts.

A special token in the text of a message or of a tool is encoded as text. Only the template starts
and ends messages.

`template` renders the texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ludus.env import Message
from ludus.proto.config import ModelConfig, PretrainedModel
from ludus.proto.errors import ActionParseError, ConfigError
from ludus.trainer.models.messages import list_results, make_template_calls
from ludus.trainer.models.probes import find_template_specials, list_unmarked_controls
from ludus.trainer.models.sized_cache import SizedCache, measure_entry
from ludus.trainer.models.special_tokens import TextTokenizer, list_special_tokens
from ludus.trainer.models.system_text import extract_system_text, mark_first_message
from ludus.trainer.models.template import ChatTemplate
from ludus.trainer.models.thoughts import THINK, ThoughtForm
from ludus.trainer.models.tool_calls import CallForm, ToolCall, ToolSpec

if TYPE_CHECKING:  # network runs use the text functions below, without transformers
    from transformers import PreTrainedTokenizerBase

_MAX_CHARS_PER_TOKEN = 256
"""Number of characters that no token exceeds: the longest of common vocabularies have 128."""
_MAX_USUAL_CHARS_PER_TOKEN = 8
"""Number of characters of a token that few texts exceed on average."""
_MAX_BODY_OVERHEAD_BYTES = 1 << 20
"""Size of the parts of a request that are not part of the prompt, such as ids and metadata."""
_MAX_FAST_CHARS = 20_000
"""Number of characters that are encoded within about 50 ms."""
_MAX_CACHED_COMPLETION = 64
"""Maximum number of tokens of a cached completion: short ones repeat, long thoughts do not."""


class ChatTokenizer:
    """A converter from messages to prompt tokens."""

    cache_bytes = 32 << 20
    """Approximate maximum size of each of the three caches."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_token_ids: Iterable[int] = (),
        enable_thinking: bool = False,
        keep_thinking: bool = True,
    ) -> None:
        """`end_token_ids` are further tokens that end a completion, from the model's files."""
        end_token_ids = [*end_token_ids]
        self.tokenizer = tokenizer
        self._template = ChatTemplate(
            tokenizer, enable_thinking=enable_thinking, end_token_ids=end_token_ids
        )
        self.keeps_thoughts = keep_thinking
        """True if a conversation only grows; otherwise every turn renders all messages again."""
        # A completion may contain special tokens that start and end no message, such as tags.
        control_text = self._template.render_every_role()
        kept_tokens = find_template_specials(tokenizer, control_text)
        marks = self.thoughts.start + self.thoughts.end + self.thoughts.answer_start
        unmarked_tokens = list_unmarked_controls(tokenizer, control_text)
        further_tokens = [token for token in unmarked_tokens if token not in marks]
        make_texts = partial(TextTokenizer, tokenizer, further_tokens=further_tokens)
        self._texts = make_texts()
        self._completion_texts = make_texts(kept_tokens=kept_tokens)
        # A response to learn may also contain the special tokens around thoughts and answers.
        mark_tokens = [token for token in list_special_tokens(tokenizer) if token in marks]
        self._response_texts = make_texts(kept_tokens=[*kept_tokens, *mark_tokens])
        self.end_token_id: int = self._template.end_token_id
        """The token that ends a turn in the template."""
        self.end_token_ids = frozenset((self.end_token_id, tokenizer.eos_token_id, *end_token_ids))
        """All tokens that end a completion. Some models end it differently after a tool call."""
        self._hidden_ids = self.end_token_ids | {tokenizer.pad_token_id}
        self._template.check_end_token()
        self.end_text: str = tokenizer.decode([self.end_token_id])
        """The text of `end_token_id`."""
        # The caches help because environments repeat the same few texts thousands of times.
        self._first_prompt_cache = SizedCache(self._encode_first, measure_entry, self.cache_bytes)
        self._next_prompt_cache = SizedCache(self._encode_next, measure_entry, self.cache_bytes)
        self._decode_cache = SizedCache(self._decode_ids, measure_entry, self.cache_bytes)

    @classmethod
    def load(cls, model_path: str, config: ModelConfig) -> ChatTokenizer:
        """Load the tokenizer of a model's folder or Hugging Face id."""
        from ludus.trainer.models.load import load_end_token_ids, load_policy_tokenizer

        tokenizer = load_policy_tokenizer(model_path, config)
        if not isinstance(config, PretrainedModel):
            return cls(tokenizer)
        return cls(
            tokenizer,
            end_token_ids=load_end_token_ids(model_path),
            enable_thinking=config.enable_thinking,
            keep_thinking=config.keep_thinking,
        )

    @property
    def thoughts(self) -> ThoughtForm:
        """Form of the thoughts in completions."""
        return self._template.thoughts

    @property
    def call_form(self) -> CallForm:
        """Form of the tool calls in completions."""
        return self._template.call_form

    @property
    def lists_tools(self) -> bool:
        """True if the chat template shows tools to the model."""
        return self._template.lists_tools

    def check_turns(self) -> None:
        """Check that appended prompts continue a conversation as the template would.

        Raises:
            ConfigError: only whole prompts are possible (`model.keep_thinking = false`).
        """
        if self.keeps_thoughts:
            self._template.check_turns()

    def check_tools(self, tools: Sequence[ToolSpec]) -> None:
        """Check that completions can call the tools.

        Raises:
            ConfigError: the template writes calls in an unknown form.
        """
        if tools:
            self.encode_first_prompt([{"role": "user", "content": "-"}], tools)

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text outside any chat template, including the BOS token.

        The text may be a rendered template, so its special tokens keep their meaning, except those
        in messages that `render_prompt` rendered.
        """
        bos_token = self.tokenizer.bos_token
        # A rendered template already includes the BOS token, and models are not trained on two.
        has_bos = bos_token is not None and text.startswith(str(bos_token))
        return self._texts.encode(text, add_special_tokens=not has_bos)

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Return the text of a new conversation, up to the start of the completion.

        Special tokens in messages contain a break, which `encode_text` and `encode` remove.
        """
        return self._template.render(self._break_messages(messages))

    def encode_first_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """Return the tokens of a new conversation, up to the start of the completion."""
        return list(self._first_prompt_cache((_make_key(messages), _make_key(tools))))

    def encode_next_prompt(
        self, messages: Sequence[Message], *, has_end_token: bool, end_token_id: int | None = None
    ) -> list[int]:
        """Return the tokens of the environment's `messages` between two completions.

        If the completion has no end token, the template's end token is added here.

        Args:
            end_token_id: the token that ended the completion. The default is the template's.
        """
        if not has_end_token:
            end_token_id = None
        elif end_token_id is None:
            end_token_id = self.end_token_id
        return list(self._next_prompt_cache((_make_key(messages), end_token_id)))

    def encode_whole_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """Return the tokens of a conversation, in which the template renders all completions.

        Completions that were sampled have their text in the field `text` too.
        """
        whole_messages = [
            self._separate_parts(message, list_results(messages[index + 1 :]), tools)
            if "text" in message
            else message
            for index, message in enumerate(messages)
        ]
        return list(self._encode_first((_make_key(whole_messages), _make_key(tools))))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that the chat template has already rendered.

        Its special tokens keep their meaning, because most of them are from the template.
        """
        return list(self._encode(text))

    def find_end_token(self, messages: Sequence[Message]) -> int:
        """Return the token that ends a completion if these messages follow.

        Some templates end a completion with another token if the result of a tool follows.
        """
        if not messages or messages[0]["role"] != "tool":
            return self.end_token_id
        with suppress(ConfigError):
            text = self._template.render_next_prompt(self._break_messages(messages))
            token_id = self._template.find_special(text)
            if token_id in self.end_token_ids:
                assert token_id is not None
                return token_id
        return self.end_token_id

    def encode_completion(
        self, text: str, *, add_prefix: bool = False, end_token_id: int | None = None
    ) -> list[int]:
        """Return the tokens of a completion as the policy would sample it, with the end token.

        With `add_prefix`, include any text that the template adds, such as an empty thought. A
        thinking model is more likely to sample that text than none. White space is always included.
        """
        prefix, _ = self._template.text_around_completion
        if not add_prefix and not prefix.isspace():
            prefix = ""
        return [
            *self._encode(prefix + self._response_texts.break_specials(text)),
            self.end_token_id if end_token_id is None else end_token_id,
        ]

    def is_surely_longer(self, texts: Iterable[str], num_chars: int, max_tokens: int) -> bool:
        """Return True if texts surely have more than `max_tokens` tokens.

        Texts with few characters for each token are not checked, because the caller encodes them.
        Other texts are encoded in pieces until the pieces have more than `2 * max_tokens` tokens.
        The cuts between pieces add far fewer tokens.
        """
        if num_chars <= _MAX_USUAL_CHARS_PER_TOKEN * max_tokens:
            return False
        num_tokens = 0
        for text in texts:
            for start in range(0, len(text), _MAX_FAST_CHARS):
                piece = self._texts.break_specials(text[start : start + _MAX_FAST_CHARS])
                num_tokens += len(self._encode(piece))
                if num_tokens > 2 * max_tokens:
                    return True
        return False

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of sampled tokens, without end tokens and padding."""
        if len(token_ids) > _MAX_CACHED_COMPLETION:
            return self._decode_ids(token_ids)
        return self._decode_cache(tuple(token_ids))

    def read_system_text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """Return the system message and the tools of a first prompt, as the template shows them.

        Special tokens are left out. Empty if the prompt has neither.
        """
        try:
            prompt = self._template.render(mark_first_message(messages), tools)
        except ConfigError:  # a template may expect certain texts
            return ""
        special_tokens = list_special_tokens(self.tokenizer)
        return extract_system_text(prompt, self._template.user_header, special_tokens)

    def _decode_ids(self, token_ids: Sequence[int]) -> str:
        shown_ids = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        return self.tokenizer.decode(shown_ids, skip_special_tokens=False)

    def _encode_first(self, key: tuple[str, str]) -> tuple[int, ...]:
        messages, tools = map(json.loads, key)
        specs = [self._break_specials(tool, self._texts) for tool in tools]
        return self._encode(self._template.render(self._break_messages(messages), specs))

    def _encode_next(self, key: tuple[str, int | None]) -> tuple[int, ...]:
        messages, sampled_id = json.loads(key[0]), key[1]
        self.check_turns()
        text = self._template.render_next_prompt(self._break_messages(messages))
        # A model may end a turn with another token than the template.
        for end_id in (sampled_id, self.end_token_id):
            end_text = "" if end_id is None else self.tokenizer.decode([end_id])
            if end_text and text.lstrip().startswith(end_text):
                text = text.lstrip().removeprefix(end_text)
                has_end = True
                break
        else:
            # The template does not end this turn. A sampled token or the EOS token does.
            has_end = not self._template.ends_turns
        # Encode with the end token first: some tokenizers treat the start of a text differently.
        token_ids = self._encode(self.end_text + text)
        start = token_ids.index(self.end_token_id)
        return token_ids[start if sampled_id is None and has_end else start + 1 :]

    def _separate_parts(
        self, message: Message, results: Sequence[tuple[str, str]], tools: Sequence[ToolSpec]
    ) -> Message:
        """Return a completion whose calls and thoughts are in the fields that the template needs.

        Calls without results stay in the text.
        """
        form, text = self.thoughts, message["content"]
        thoughts, answer = form.split(text)
        calls: list[ToolCall] = []
        if tools and results:
            try:
                calls = self.call_form.read_calls(answer, tools)
            except ActionParseError:
                calls = []
        if [call.name for call in calls] != [name for name, _ in results]:
            calls = []
        content = self.call_form.remove_calls(answer) if calls else answer
        fields: dict[str, Any] = {"role": "assistant", "content": content}
        if form.field is not None and thoughts:
            fields[form.field] = thoughts
        elif thoughts and form.start == THINK.start:
            # Many templates without a field remove such thoughts from the content.
            start, end = self._template.opening, form.find_end(text)
            fields["content"] = start + text[:end] + (content if calls else text[end:])
        if calls:
            fields["calls"] = make_template_calls(calls)
        fields["text"] = self._template.opening + text
        return cast("Message", fields)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._texts.encode(text, add_special_tokens=False))

    def _break_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose texts contain no special token that starts or ends a message."""
        broken_messages = []
        for message in messages:
            texts = self._completion_texts if message["role"] == "assistant" else self._texts
            fields = {key: self._break_specials(value, texts) for key, value in message.items()}
            broken_messages.append(cast("Message", {**fields, "role": message["role"]}))
        return broken_messages

    def _break_specials(self, content: Any, texts: TextTokenizer) -> Any:
        """Return a tool, or a part of a tool or a message, whose texts contain no special token."""
        if isinstance(content, str):
            return texts.break_specials(content)
        if isinstance(content, list):
            return [self._break_specials(item, texts) for item in content]
        if isinstance(content, dict):
            return {
                texts.break_specials(name): self._break_specials(value, texts)
                for name, value in content.items()
            }
        return content


def count_chars(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
    """Return the number of characters of messages, and of tools as JSON."""
    num_message_chars = sum(len(message["content"]) for message in messages)
    return num_message_chars + (len(json.dumps(tools, ensure_ascii=False)) if tools else 0)


def is_slow_to_encode(num_chars: int) -> bool:
    """Return True if the encoding of a text should not block an event loop."""
    return num_chars > _MAX_FAST_CHARS


def is_surely_longer(num_chars: int, max_tokens: int) -> bool:
    """Return True if no text of so many characters fits into `max_tokens` tokens.

    If the result is False, the text must be encoded to count its tokens.
    """
    return num_chars > max_tokens * _MAX_CHARS_PER_TOKEN


def limit_body_bytes(max_tokens: int) -> int:
    """Return the size of JSON above which its texts surely have more than `max_tokens` tokens."""
    return _MAX_BODY_OVERHEAD_BYTES + max_tokens * _MAX_CHARS_PER_TOKEN


def _make_key(items: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([*items], ensure_ascii=False)
