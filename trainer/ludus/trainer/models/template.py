"""A model's chat template, analyzed by rendering placeholders.

Templates are programs and differ in several ways: in how a turn ends, in the roles that they
refuse, and in whether they list tools. Rendering small conversations shows all of this.

    messages --form that the template accepts--> text      unchanged, merged, or all from the user
    tools    --listed by the template, or by a message--> text
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
"""A tool in the form of chat templates: {"type": "function", "function": {name, ...}}."""

_PLACEHOLDER = "assistant-turn-placeholder"
"""Text of the assistant while the template around it is analyzed."""

_TOOL_LIST = (
    "You may call these tools, each described by one line of JSON:\n{tools}\n"
    "To call one, answer with its name and arguments as JSON between tags:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)

Form = Callable[[Sequence[Message]], list[Message]]


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
        self._form_for_roles = lru_cache(1024)(self._find_form)
        self._lists_tool = lru_cache(1024)(self._find_whether_listed)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, prompt: bool = True
    ) -> str:
        """Return the text of a conversation; with `prompt`, up to the start of a completion.

        Raises:
            ConfigError: the template refuses such a conversation in every form.
        """
        if tools and not self._lists_tool(json.dumps(tools[0])):
            messages, tools = [tool_list_message(tools), *messages], ()
        form = self._form_for_roles(tuple(message["role"] for message in messages))
        return self._apply(form(messages), tools, prompt=prompt)

    def text_after_completion(self, messages: Sequence[Message]) -> str:
        """Return the text between two completions: the end of the first turn, then `messages`."""
        conversation: list[Message] = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _PLACEHOLDER},
        ]
        text = self.render([*conversation, *messages])
        _, separator, remaining_text = text.rpartition(_PLACEHOLDER)
        if not separator:
            raise self._refusal("omits the assistant's messages")
        return remaining_text

    @cached_property
    def end_token_id(self) -> int:
        """The token that ends an assistant's turn, or the EOS token if there is none.

        In many models the two differ (Gemma, Phi).
        """
        _, end = self._text_around_completion
        special_tokens = self._tokenizer.added_tokens_decoder
        for token_id in self._tokenizer.encode(end.lstrip(), add_special_tokens=False)[:1]:
            if token_id in special_tokens and special_tokens[token_id].special:
                return token_id
        return int(self._tokenizer.eos_token_id)

    @cached_property
    def space_before_completion(self) -> str:
        """White space that the template adds before a completion and that no prompt includes."""
        text = self.text_before_completion
        return text if text.isspace() else ""

    @property
    def text_before_completion(self) -> str:
        """Text that the template adds before a completion and that no prompt includes."""
        return self._text_around_completion[0]

    @cached_property
    def _text_around_completion(self) -> tuple[str, str]:
        question: list[Message] = [{"role": "user", "content": "-"}]
        response: Message = {"role": "assistant", "content": _PLACEHOLDER}
        text = self.render([*question, response], prompt=False)
        start, separator, end = text.rpartition(_PLACEHOLDER)
        if not separator:
            raise self._refusal("omits the assistant's messages")
        prompt = self.render(question)
        # Some prompts open a thought that the template removes once there is a response.
        return (start[len(prompt) :] if start.startswith(prompt) else ""), end

    def _find_form(self, roles: tuple[str, ...]) -> Form:
        """Return the first form in which the template shows every message of these roles."""
        messages: list[Message] = [
            {"role": role, "content": f"stands-for-{number}-of-them"}
            for number, role in enumerate(roles)
        ]
        reason = "omits the messages of some roles"
        for form in (_keep_messages, _merge_neighbors, _merge_into_user):
            try:
                text = self._apply(form(messages), ())
            except TemplateError as error:
                reason = f"reports: {error}"
                continue
            if all(message["content"] in text for message in messages):
                return form
        raise self._refusal(f"refuses conversations with the roles {', '.join(roles)}; it {reason}")

    def _find_whether_listed(self, tool: str) -> bool:
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

    def _refusal(self, problem: str) -> ConfigError:
        return ConfigError(
            f"the chat template of '{self._tokenizer.name_or_path}' {problem}; use a model whose "
            "template renders whole conversations"
        )


def tool_list_message(tools: Sequence[ToolSpec]) -> Message:
    """Return a system message that lists tools, for templates that do not list them."""
    lines = "\n".join(json.dumps(tool["function"]) for tool in tools)
    return {"role": "system", "content": _TOOL_LIST.format(tools=lines)}


def _keep_messages(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


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
