"""Agents that are functions, and what goes wrong in some."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI, PermissionDeniedError

from ludus.trainer.rollout.agents.endpoint.server import EndpointAccess
from ludus.trainer.rollout.agents.task import AgentTask


def client_of(access: EndpointAccess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)


async def said(access: EndpointAccess, text: str) -> str:
    """What the policy says to a text."""
    answer = await client_of(access).chat.completions.create(
        model=access.model, messages=[{"role": "user", "content": text}]
    )
    return answer.choices[0].message.content or ""


async def passes_on(task: AgentTask, access: EndpointAccess) -> dict[str, Any]:
    """Answers with what the policy says, and adds a field."""
    return {"answer": await said(access, task.text), "kind": "passes on", "seed": task.seed}


class _PassesOn:
    async def __call__(self, task: AgentTask, access: EndpointAccess) -> dict[str, Any]:
        """The same as a method of an object, which nothing tells from a plain function."""
        return await passes_on(task, access)


an_object = _PassesOn()


def waits_in_a_thread(task: AgentTask, access: EndpointAccess) -> str:
    """The same without an event loop; its answer is a line of JSON after other words."""
    client = OpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)
    answer = client.chat.completions.create(
        model=access.model, messages=[{"role": "user", "content": task.text}]
    )
    return f'I am done.\n{{"answer": "{answer.choices[0].message.content}", "reward": 0.25}}\n'


async def never_asks(task: AgentTask, access: EndpointAccess) -> None:
    """Answers without the policy."""


def exits(task: AgentTask, access: EndpointAccess) -> None:
    """Ends the program, as it believes."""
    raise SystemExit(3)


async def raises(task: AgentTask, access: EndpointAccess) -> None:
    """Fails after it has asked."""
    await said(access, task.text)
    raise KeyError("no such thing")


async def hangs(task: AgentTask, access: EndpointAccess) -> None:
    """Never ends."""
    await said(access, task.text)
    await asyncio.Event().wait()


async def says_garbage(task: AgentTask, access: EndpointAccess) -> str:
    """Returns what cannot be read."""
    return await said(access, task.text)


async def never_stops_asking(task: AgentTask, access: EndpointAccess) -> None:
    """Asks until it is refused, and fails with that."""
    while True:
        await said(access, task.text)


async def asks_aside(task: AgentTask, access: EndpointAccess) -> dict[str, str]:
    """Asks three times at once, and takes a refusal as it comes."""
    asked = (said(access, text) for text in (task.text, "and you?", "and you?"))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert not any(isinstance(one, PermissionDeniedError) for one in answers)
    return {"answer": str(answers[0])}


async def calls_tools(task: AgentTask, access: EndpointAccess) -> dict[str, str]:
    """Calls the environment's tools, a wrong one among them."""
    await said(access, task.text)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {access.api_key}"}) as http:
        for arguments in ({"a": 2, "b": 3}, {"a": "x"}):
            params = {"name": "add", "arguments": arguments}
            asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            answer = (await http.post(str(access.mcp_url), json=asked)).json()["result"]
    return {"answer": "5", "failed": str(answer["isError"])}
