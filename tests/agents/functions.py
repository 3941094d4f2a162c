"""Agent functions for tests, some of which fail."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI, PermissionDeniedError

from ludus.trainer.rollout.agents.endpoint.server import EndpointAccess
from ludus.trainer.rollout.agents.launchers import AgentTask


def make_client(access: EndpointAccess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)


async def complete(access: EndpointAccess, text: str) -> str:
    """Return the policy's completion for a text."""
    response = await make_client(access).chat.completions.create(
        model=access.model, messages=[{"role": "user", "content": text}]
    )
    return response.choices[0].message.content or ""


async def return_completion(task: AgentTask, access: EndpointAccess) -> dict[str, Any]:
    """Return the completion as the answer, with two additional fields."""
    return {"answer": await complete(access, task.text), "kind": "passes on", "seed": task.seed}


class _AgentObject:
    async def __call__(self, task: AgentTask, access: EndpointAccess) -> dict[str, Any]:
        """Return the result of `return_completion`."""
        return await return_completion(task, access)


agent_object = _AgentObject()


def complete_in_thread(task: AgentTask, access: EndpointAccess) -> str:
    """Return a completion from a synchronous function, as a line of JSON after other text."""
    client = OpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)
    response = client.chat.completions.create(
        model=access.model, messages=[{"role": "user", "content": task.text}]
    )
    return f'I am done.\n{{"answer": "{response.choices[0].message.content}", "reward": 0.25}}\n'


async def send_no_request(task: AgentTask, access: EndpointAccess) -> None:
    """Return without a request."""


def exit_process(task: AgentTask, access: EndpointAccess) -> None:
    """Raise SystemExit."""
    raise SystemExit(3)


async def raise_key_error(task: AgentTask, access: EndpointAccess) -> None:
    """Raise KeyError after a request."""
    await complete(access, task.text)
    raise KeyError("missing")


async def hang(task: AgentTask, access: EndpointAccess) -> None:
    """Wait forever after a request."""
    await complete(access, task.text)
    await asyncio.Event().wait()


async def return_plain_text(task: AgentTask, access: EndpointAccess) -> str:
    """Return the completion as text that is not JSON."""
    return await complete(access, task.text)


async def exceed_turn_limit(task: AgentTask, access: EndpointAccess) -> None:
    """Send requests until the endpoint refuses one and the client raises an error."""
    while True:
        await complete(access, task.text)


async def send_parallel_requests(task: AgentTask, access: EndpointAccess) -> dict[str, str]:
    """Send three requests at the same time."""
    requests = (complete(access, text) for text in (task.text, "and you?", "and you?"))
    completions = await asyncio.gather(*requests, return_exceptions=True)
    assert not any(isinstance(completion, PermissionDeniedError) for completion in completions)
    return {"answer": str(completions[0])}


async def call_tools(task: AgentTask, access: EndpointAccess) -> dict[str, str]:
    """Call a tool of the environment, once with invalid arguments."""
    await complete(access, task.text)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {access.api_key}"}) as http:
        for arguments in ({"a": 2, "b": 3}, {"a": "x"}):
            params = {"name": "add", "arguments": arguments}
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            result = (await http.post(str(access.mcp_url), json=body)).json()["result"]
    return {"answer": "5", "failed": str(result["isError"])}
