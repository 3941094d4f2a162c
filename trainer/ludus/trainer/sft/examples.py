"""The examples of a data set: conversations as exchanges, each of which ends with a response.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    {"messages": [...], "tools": [{"type": "function", "function": {...}}]}
    {"prompt": ..., "completion": ...}

`messages`, `prompt` and `completion` are texts or lists of messages. In a file without lists, such
as .csv, lists are JSON texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.env import Message
from ludus.env.text.unicode import replace_surrogates
from ludus.proto.errors import ConfigError, did_you_mean
from ludus.proto.paths import parse_path
from ludus.trainer.data.rows import Row, read_rows
from ludus.trainer.learner.warm_start import Exchange
from ludus.trainer.models.tool_calls import ToolSpec

_COLUMNS = ("messages", "tools", "prompt", "completion")
_ROLES = ("system", "user", "assistant", "tool")
_UNSUPPORTED_KEYS = {
    "tool_calls": "write the calls into content, in the form in which the model writes them",
    "function_call": "write the call into content, in the form in which the model writes it",
    "reasoning_content": "write the reasoning into content, between <think> and </think>",
    "reasoning": "write the reasoning into content, between <think> and </think>",
    "thinking": "write the reasoning into content, between <think> and </think>",
    "reasoning_details": "write the reasoning into content, between <think> and </think>",
    **dict.fromkeys(
        ("weight", "train", "loss", "loss_mask", "loss_weight"),
        "remove the key, or split the conversation: all assistant messages are trained on",
    ),
    **dict.fromkeys(("image", "images", "audio", "refusal"), "messages contain only text"),
}
"""Keys of messages that would change what the model learns, with the remedy."""
_UNSUPPORTED_COLUMNS = {
    **dict.fromkeys(
        ("image", "images", "video", "videos", "audio", "audios"),
        "remove such rows: messages contain only text",
    ),
    "documents": "write the documents into a message",
    "functions": "write the functions into the column tools",
    "chat_template_kwargs": "set model.enable_thinking for all rows",
}
"""Columns that other programs show to the model, with the remedy."""
_TEXT_PART_TYPES = (None, "text", "input_text", "output_text")
"""Values of `type` in a part of a content that is text."""


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation to learn from."""

    location: str
    """File and row number, for messages."""
    exchanges: Sequence[Exchange]
    """At least one exchange."""


class _FieldError(Exception):
    """A field of a row is invalid; the text names the field."""


def read_examples(path: str, *, split: str, field: str) -> Iterator[ChatExample]:
    """Yield the examples of a data set.

    Args:
        field: name of the configuration field with the path, for messages.

    Raises:
        ConfigError: a row cannot be used; the message names the row and the field.
        NotFoundError: there is no data set.
    """
    for row in read_rows(parse_path(path), split=split, field=field):
        try:
            yield ChatExample(row.location, _parse_row(row))
        except _FieldError as error:
            raise ConfigError(f"{row.location}: {error}") from None


def _parse_row(row: Row) -> list[Exchange]:
    # Tables have null in the columns that a row does not have.
    columns = {str(name): value for name, value in row.columns.items() if value is not None}
    for name, remedy in _UNSUPPORTED_COLUMNS.items():
        if columns.get(name) not in (None, [], {}, ""):
            raise _FieldError(f"the column {name} is not supported; {remedy}")
    if "messages" in columns:
        messages = _parse_messages(columns["messages"], "messages", role=None)
    elif "prompt" in columns and "completion" in columns:
        messages = _parse_messages(columns["prompt"], "prompt", role="user")
        num_prompt_messages = len(messages)
        messages += _parse_messages(columns["completion"], "completion", role="assistant")
        if messages[num_prompt_messages]["role"] != "assistant":
            raise _FieldError("completion[0].role must be assistant")
    else:
        raise _FieldError(_explain_columns(list(map(str, row.columns)), columns))
    return _split_exchanges(messages, _parse_tools(columns.get("tools")))


def _explain_columns(names: Sequence[str], columns: Mapping[str, Any]) -> str:
    empty_names = [name for name in names if name in _COLUMNS and name not in columns]
    problem = f"got {', '.join(names) or 'no columns'}"
    if empty_names:
        problem += f", without a value in {', '.join(empty_names)}"
    other_names = [name for name in names if name not in _COLUMNS]
    return "; ".join(
        [
            "the row needs the column messages, or the columns prompt and completion",
            problem,
            *_suggest_names(other_names, _COLUMNS),
        ]
    )


def _suggest_names(names: Iterable[str], expected_names: Sequence[str]) -> list[str]:
    hints = ((name, did_you_mean(name, expected_names)) for name in names)
    return [f"'{name}': {hint}" for name, hint in hints if hint]


def _parse_messages(value: Any, name: str, role: str | None) -> list[Message]:
    """Return the messages of a column; with a role, the column may also be a plain text."""
    parsed_value = _parse_json_list(value)
    # A prompt or completion may be JSON itself, such as a list of calls.
    if role is None or not isinstance(value, str) or _has_roles(parsed_value):
        value = parsed_value
    if isinstance(value, str) and role is not None:
        if not value.strip():
            raise _FieldError(f"{name} is empty; fix or remove the row")
        return [{"role": role, "content": _parse_text(value, name)}]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        expected = "a list of messages" if role is None else "a text or a list of messages"
        raise _FieldError(f"{name} must be {expected}, got {value!r:.80}")
    return [_parse_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _parse_json_list(value: Any) -> Any:
    """Return the list that a text such as '[{"role": ...}]' has, or the value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _has_roles(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and "role" in item for item in value)
    )


def _parse_message(value: Any, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise _FieldError(f"{name} must have role and content, got {value!r:.80}")
    for key, remedy in _UNSUPPORTED_KEYS.items():
        if value.get(key) not in (None, [], ""):
            raise _FieldError(f"{name}.{key} is not supported; {remedy}")
    missing_keys = [key for key in ("role", "content") if value.get(key) is None]
    if missing_keys:
        problem = f"{name} needs role and content, got {', '.join(map(str, value)) or 'no keys'}"
        raise _FieldError("; ".join([problem, *_suggest_names(map(str, value), missing_keys)]))
    if value["role"] not in _ROLES:
        raise _FieldError(f"{name}.role must be one of {', '.join(_ROLES)}, got {value['role']!r}")
    return {"role": value["role"], "content": _parse_text(value["content"], f"{name}.content")}


def _parse_text(content: Any, name: str) -> str:
    """Return a content: a text, or a list of parts that are texts."""
    if isinstance(content, str):
        return str(replace_surrogates(content))
    parts = content if isinstance(content, Sequence) else [None]
    values = [_get_part_text(part) if isinstance(part, Mapping) else part for part in parts]
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(values):
        raise _FieldError(f"{name} must be a text, got {content!r:.80}")
    return str(replace_surrogates("".join(texts)))


def _get_part_text(part: Mapping[str, Any]) -> Any:
    return part.get("text") if part.get("type") in _TEXT_PART_TYPES else None


def _parse_tools(value: Any) -> list[ToolSpec]:
    tools = _parse_json_list(value)
    if tools in (None, "", "[]"):
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise _FieldError(f"tools must be a list of functions, got {value!r:.80}")
    specs: list[ToolSpec] = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _FieldError(
                f'tools[{index}] must have the form {{"type": "function", "function": '
                f'{{"name": ..., ...}}}}, got {tool!r:.80}'
            )
        specs.append(_drop_nulls(tool))
    return specs


def _drop_nulls(value: Any) -> Any:
    """Return a JSON value without the nulls by which tables fill up objects of different keys."""
    if isinstance(value, Mapping):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _split_exchanges(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Exchange]:
    """Return the exchanges; messages after the last response are left out."""
    exchanges: list[Exchange] = []
    shown: list[Message] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            shown.append(message)
            continue
        if not shown:
            neighbor = "the message before" if exchanges else "no message before"
            raise _FieldError(
                f"message {index + 1} is of the assistant, with {neighbor} that it answers; merge "
                "assistant messages, and start with a message of the user"
            )
        if not message["content"].strip():
            raise _FieldError(f"message {index + 1}, of the assistant, is empty")
        exchanges.append(Exchange(shown, message["content"], () if exchanges else tools))
        shown = []
    if not exchanges:
        raise _FieldError(
            "the conversation has no message of the assistant, so there is nothing to learn; fix "
            "or remove the row"
        )
    return exchanges
