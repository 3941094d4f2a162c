"""Program that calls the echo environment with an OpenEnv client of 0.2 to 0.10.

It runs in the client's virtual environment. Argument: address. It prints the responses as JSON,
including "tools" if the client supports tools.
"""

import json
import sys

from openenv.core import GenericEnvClient

try:
    from openenv.core.mcp_client import MCPToolClient
except ImportError:  # before 0.3
    MCPToolClient = None


def make_synchronous(client):
    # The client of 0.2.1 is already synchronous.
    return client.sync() if hasattr(client, "sync") else client


def send_hello(address: str) -> dict:
    with make_synchronous(GenericEnvClient(base_url=address)) as client:
        reset_result = client.reset()
        step_result = client.step({"message": "Hello, World!"})
    return {
        "ready": reset_result.observation["echoed_message"],
        "echoed": step_result.observation["echoed_message"],
        "length": step_result.observation["message_length"],
        "reward": step_result.reward,
        "done": step_result.done,
    }


def call_tools(address: str) -> dict:
    with make_synchronous(MCPToolClient(base_url=address)) as client:
        client.reset()
        return {
            "names": sorted(tool.name for tool in client.list_tools()),
            "echo_message": client.call_tool("echo_message", message="hi"),
            "echo_with_length": client.call_tool("echo_with_length", message="hi"),
        }


def main(address: str) -> None:
    output = send_hello(address)
    if MCPToolClient is not None:
        output["tools"] = call_tools(address)
    sys.stdout.write(json.dumps(output))


if __name__ == "__main__":
    main(sys.argv[1])
