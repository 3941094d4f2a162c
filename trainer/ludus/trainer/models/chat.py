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

Templates are programs and differ in several ways: in how a turn ends, in the roles that they
refuse, and in whether they list tools. All of this is found out by rendering small conversations.

    messages --form that the template accepts--> text      unchanged, merged, or all from the user
    tools    --listed by the template, or by a message--> text
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from ludus.env import Message
from ludus.env.text.unicode import format_json
from ludus.proto.config import ModelConfig, PretrainedModel
from ludus.proto.errors import ConfigError
from ludus.trainer.models.sized_cache import SizedCache, measure_entry
from ludus.trainer.models.special_tokens import BREAK, TextTokenizer, list_special_tokens
from ludus.trainer.models.thoughts import THOUGHT_START

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

MessageKey = tuple[tuple[str, str], ...]

ToolSpec = dict[str, Any]
"""A tool in the form of chat templates: {"type": "function", "function": {name, ...}}."""

_PLACEHOLDER = f"assistant-turn{BREAK}placeholder"
"""Text of the assistant while the template around it is analyzed. Other texts cannot contain it."""
_USER_MESSAGE: Message = {"role": "user", "content": "-"}
_SYSTEM_MESSAGE: Message = {"role": "system", "content": "-"}
_TOOL_MESSAGE: Message = {"role": "tool", "content": "-"}
_ASSISTANT_MESSAGE: Message = {"role": "assistant", "content": _PLACEHOLDER}

_TOOL_LIST = (
    "You may call these tools, each described by one line of JSON:\n{tools}\n"
    "To call one, answer with its name and arguments as JSON between tags:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)

MessageForm = Callable[[Sequence[Message]], list[Message]]


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
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, enable_thinking=enable_thinking)
        self.keeps_thoughts = keep_thinking
        """True if a conversation only grows; otherwise every turn renders all messages again."""
        self._texts = TextTokenizer(tokenizer)
        self._completion_texts = TextTokenizer(tokenizer, kept_tokens=self._list_content_tokens())
        self.end_token_id: int = self._template.end_token_id
        """The token that ends a turn in the template."""
        self.end_token_ids = frozenset((self.end_token_id, tokenizer.eos_token_id, *end_token_ids))
        """All tokens that end a completion. Some models end it differently after a tool call."""
        self._hidden_ids = self.end_token_ids | {tokenizer.pad_token_id}
        self._end_text: str = tokenizer.decode([self.end_token_id])
        # The caches help because environments repeat the same few texts thousands of times.
        self._first_prompt_cache = SizedCache(self._encode_first, measure_entry, self.cache_bytes)
        self._next_prompt_cache = SizedCache(self._encode_next, measure_entry, self.cache_bytes)
        self._decode_cache = SizedCache(self._decode_ids, measure_entry, self.cache_bytes)

    @classmethod
    def load(cls, model_path: str, config: ModelConfig) -> ChatTokenizer:
        """Load the tokenizer of a model's folder or Hugging Face id."""
        from ludus.trainer.models.load import load_end_token_ids, load_tokenizer

        tokenizer = load_tokenizer(model_path)
        if not isinstance(config, PretrainedModel):
            return cls(tokenizer)
        return cls(
            tokenizer,
            end_token_ids=load_end_token_ids(model_path),
            enable_thinking=config.enable_thinking,
            keep_thinking=config.keep_thinking,
        )

    @property
    def opens_thoughts(self) -> bool:
        """True if the prompt ends with the start of a thought, which the completion continues."""
        return self._template.opens_thoughts

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
        return self._template.render(self._break_message_specials(_make_key(messages)))

    def encode_first_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """Return the tokens of a new conversation, up to the start of the completion."""
        return list(self._first_prompt_cache((_make_key(messages), json.dumps(tools))))

    def encode_next_prompt(self, messages: Sequence[Message], *, has_end_token: bool) -> list[int]:
        """Return the tokens of the environment's `messages` between two completions.

        If the completion has no end token, the token is added here.
        """
        token_ids = list(self._next_prompt_cache(_make_key(messages)))
        return token_ids if has_end_token else [self.end_token_id, *token_ids]

    def encode_whole_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """Return the tokens of a conversation, in which the template renders all completions."""
        return list(self._encode_first((_make_key(messages), json.dumps(tools))))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that the chat template has already rendered.

        Its special tokens keep their meaning, because most of them are from the template.
        """
        return list(self._encode(text))

    def encode_completion(self, text: str, *, add_prefix: bool = False) -> list[int]:
        """Return the tokens of a completion as the policy would sample it, with the end token.

        With `add_prefix`, include any text that the template adds, such as an empty thought. A
        thinking model is more likely to sample that text than none. White space is always included.
        """
        prefix, _ = self._template.text_around_completion
        if not add_prefix and not prefix.isspace():
            prefix = ""
        return [
            *self._encode(prefix + self._completion_texts.break_specials(text)),
            self.end_token_id,
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

    def _decode_ids(self, token_ids: Sequence[int]) -> str:
        shown_ids = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        return self.tokenizer.decode(shown_ids, skip_special_tokens=False)

    def _encode_first(self, key: tuple[MessageKey, str]) -> tuple[int, ...]:
        messages, tools = key
        specs = [self._break_tool_specials(tool) for tool in json.loads(tools)]
        return self._encode(self._template.render(self._break_message_specials(messages), specs))

    def _encode_next(self, key: MessageKey) -> tuple[int, ...]:
        text = self._template.render_next_prompt(self._break_message_specials(key))
        start, separator, remaining_text = text.partition(self._end_text)
        if not separator or start.strip():
            remaining_text = text  # The template does not end turns; the policy's end token does.
        # Encode with the end token first: some tokenizers treat the start of a text differently.
        token_ids = self._encode(self._end_text + remaining_text)
        return token_ids[token_ids.index(self.end_token_id) + 1 :]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._texts.encode(text, add_special_tokens=False))

    def _break_message_specials(self, key: MessageKey) -> list[Message]:
        return [
            {"role": role, "content": self._get_texts(role).break_specials(content)}
            for role, content in key
        ]

    def _get_texts(self, role: str) -> TextTokenizer:
        return self._completion_texts if role == "assistant" else self._texts

    def _list_content_tokens(self) -> list[str]:
        """Return the special tokens that a completion may contain, such as tags of thoughts.

        The tokenizer's named tokens and those of the template start and end messages.
        """
        control_text = self._template.render_every_role()
        named_tokens = {*self.tokenizer.all_special_tokens}
        return [
            token
            for token in list_special_tokens(self.tokenizer)
            if token not in named_tokens and token not in control_text
        ]

    def _break_tool_specials(self, content: Any) -> Any:
        """Return a tool, or a part of a tool, whose texts contain no special token."""
        if isinstance(content, str):
            return self._texts.break_specials(content)
        if isinstance(content, list):
            return [self._break_tool_specials(item) for item in content]
        if isinstance(content, dict):
            return {
                self._texts.break_specials(name): self._break_tool_specials(value)
                for name, value in content.items()
            }
        return content


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, enable_thinking: bool) -> None:
        if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
            raise ConfigError(
                f"model '{tokenizer.name_or_path}' needs a chat template and an EOS token, "
                "but has none; use an instruction-tuned model"
            )
        self._tokenizer = tokenizer
        self._enable_thinking = enable_thinking
        self._find_cached_form = lru_cache(1024)(self._find_form)
        self._template_lists_tool = lru_cache(1024)(self._check_tool_listing)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, is_prompt: bool = True
    ) -> str:
        """Return the text of a conversation; a prompt ends with the start of a completion.

        Raises:
            ConfigError: the template refuses such a conversation in every form.
        """
        if tools and not self._template_lists_tool(json.dumps(tools[0])):
            messages, tools = [make_tool_list_message(tools), *messages], ()
        form = self._find_cached_form(tuple(message["role"] for message in messages))
        return self._apply_template(form(messages), tools, is_prompt=is_prompt)

    def render_next_prompt(self, messages: Sequence[Message]) -> str:
        """Return the text between two completions: the end of the first turn, then `messages`."""
        text = self.render([_USER_MESSAGE, _ASSISTANT_MESSAGE, *messages])
        return self._split_at_placeholder(text)[1]

    @cached_property
    def end_token_id(self) -> int:
        """The token that ends an assistant's turn, or the EOS token if there is none.

        In many models the two differ (Gemma, Phi).
        """
        _, text_after = self.text_around_completion
        special_tokens = self._tokenizer.added_tokens_decoder
        for token_id in self._tokenizer.encode(text_after.lstrip(), add_special_tokens=False)[:1]:
            if token_id in special_tokens and special_tokens[token_id].special:
                return token_id
        return int(self._tokenizer.eos_token_id)

    @cached_property
    def text_around_completion(self) -> tuple[str, str]:
        """Text that the template adds before a completion (not in its prompt), and after it."""
        text = self.render([_USER_MESSAGE, _ASSISTANT_MESSAGE], is_prompt=False)
        start, text_after = self._split_at_placeholder(text)
        prompt = self.render([_USER_MESSAGE])
        # Some prompts open a thought, which the template removes if there is a response.
        return (start[len(prompt) :] if start.startswith(prompt) else ""), text_after

    @cached_property
    def opens_thoughts(self) -> bool:
        """True if a prompt ends with the start of a thought."""
        return self.render([_USER_MESSAGE]).rstrip().endswith(THOUGHT_START)

    def render_every_role(self) -> str:
        """Return a conversation with the roles that the template accepts."""
        start, end = [_USER_MESSAGE, _ASSISTANT_MESSAGE], [_ASSISTANT_MESSAGE, _USER_MESSAGE]
        conversations = (
            [_SYSTEM_MESSAGE, *start, _TOOL_MESSAGE, *end],
            [*start, _USER_MESSAGE],
            [_USER_MESSAGE],
        )
        for messages in conversations:
            with suppress(ConfigError):
                return self.render(messages)
        return ""  # The first prompt will raise the error.

    def _split_at_placeholder(self, text: str) -> tuple[str, str]:
        text_before, separator, text_after = text.rpartition(_PLACEHOLDER)
        if not separator:
            raise self._make_refusal("omits the assistant's messages")
        return text_before, text_after

    def _find_form(self, roles: tuple[str, ...]) -> MessageForm:
        """Return the first form in which the template shows all messages of these roles in order.

        Some templates show a later system message at the start, where no appended prompt has it.
        """
        messages: list[Message] = [
            {"role": role, "content": f"stands-for-{index}-of-them"}
            for index, role in enumerate(roles)
        ]
        reason = "omits or moves the messages of some roles"
        forms: tuple[MessageForm, ...] = (list, _merge_neighbors, _merge_into_user)
        for form in forms:
            try:
                text = self._apply_template(form(messages), ())
            except TemplateError as error:
                reason = f"reports: {error}"
                continue
            positions = [text.find(message["content"]) for message in messages]
            if -1 not in positions and positions == sorted(positions):
                return form
        raise self._make_refusal(
            f"refuses conversations with the roles {', '.join(roles)}; it {reason}"
        )

    def _check_tool_listing(self, tool: str) -> bool:
        spec: ToolSpec = json.loads(tool)
        try:
            text = self._apply_template([_USER_MESSAGE], [spec])
        except TemplateError:
            return False
        return spec["function"]["name"] in text

    def _apply_template(
        self, messages: list[Message], tools: Sequence[ToolSpec], *, is_prompt: bool = True
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=is_prompt,
            enable_thinking=self._enable_thinking,
        )
        return str(text)

    def _make_refusal(self, problem: str) -> ConfigError:
        return ConfigError(
            f"the chat template of '{self._tokenizer.name_or_path}' {problem}; use a model whose "
            "template renders whole conversations"
        )


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


def make_tool_list_message(tools: Sequence[ToolSpec]) -> Message:
    """Return a system message that lists tools, for templates that do not list them."""
    lines = "\n".join(format_json(tool["function"]) for tool in tools)
    return {"role": "system", "content": _TOOL_LIST.format(tools=lines)}


def _merge_neighbors(messages: Sequence[Message]) -> list[Message]:
    """Merge adjacent messages of one role, for templates that require alternating roles."""
    merged_messages: list[Message] = []
    for message in messages:
        if merged_messages and merged_messages[-1]["role"] == message["role"]:
            content = f"{merged_messages[-1]['content']}\n\n{message['content']}"
            merged_messages[-1] = {"role": message["role"], "content": content}
        else:
            merged_messages.append(message)
    return merged_messages


def _merge_into_user(messages: Sequence[Message]) -> list[Message]:
    """Turn all messages of other roles into user messages, for templates with only two roles."""
    return _merge_neighbors([_to_user_message(message) for message in messages])


def _to_user_message(message: Message) -> Message:
    match message["role"]:
        case "assistant":
            return message
        case "tool":
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
            return {"role": "user", "content": content}
        case _:
            return {"role": "user", "content": message["content"]}


def _make_key(messages: Sequence[Message]) -> MessageKey:
    return tuple((message["role"], message["content"]) for message in messages)


def _parse_key(key: MessageKey) -> list[Message]:
    return [{"role": role, "content": content} for role, content in key]
