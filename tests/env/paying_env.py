"""A counting environment with a tool that pays and ends the episode."""

from typing import Any

from ludus.env.types import Tool, ToolResult
from tests.env.counting_env import CountingEnv


class PayingEnv(CountingEnv):
    """An environment whose tools reveal a word, pay for it, and end the episode with a guess."""

    name = "paying"

    @property
    def tools(self) -> list[Tool]:
        word = {"type": "object", "properties": {"word": {"type": "string"}}}
        return [
            Tool("look", "Returns the word.", {"type": "object"}),
            Tool("tip", "Pays a half.", {"type": "object"}),
            Tool("submit", "Ends the episode with a guess of the word.", word),
            Tool("give_up", "Ends the episode by a limit.", {"type": "object"}),
        ]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any] | ToolResult:
        match name:
            case "look":
                return {"word": "moon"}
            case "tip":
                return ToolResult({"paid": True}, reward=0.5)
            case "submit":
                is_right = arguments.get("word") == "moon"
                content = {"right": is_right}
                return ToolResult(content, float(is_right), terminated=True, success=is_right)
            case "give_up":
                return ToolResult({}, truncated=True)
        return super().call_tool(name, arguments)
