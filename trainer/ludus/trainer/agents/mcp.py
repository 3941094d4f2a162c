"""The environment's tools over MCP (JSON-RPC 2.0, `POST /mcp`), for the agent of one episode.

A request acts on the episode that its key belongs to, so a session of MCP's own is not needed: what
`initialize` returns holds no session id, and clients of MCP's send none.
"""

from __future__ import annotations

from typing import Any, Protocol

from ludus.env.mcp.server import PROTOCOL_VERSIONS
from ludus.env.types import Tool
from ludus.trainer.agents.fields import JsonObject, shown
from ludus.trainer.rollout.tool_calls import ToolCall

_INVALID_REQUEST, _METHOD_NOT_FOUND, _INVALID_PARAMS = -32600, -32601, -32602


class EpisodeTools(Protocol):
    """The tools of an episode's environment."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """All of them."""

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """What the tool returned, and whether it failed."""


async def answer_mcp(tools: EpisodeTools, request: Any) -> JsonObject | None:
    """The response; None where none is due."""
    if not isinstance(request, dict) or not isinstance(request.get("method"), str):
        return _error(None, _INVALID_REQUEST, f"expected a request, got {shown(request)}")
    if "id" not in request:
        return None
    number, params = request["id"], request.get("params") or {}
    if not isinstance(params, dict):
        return _error(number, _INVALID_PARAMS, f"expected params by name, got {shown(params)}")
    match request["method"]:
        case "initialize":
            return _result(number, _initialized(params))
        case "ping":
            return _result(number, {})
        case "tools/list":
            return _result(number, {"tools": [_listed(tool) for tool in tools.tools]})
        case "tools/call":
            return await _call(tools, number, params)
    return _error(number, _METHOD_NOT_FOUND, f"no method {shown(request['method'])}")


async def _call(tools: EpisodeTools, number: Any, params: JsonObject) -> JsonObject:
    name, arguments = params.get("name"), params.get("arguments") or {}
    if not isinstance(arguments, dict) or all(tool.name != name for tool in tools.tools):
        known = [tool.name for tool in tools.tools]
        return _error(
            number,
            _INVALID_PARAMS,
            f"expected one of {known} with arguments, got {shown(name)} with {shown(arguments)}",
        )
    text, failed = await tools.call(ToolCall(str(name), arguments))
    return _result(number, {"content": [{"type": "text", "text": text}], "isError": failed})


def _initialized(params: JsonObject) -> JsonObject:
    asked = params.get("protocolVersion")
    return {
        "protocolVersion": asked if asked in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[-1],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "ludus", "version": "1"},
    }


def _listed(tool: Tool) -> JsonObject:
    schema = tool.input_schema or {"type": "object", "properties": {}}
    return {"name": tool.name, "description": tool.description, "inputSchema": schema}


def _result(number: Any, result: JsonObject) -> JsonObject:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _error(number: Any, code: int, message: str) -> JsonObject:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}
