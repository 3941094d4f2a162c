"""A LangGraph agent with tools over MCP and without any code for training.

python examples/agents/langgraph_agent.py    reads OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL,
                                             LUDUS_TASK and LUDUS_MCP_URL, and prints its answer
examples/agents/service.py                   calls `solve` for many episodes in one process
"""

from __future__ import annotations

import asyncio
import json
import os

from langchain.agents import create_agent
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError

MAX_STEPS = 9
"""Maximum steps of the graph: five calls of the model and the tool calls between them."""


async def solve(question: str, base_url: str, api_key: str, model: str, mcp_url: str) -> str:
    """Return the model's final answer, or an empty string if it never stops calling tools."""
    server = {
        "transport": "streamable_http",
        "url": mcp_url,
        "headers": {"authorization": f"Bearer {api_key}"},
    }
    tools = await MultiServerMCPClient({"game": server}).get_tools()
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key)
    agent = create_agent(chat, tools)
    try:
        result = await agent.ainvoke(
            {"messages": [{"role": "user", "content": question}]}, {"recursion_limit": MAX_STEPS}
        )
    except GraphRecursionError:
        return ""
    return str(result["messages"][-1].content)


def main() -> None:
    """Print the answer to the task in LUDUS_TASK."""
    answer = asyncio.run(
        solve(
            json.loads(os.environ["LUDUS_TASK"])["text"],
            os.environ["OPENAI_BASE_URL"],
            os.environ["OPENAI_API_KEY"],
            os.environ["OPENAI_MODEL"],
            os.environ["LUDUS_MCP_URL"],
        )
    )
    print(json.dumps({"answer": answer}))


if __name__ == "__main__":
    main()
