"""A server for agent.url that runs an agent's `solve` for many episodes in one process.

python examples/agents/service.py langgraph_agent --port 9000

Importing a framework takes seconds. This process imports it once instead of once per episode. The
agents are modules in the same folder. The server itself needs only the standard library.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service(ThreadingHTTPServer):
    """An HTTP server for POST /solve, which runs each agent in a thread or on one event loop."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, solve: Any) -> None:
        super().__init__(("127.0.0.1", port), _SolveRequest)
        self._solve = solve
        # One loop for all episodes, because the clients that an agent keeps belong to their loop.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def solve(self, request: dict[str, Any]) -> str:
        """Run the agent on a task and return its answer."""
        endpoint = (request["base_url"], request["api_key"], request["model"], request["mcp_url"])
        result = self._solve(request["task"]["text"], *endpoint)
        if inspect.isawaitable(result):
            return str(asyncio.run_coroutine_threadsafe(_await_result(result), self._loop).result())
        return str(result)


async def _await_result(result: Any) -> Any:
    return await result


class _SolveRequest(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            status, response = 200, {"answer": self.server.solve(json.loads(body))}
        except Exception as error:  # noqa: BLE001 - only this episode is void
            traceback.print_exc()
            status, response = 500, {"error": f"{type(error).__name__}: {error}"}
        content = json.dumps(response).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests, because there are many."""


def main() -> None:
    """Serve until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("agent", help="module of the agent: langgraph_agent or smolagents_agent")
    parser.add_argument("--port", type=int, required=True, help="port; 0 selects a free port")
    options = parser.parse_args()
    service = Service(options.port, importlib.import_module(options.agent).solve)
    print(f"http://127.0.0.1:{service.server_address[1]}/solve", flush=True)
    service.serve_forever()


if __name__ == "__main__":
    main()
