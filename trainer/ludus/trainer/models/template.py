"""A model's chat template, taken apart by what it makes of words that stand for texts.

Templates are programs, and differ: in how a turn ends, in roles they refuse, in whether they
list tools. All of it is found out by rendering small conversations and looking.

    messages --form that the template takes--> text      as they are, merged, or folded
    tools    --listed by the template, or in words of our own--> text
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from ludus.env import Message
from ludus.proto.errors import ConfigError

ToolSpec = dict[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {name, description, ...}}."""

# Stands for the assistant's text while the template around it is taken apart.
_PLACEHOLDER = "assistant-turn-placeholder"

_TOOLS_IN_WORDS = (
    "You may call these tools, each described by one line of JSON:\n{tools}\n"
    "To call one, answer with its name and arguments as JSON between tags:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)

Form = Callable[[Sequence[Message]], list[Message]]


class ChatTemplate:
    """What a tokenizer's chat template does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, enable_thinking: bool) -> None:
        if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
            raise ConfigError(
                f"model '{tokenizer.name_or_path}' expected a chat template and an end token, "
                "got none; take an instruction-tuned model"
            )
        self._tokenizer = tokenizer
        self._enable_thinking = enable_thinking
        self._form_of = lru_cache(1024)(self._find_form)
        self._lists = lru_cache(1024)(self._finds_tool)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, prompt: bool = True
    ) -> str:
        """The text of a conversation, up to where the assistant speaks when `prompt` is set.

        Raises:
            ConfigError: the template refuses such a conversation in every form.
        """
        if tools and not self._lists(json.dumps(tools[0])):
            messages, tools = [tools_in_words(tools), *messages], ()
        form = self._form_of(tuple(message["role"] for message in messages))
        return self._apply(form(messages), tools, prompt=prompt)

    def after_answer(self, messages: Sequence[Message]) -> str:
        """The text between the assistant's words and its next turn, its end token included."""
        before: list[Message] = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _PLACEHOLDER},
        ]
        text = self.render([*before, *messages])
        _, found, rest = text.rpartition(_PLACEHOLDER)
        if not found:
            raise self._refusal("leaves out what the assistant has said")
        return rest

    @cached_property
    def end_token_id(self) -> int:
        """The token that ends an assistant's turn; where there is none, that of a whole text.

        Many models end a turn with another token than a text (Gemma, Phi).
        """
        end = self._around_answer[1]
        known = self._tokenizer.added_tokens_decoder
        for token_id in self._tokenizer.encode(end.lstrip(), add_special_tokens=False)[:1]:
            if token_id in known and known[token_id].special:
                return token_id
        return int(self._tokenizer.eos_token_id)

    @cached_property
    def space_before_answer(self) -> str:
        """White space that the template puts before an answer and leaves to the model to say."""
        space = self._around_answer[0]
        return space if space.isspace() else ""

    @cached_property
    def before_answer(self) -> str:
        """What the template puts before an answer and leaves to the model to say."""
        return self._around_answer[0]

    @cached_property
    def _around_answer(self) -> tuple[str, str]:
        """What the template puts before an answer that no prompt has, and after it."""
        asked: list[Message] = [{"role": "user", "content": "-"}]
        answered: list[Message] = [*asked, {"role": "assistant", "content": _PLACEHOLDER}]
        whole = self.render(answered, prompt=False)
        before, found, after = whole.rpartition(_PLACEHOLDER)
        if not found:
            raise self._refusal("leaves out what the assistant has said")
        prompt = self.render(asked)
        # Some prompts begin a thought that the template takes out once there is an answer.
        return (before[len(prompt) :] if before.startswith(prompt) else ""), after

    def _find_form(self, roles: tuple[str, ...]) -> Form:
        """The first form in which the template shows every message of such roles."""
        messages: list[Message] = [
            {"role": role, "content": f"stands-for-{number}-of-them"}
            for number, role in enumerate(roles)
        ]
        reason = "shows none of some role's messages"
        for form in (_as_is, _merged, _folded):
            try:
                text = self._apply(form(messages), ())
            except TemplateError as error:
                reason = f"says: {error}"
                continue
            if all(message["content"] in text for message in messages):
                return form
        raise self._refusal(f"takes no conversation of the roles {', '.join(roles)}; it {reason}")

    def _finds_tool(self, tool: str) -> bool:
        spec: ToolSpec = json.loads(tool)
        try:
            text = self._apply([{"role": "user", "content": "-"}], [spec])
        except TemplateError:
            return False
        return spec["function"]["name"] in text

    def _apply(
        self, messages: list[Message], tools: Sequence[ToolSpec], *, prompt: bool = True
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=prompt,
            enable_thinking=self._enable_thinking,
        )
        return str(text)

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"the chat template of '{self._tokenizer.name_or_path}' {what}; take a model whose "
            "template shows whole conversations"
        )


def _as_is(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message: some templates want roles to alternate."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            content = f"{merged[-1]['content']}\n\n{message['content']}"
            merged[-1] = {"role": message["role"], "content": content}
        else:
            merged.append(message)
    return merged


def _folded(messages: Sequence[Message]) -> list[Message]:
    """Everything that is not the assistant's as the user's: some templates know no other role."""
    return _merged([_from_user(message) for message in messages])


def _from_user(message: Message) -> Message:
    match message["role"]:
        case "assistant":
            return message
        case "tool":
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
            return {"role": "user", "content": content}
        case _:
            return {"role": "user", "content": message["content"]}


def tools_in_words(tools: Sequence[ToolSpec]) -> Message:
    """A message that lists tools, for templates that list none."""
    lines = "\n".join(json.dumps(tool["function"]) for tool in tools)
    return {"role": "system", "content": _TOOLS_IN_WORDS.format(tools=lines)}
