"""A typical agent: OpenAI's client in a loop, with tools over MCP and no code for training.

python examples/agents/tool_loop.py      reads OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL,
                                         LUDUS_TASK and LUDUS_MCP_URL, and prints its answer
examples.agents.tool_loop:play           the same as a function, for agent.function
"""

from __future__ import annotations

import asyncio
import json
import os
from functools import cache
from typing import Any

import httpx
from openai import AsyncOpenAI

MAX_CALLS = 8


async def solve(question: str, client: AsyncOpenAI, model: str, mcp: Mcp) -> str:
    """Return the model's first response without a tool call."""
    tools = [
        {"type": "function", "function": {**tool, "parameters": tool.pop("inputSchema")}}
        for tool in (await mcp.request("tools/list"))["tools"]
    ]
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        completion = await client.chat.completions.create(
            model=model,
            messages=messages,
            tools=tools,  # type: ignore[arg-type]
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = await mcp.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


class Mcp:
    """A minimal MCP client, which lists and calls tools."""

    def __init__(self, http: httpx.AsyncClient, url: str, key: str) -> None:
        self._http = http
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"}

    async def request(self, method: str, **params: Any) -> Any:
        """Send a request and return its result; an error becomes the text of the result."""
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        response = (await self._http.post(self._url, json=message, headers=self._headers)).json()
        return response.get("result") or {"content": [{"text": json.dumps(response)}]}

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its text."""
        return str(
            (await self.request("tools/call", name=name, arguments=arguments))["content"][0]["text"]
        )


async def play(task: Any, access: Any) -> dict[str, str]:
    """Return the answer to a task, for `agent.function`; tasks share their connections."""
    client, http = _get_clients()
    client = client.with_options(base_url=access.base_url, api_key=access.api_key)
    mcp = Mcp(http, access.mcp_url, access.api_key)
    return {"answer": await solve(task.text, client, access.model, mcp)}


@cache
def _get_clients() -> tuple[AsyncOpenAI, httpx.AsyncClient]:
    return AsyncOpenAI(api_key="set for each task"), httpx.AsyncClient(verify=False, timeout=60)


async def main() -> None:
    """Print the answer to the task in LUDUS_TASK."""
    async with httpx.AsyncClient(timeout=60) as http:
        mcp = Mcp(http, os.environ["LUDUS_MCP_URL"], os.environ["OPENAI_API_KEY"])
        task = json.loads(os.environ["LUDUS_TASK"])
        answer = await solve(task["text"], AsyncOpenAI(), os.environ["OPENAI_MODEL"], mcp)
    print(json.dumps({"answer": answer}))


if __name__ == "__main__":
    asyncio.run(main())
