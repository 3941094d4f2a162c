"""The environment's tools over MCP (JSON-RPC 2.0, `POST /mcp`), for the agent of one episode.

The key of a request selects its episode, so no MCP session is needed. The result of `initialize`
contains no session id, and MCP clients then send none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ludus.env.mcp.server import PROTOCOL_VERSIONS
from ludus.env.types import Tool
from ludus.trainer.core.types import RolloutStatus
from ludus.trainer.rollout.adapters.environment_adapter import EnvironmentAdapter
from ludus.trainer.rollout.adapters.tool_adapter import ToolAdapter, ToolCall
from ludus.trainer.rollout.agents.endpoint.fields import JsonObject, quote

RecordCalls: TypeAlias = Callable[[int, int], None]
"""Takes the number of tool calls and the number of failed ones."""

_INVALID_REQUEST, _METHOD_NOT_FOUND, _INVALID_PARAMS = -32600, -32601, -32602


class EpisodeTools:
    """The tools of an episode's environment, as its agent calls them."""

    def __init__(self, adapter: ToolAdapter, record_calls: RecordCalls | None) -> None:
        self._adapter = adapter
        self._record_calls = record_calls
        self.status: RolloutStatus | None = None
        """Status in which a call ended the episode; None while it continues."""
        self.reward = 0.0
        """Sum of the rewards of all calls."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """All tools."""
        return self._adapter.toolbox.tools

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool and return its result, and True if the call failed."""
        if self.status is not None:
            return "the episode is over", True
        outcome = await self._adapter.call(call)
        self.status = outcome.status
        self.reward += outcome.reward
        if self._record_calls is not None:
            self._record_calls(1, outcome.num_calls_failed)
        return outcome.messages[0]["content"], outcome.num_calls_failed > 0


def make_tools(
    adapter: EnvironmentAdapter, record_calls: RecordCalls | None = None
) -> EpisodeTools | None:
    """Return the tools of an episode; None if its agent has none."""
    return EpisodeTools(adapter, record_calls) if isinstance(adapter, ToolAdapter) else None


async def respond_to_mcp(tools: EpisodeTools, request: Any) -> JsonObject | None:
    """Return the response to a request; None for a notification."""
    if not isinstance(request, dict) or not isinstance(request.get("method"), str):
        return _error(None, _INVALID_REQUEST, f"expected a request, got {quote(request)}")
    if "id" not in request:
        return None
    request_id, params = request["id"], request.get("params") or {}
    if not isinstance(params, dict):
        return _error(request_id, _INVALID_PARAMS, f"expected params by name, got {quote(params)}")
    match request["method"]:
        case "initialize":
            return _result(request_id, _server_info(params))
        case "ping":
            return _result(request_id, {})
        case "tools/list":
            return _result(request_id, {"tools": [_tool_entry(tool) for tool in tools.tools]})
        case "tools/call":
            return await _call(tools, request_id, params)
    return _error(request_id, _METHOD_NOT_FOUND, f"no method {quote(request['method'])}")


async def _call(tools: EpisodeTools, request_id: Any, params: JsonObject) -> JsonObject:
    name, arguments = params.get("name"), params.get("arguments") or {}
    names = [tool.name for tool in tools.tools]
    if not isinstance(arguments, dict) or name not in names:
        return _error(
            request_id,
            _INVALID_PARAMS,
            f"expected one of {names} with arguments, got {quote(name)} with {quote(arguments)}",
        )
    text, has_failed = await tools.call(ToolCall(str(name), arguments))
    return _result(request_id, {"content": [{"type": "text", "text": text}], "isError": has_failed})


def _server_info(params: JsonObject) -> JsonObject:
    version = params.get("protocolVersion")
    return {
        "protocolVersion": version if version in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[-1],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "ludus", "version": "1"},
    }


def _tool_entry(tool: Tool) -> JsonObject:
    schema = tool.input_schema or {"type": "object", "properties": {}}
    return {"name": tool.name, "description": tool.description, "inputSchema": schema}


def _result(request_id: Any, result: JsonObject) -> JsonObject:
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


def _error(request_id: Any, code: int, message: str) -> JsonObject:
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}}
