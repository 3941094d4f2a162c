"""Messages with tool calls, and the forms in which chat templates accept messages.

    {"role": "assistant", "content": "I ask.", "calls": [{"name": "add", "arguments": {"a": 1}}]}
    {"role": "tool", "name": "add", "content": "5"}

A result has the name of its tool only if it answers a call. Results answer calls in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, NotRequired, TypedDict

from ludus.env import Message
from ludus.env.text.unicode import format_json
from ludus.trainer.models.tool_calls import ToolCall

TemplateMessage = dict[str, Any]
"""A message with the fields that chat templates know."""
MessageForm = Callable[[Sequence[Message]], list[TemplateMessage]]


class ItemShape(NamedTuple):
    """The properties of a message that decide how a template renders it."""

    role: str
    names: tuple[str, ...]
    """Names of the tools that the message calls, or of the tool whose result it is."""
    has_id: bool
    """True if the model gave the call an id."""


MessageShape = tuple[ItemShape, ...]


class CallEntry(TypedDict):
    """A tool call in a message."""

    name: str
    arguments: dict[str, Any]
    id: NotRequired[str]


class AssistantMessage(Message, total=False):
    """A completion. The template's field of thoughts may be present too."""

    calls: list[CallEntry]
    """Calls that the content does not contain."""
    text: str
    """Content with calls and thoughts, for templates that have no fields for them."""


class ToolMessage(Message):
    """The result of a call."""

    name: str
    call_id: NotRequired[str]
    """Id that the model gave the call."""


def make_call_id(index: int) -> str:
    """Return an id for a call without one. Mistral's templates need nine letters and digits."""
    return f"ludus{index:04d}"


def mark_completion(message: Message) -> AssistantMessage:
    """Return a message whose content is the text of a sampled completion."""
    return {"role": "assistant", "content": message["content"], "text": message["content"]}


def make_template_calls(calls: Iterable[ToolCall]) -> list[CallEntry]:
    """Return the calls as entries of a message."""
    entries: list[CallEntry] = []
    for call in calls:
        entry: CallEntry = {"name": call.name, "arguments": call.arguments}
        entries.append({**entry, "id": call.id} if call.id else entry)
    return entries


def make_result(call: ToolCall, content: str) -> ToolMessage:
    """Return the result of a call as a message."""
    result: ToolMessage = {"role": "tool", "name": call.name, "content": content}
    if call.id:
        result["call_id"] = call.id
    return result


def name_results(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which results have the name of their tool.

    A message with calls must be followed by one result for each, or the results stay without names.
    """
    named_messages: list[Message] = []
    open_calls: list[ToolCall] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool" and open_calls:
            named_messages.append(make_result(open_calls.pop(0), message["content"]))
            continue
        fields: Mapping[str, Any] = message
        open_calls = [
            ToolCall(call["name"], call["arguments"], call.get("id", ""))
            for call in fields.get("calls", ())
        ]
        results = takewhile(lambda item: item["role"] == "tool", messages[index + 1 :])
        if len(list(results)) != len(open_calls):
            open_calls = []
        named_messages.append(message)
    return named_messages


def list_results(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return the names and ids of the calls whose results are the first messages."""
    results: Any = takewhile(lambda message: message["role"] == "tool", messages)
    return [(result["name"], result.get("call_id", "")) for result in results if "name" in result]


def get_shape(messages: Sequence[Message]) -> MessageShape:
    """Return the shape of each message."""
    return tuple(
        ItemShape(message["role"], _list_names(message), "call_id" in message)
        for message in messages
    )


def make_probes(shape: MessageShape) -> tuple[list[Message], list[str]]:
    """Return messages of a shape, and the contents that a template must show in order."""
    messages: list[Any] = []
    contents = []
    for index, (role, names, has_id) in enumerate(shape):
        content = f"stands-for-{index}-of-them"
        message: TemplateMessage = {"role": role, "content": content}
        if role == "tool" and names:
            message |= {"name": names[0], **({"call_id": make_call_id(1)} if has_id else {})}
        elif names:
            message["calls"] = [{"name": name, "arguments": {"text": "-"}} for name in names]
        if role != "assistant" or not names:
            contents.append(content)
        messages.append(message)
    return messages, contents


def structure_messages(
    messages: Sequence[Message], *, has_text_arguments: bool, empty_content: str | None
) -> list[TemplateMessage]:
    """Return messages whose calls and results are fields for the template."""
    structured_messages: list[TemplateMessage] = []
    open_ids: list[str] = []
    for message in messages:
        fields = {key: value for key, value in message.items() if key != "text"}
        calls: Any = fields.pop("calls", ())
        if calls:
            open_ids = [call.get("id") or make_call_id(i) for i, call in enumerate(calls)]
            fields["content"] = fields["content"] or empty_content
            fields["tool_calls"] = [
                _make_tool_call(call_id, call, has_text_arguments=has_text_arguments)
                for call_id, call in zip(open_ids, calls, strict=True)
            ]
        elif "name" in fields and open_ids:
            fields["tool_call_id"] = open_ids.pop(0)
            fields.pop("call_id", None)
        structured_messages.append(fields)
    return structured_messages


def flatten_messages(
    messages: Sequence[Message], *, write_calls: Callable[[Sequence[ToolCall]], str]
) -> list[TemplateMessage]:
    """Return messages whose calls and thoughts are part of the content."""
    flat_messages: list[TemplateMessage] = []
    for message in messages:
        fields: Mapping[str, Any] = message
        content = fields.get("text", fields["content"])
        if "text" not in fields and fields.get("calls"):
            calls = [ToolCall(call["name"], call["arguments"]) for call in fields["calls"]]
            content = "\n".join(filter(None, [content, write_calls(calls)]))
        flat_messages.append({"role": fields["role"], "content": content})
    return flat_messages


def merge_neighbors(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Merge adjacent messages of one role, for templates that require alternating roles."""
    merged_messages: list[TemplateMessage] = []
    for message in messages:
        if merged_messages and merged_messages[-1]["role"] == message["role"]:
            content = f"{merged_messages[-1]['content']}\n\n{message['content']}"
            merged_messages[-1] = {"role": message["role"], "content": content}
        else:
            merged_messages.append(message)
    return merged_messages


def merge_into_user(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Turn all messages of other roles into user messages, for templates with only two roles."""
    return merge_neighbors([_to_user_message(message) for message in messages])


def _list_names(message: Message) -> tuple[str, ...]:
    fields: Mapping[str, Any] = message
    if "name" in fields:
        return (fields["name"],)
    return tuple(call["name"] for call in fields.get("calls", ()))


def _make_tool_call(call_id: str, call: CallEntry, *, has_text_arguments: bool) -> dict[str, Any]:
    arguments: Any = call["arguments"]
    if has_text_arguments:
        arguments = format_json(arguments)
    function = {"name": call["name"], "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _to_user_message(message: TemplateMessage) -> TemplateMessage:
    match message["role"]:
        case "assistant":
            return message
        case "tool":
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
            return {"role": "user", "content": content}
        case _:
            return {"role": "user", "content": message["content"]}
