"""Echoes with OpenEnv's clients of 0.2 to 0.10; runs in the virtual environment of the client.

Argument: address. Prints the responses as JSON; with "tools" if the client supports tools.
"""

import json
import sys

from openenv.core import GenericEnvClient

try:
    from openenv.core.mcp_client import MCPToolClient
except ImportError:  # before 0.3
    MCPToolClient = None


def synchronous(client):
    return (
        client.sync() if hasattr(client, "sync") else client
    )  # the client of 0.2.1 is synchronous


def echo(address: str) -> dict:
    with synchronous(GenericEnvClient(base_url=address)) as client:
        ready = client.reset()
        echoed = client.step({"message": "Hello, World!"})
    return {
        "ready": ready.observation["echoed_message"],
        "echoed": echoed.observation["echoed_message"],
        "length": echoed.observation["message_length"],
        "reward": echoed.reward,
        "done": echoed.done,
    }


def call_tools(address: str) -> dict:
    with synchronous(MCPToolClient(base_url=address)) as client:
        client.reset()
        return {
            "names": sorted(tool.name for tool in client.list_tools()),
            "echo_message": client.call_tool("echo_message", message="hi"),
            "echo_with_length": client.call_tool("echo_with_length", message="hi"),
        }


def main(address: str) -> None:
    seen = echo(address)
    if MCPToolClient is not None:
        seen["tools"] = call_tools(address)
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
