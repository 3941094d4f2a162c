"""Small conversations and calls that show how a chat template works, and what they showed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ludus.env import Message
from ludus.env.text.unicode import format_json
from ludus.proto.errors import ConfigError
from ludus.trainer.models.messages import TemplateMessage, structure_messages
from ludus.trainer.models.special_tokens import BREAK, list_special_tokens
from ludus.trainer.models.tool_calls import CallForm, ToolCall, ToolSpec

if TYPE_CHECKING:  # network runs use the text functions of `chat`, without transformers
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = f"assistant-turn{BREAK}placeholder"
"""Text of the assistant while the template around it is analyzed. Other texts cannot contain it."""
THOUGHT = "thought-placeholder"
USER_MESSAGE: Message = {"role": "user", "content": "-"}
SYSTEM_MESSAGE: Message = {"role": "system", "content": "-"}
TOOL_MESSAGE: Message = {"role": "tool", "content": "-"}
ASSISTANT_MESSAGE: Message = {"role": "assistant", "content": PLACEHOLDER}
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields in which templates expect the thoughts of a message."""
PROBE_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Analyzes a template.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "count": {"type": "integer", "description": "A number."},
            },
            "required": ["text"],
        },
    },
}
PROBE_CALL = ToolCall("probe_tool", {"text": "some words", "count": 7})
_SAMPLE_VALUES = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
"""A value of each JSON type, except text."""
_MARK = re.compile(r"<.+>|\[.+\]")

_TOOL_LIST = (
    "You may call these tools, each described by one line of JSON:\n{tools}\n"
    "To call one, answer with its name and arguments as JSON between tags:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class CallRendering:
    """The way in which a template renders tool calls."""

    form: CallForm | None
    """Form of the calls; None if it is unknown, or if the template renders no calls."""
    example: str = ""
    """A rendered call; empty if the template renders no calls."""
    has_text_arguments: bool = False
    """True if the template needs arguments as JSON text."""
    empty_content: str | None = ""
    """Content of a message that contains only calls."""

    def structure(self, messages: Sequence[Message]) -> list[TemplateMessage]:
        """Return messages whose calls and results are fields for the template."""
        return structure_messages(
            messages,
            has_text_arguments=self.has_text_arguments,
            empty_content=self.empty_content,
        )


def make_tool_list_message(tools: Sequence[ToolSpec]) -> Message:
    """Return a system message that lists tools, for templates that do not list them."""
    lines = "\n".join(format_json(tool["function"]) for tool in tools)
    return {"role": "system", "content": _TOOL_LIST.format(tools=lines)}


def format_hermes_call(call: ToolCall) -> str:
    """Return a call in the form that the message with the list of tools describes."""
    fields = {"name": call.name, "arguments": call.arguments}
    return f"<tool_call>\n{format_json(fields)}\n</tool_call>"


def find_template_specials(tokenizer: PreTrainedTokenizerBase, control_text: str) -> list[str]:
    """Return the special tokens that neither the tokenizer's settings nor the text use."""
    named_tokens = {*tokenizer.all_special_tokens}
    return [
        token
        for token in list_special_tokens(tokenizer)
        if token not in named_tokens and token not in control_text
    ]


def list_unmarked_controls(tokenizer: PreTrainedTokenizerBase, control_text: str) -> list[str]:
    """Return the tokens in brackets that the text uses and that are not marked as special.

    In some models, such tokens start or end messages.
    """
    return [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if not token.special and token.content in control_text and _MARK.fullmatch(token.content)
    ]


def are_in_order(contents: Sequence[str], text: str) -> bool:
    positions = [text.find(content) for content in contents]
    return -1 not in positions and positions == sorted(positions)


def make_sample_call(tool: ToolSpec) -> ToolCall:
    """Return a call of a tool with a value for each parameter."""
    function = tool["function"]
    properties = (function.get("parameters") or {}).get("properties") or {}
    arguments = {}
    for name, schema in properties.items():
        schema_type = schema.get("type") if isinstance(schema, dict) else None
        value = _SAMPLE_VALUES.get(schema_type, "some words") if isinstance(schema_type, str) else 1
        arguments[name] = value
    return ToolCall(function["name"], arguments)


def read_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a chat template. Of several, the default serves whole conversations.

    Raises:
        ConfigError: there is no such template, or no EOS token.
    """
    template, name = tokenizer.chat_template, tokenizer.name_or_path
    if template is None:
        raise ConfigError(
            f"model '{name}' has no chat template; set model.chat_template to a Jinja file with "
            "the template that the model was trained with, or use an instruction-tuned model"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of model '{name}' has no EOS token, so no answer would end; use an "
            "instruction-tuned model"
        )
    if isinstance(template, str):
        return template
    if "default" not in template:
        raise ConfigError(
            f"the chat template of '{name}' consists of {', '.join(template)} without a default; "
            "set model.chat_template to a file with one of them"
        )
    return str(template["default"])
