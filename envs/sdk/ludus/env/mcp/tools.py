"""Tools for MCP and for OpenEnv's tool actions: the environment's tools and the play tools.

Each key is sent in two spellings (`inputSchema` and `input_schema`, ...), because MCP and the
versions of OpenEnv's clients use different ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from ludus.env.encoding import (
    MAX_SEED,
    SUCCESS_KEY,
    EncodedResult,
    EncodedToolResult,
    ResetArgs,
    encode_json,
)
from ludus.env.incoming.faults import shorten
from ludus.env.messages.openenv import make_ludus_payload
from ludus.env.sessions.interface import Sessions
from ludus.env.types import EnvironmentDescription, JsonObject, Tool
from ludus.proto.errors import CallTimeoutError, EnvError, InfrastructureError, InvalidCallError

START_EPISODE = "start_episode"
TAKE_ACTION = "take_action"
GET_STATE = "get_state"
_NO_EFFECT = EncodedToolResult(b"")
"""Result that adds no reward and does not end the episode."""
_WRAPPED_PREFIX = b'{"result":'
_TOOL_ACTION_KEYS = {
    "list_tools": frozenset({"type", "metadata"}),
    "call_tool": frozenset({"type", "metadata", "tool_name", "arguments"}),
}


def make_play_tools(description: EnvironmentDescription) -> list[Tool]:
    """Return the play tools, except those with the name of an environment's tool."""
    seed = {"type": "integer", "minimum": 0, "description": "Seed of all randomness."}
    tools = [
        Tool(
            START_EPISODE,
            "Starts a new episode and returns its first observation.",
            {"type": "object", "properties": {"seed": seed}, "additionalProperties": False},
        ),
        Tool(
            TAKE_ACTION,
            f"Takes an action in {description.name} and returns the next observation.",
            {"type": "object", **description.action_schema},
        ),
        Tool(
            GET_STATE,
            "Returns the state of the episode.",
            {"type": "object", "properties": {}, "additionalProperties": False},
        ),
    ]
    tool_names = {tool.name for tool in description.tools}
    return [tool for tool in tools if tool.name not in tool_names]


def format_tools(tools: Iterable[Tool]) -> list[JsonObject]:
    """Return the tools in MCP's format."""
    return [
        {
            "name": tool.name,
            "description": tool.description,
            "inputSchema": tool.input_schema,
            "input_schema": tool.input_schema,
        }
        for tool in tools
    ]


async def call_tool(
    sessions: Sessions, session_id: str, name: str, arguments: JsonObject, *, is_play_tool: bool
) -> JsonObject:
    """Call a play tool or a tool of the environment. If the tool fails, return its error as result.

    Raises:
        InfrastructureError: the session has ended or cannot be reached.
    """
    try:
        if not is_play_tool:
            encode_json(arguments, "arguments")
            tool_result = await sessions.call_tool(session_id, name, arguments)
            return _make_tool_result(tool_result.content_json, []) | _make_meta(tool_result)
        if name == GET_STATE:
            return _make_tool_result(await sessions.state(session_id), [])
        if name == START_EPISODE:
            result = await sessions.reset(session_id, _read_start_args(arguments))
        else:
            result = await sessions.step(session_id, encode_json(arguments, "an action"))
    except InfrastructureError:
        raise
    except EnvError as error:
        return {
            "content": [{"type": "text", "text": f"{error.message} (code: {error.code})"}],
            "isError": True,
            "is_error": True,
        }
    return _make_tool_result(_encode_result(result), _read_text_messages(result))


def is_tool_action(action: JsonObject) -> bool:
    """Return True if an action has the keys of OpenEnv's actions for tools."""
    action_type = action.get("type")
    tool_keys = _TOOL_ACTION_KEYS.get(action_type) if isinstance(action_type, str) else None
    return tool_keys is not None and action.keys() <= tool_keys


async def step_with_tools(sessions: Sessions, session_id: str, action: JsonObject) -> bytes:
    """Take a step with OpenEnv's action for tools, and return the payload as JSON.

    Raises:
        SessionLostError: the session has ended.
    """
    tools = sessions.description.tools
    if action["type"] == "list_tools":
        return _encode_payload({"tools": format_tools(tools)})
    name, arguments = action.get("tool_name"), action.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise InvalidCallError(
            "tool_name must be a string and arguments an object in a call_tool action"
        )
    if all(tool.name != name for tool in tools):
        return _encode_payload(
            _make_failed_call(name, "tool_not_found", f"Unknown tool: {shorten(name)!r}")
        )
    try:
        encode_json(arguments, "arguments")
        tool_result = await sessions.call_tool(session_id, name, arguments)
    except CallTimeoutError as error:
        return _encode_payload(_make_failed_call(name, "timeout", error.message))
    except InfrastructureError:
        raise
    except InvalidCallError as error:
        return _encode_payload(_make_failed_call(name, "invalid_args", error.message))
    except EnvError as error:
        return _encode_payload(_make_failed_call(name, "execution_error", error.message))
    result = _make_tool_result(tool_result.content_json, [])
    return _encode_payload({"tool_name": name, "result": result, "error": None}, tool_result)


def _make_failed_call(name: str, error_type: str, message: str) -> JsonObject:
    error = {"error_type": error_type, "message": message}
    return {"tool_name": name, "result": None, "error": error}


def _encode_payload(observation: JsonObject, result: EncodedToolResult = _NO_EFFECT) -> bytes:
    payload = {"observation": observation, "reward": result.reward, "done": result.done}
    if result.done:
        payload |= {"terminated": result.terminated, "truncated": result.truncated}
    if result.success is not None:
        payload["metadata"] = {SUCCESS_KEY: result.success}
    return orjson.dumps(payload)


def _make_meta(result: EncodedToolResult) -> JsonObject:
    """Return MCP's field for what is not content: the reward, and the end of the episode."""
    if result.reward is None and not result.done:
        return {}
    meta = {"reward": result.reward, "done": result.done, "success": result.success}
    return {"_meta": {f"ludus/{key}": value for key, value in meta.items()}}


def _read_start_args(arguments: JsonObject) -> ResetArgs:
    seed = arguments.get("seed")
    is_valid_seed = seed is None or (type(seed) is int and 0 <= seed <= MAX_SEED)
    if not is_valid_seed or arguments.keys() - {"seed"}:
        raise InvalidCallError(
            f"the only argument can be a seed from 0 to {MAX_SEED}, got"
            f" {shorten(str(sorted(arguments)))}"
        )
    return ResetArgs(seed)


def _encode_result(result: EncodedResult) -> bytes:
    payload = make_ludus_payload(result)
    payload.pop("tensors", None)  # a language model cannot use arrays
    return orjson.dumps(payload)


def _read_text_messages(result: EncodedResult) -> list[str]:
    if result.text is None:
        return []
    messages = orjson.loads(result.text.messages_json)
    return [str(message.get("content", "")) for message in messages]


def _make_tool_result(result_json: bytes, messages: list[str]) -> JsonObject:
    """Return a tool's result with each key in both spellings, and the player's messages first.

    FastMCP, the library of OpenEnv's tools, wraps a value that is not an object in an object with
    the only key `result`. Its clients expect the unwrapped value as `data`.
    """
    structured_content: Any = orjson.Fragment(result_json)
    unwrapped = orjson.loads(result_json) if result_json.startswith(_WRAPPED_PREFIX) else {}
    data = unwrapped["result"] if unwrapped.keys() == {"result"} else structured_content
    data_text = data if isinstance(data, str) else result_json.decode()
    content = [{"type": "text", "text": content_text} for content_text in [*messages, data_text]]
    return {
        "content": content,
        "structuredContent": structured_content,
        "structured_content": structured_content,
        "data": data,
        "isError": False,
        "is_error": False,
    }
