"""Program that plays one game with the standard MCP client, in its virtual environment.

Arguments: address of the MCP endpoint, seed. Prints the tools and results as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path

from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

sys.path.insert(0, str(Path(__file__).parent))
from policy import choose_action, remove_metadata


def read_content(result) -> dict:
    assert not result.is_error, result
    return result.structured_content


async def play(session: ClientSession, seed: int) -> list:
    result = read_content(await session.call_tool("start_episode", {"seed": seed}))
    outcomes = [[remove_metadata(result["observation"]), result["reward"], result["done"]]]
    while not result["done"]:
        action = {"action_id": choose_action(result["observation"])}
        result = read_content(await session.call_tool("take_action", action))
        outcomes.append([remove_metadata(result["observation"]), result["reward"], result["done"]])
    return outcomes


async def main(address: str, seed: int) -> None:
    async with (
        streamable_http_client(address) as (read_stream, write_stream, *_),
        ClientSession(read_stream, write_stream) as session,
    ):
        server_info = await session.initialize()
        tools = [tool.name for tool in (await session.list_tools()).tools]
        await session.send_ping()
        results = await play(session, seed)
        server_name = server_info.server_info.name
    sys.stdout.write(json.dumps({"server": server_name, "tools": tools, "results": results}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
