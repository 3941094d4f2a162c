"""A counting environment with tools."""

from typing import Any

from ludus.env.types import Tool
from ludus.proto.errors import InvalidCallError, ToolError
from tests.env.counting_env import CountingEnv


class ToolEnv(CountingEnv):
    """An environment with a tool that stores notes, and two tools that raise errors."""

    name = "tools"

    def __init__(self) -> None:
        super().__init__()
        self._notes: list[str] = []

    @property
    def tools(self) -> list[Tool]:
        schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        return [Tool(name, f"Does {name}.", schema) for name in ("note", "fail", "wrong")]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if all(tool.name != name for tool in self.tools):
            return super().call_tool(name, arguments)
        if name == "fail":
            raise ToolError("the tool is broken")
        if name == "wrong":
            raise InvalidCallError("expected text, got none")
        self._notes.append(arguments.get("text", ""))
        return {"notes": list(self._notes)}
