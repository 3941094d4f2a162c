"""Serves an agent's `solve` to many episodes at once, in one process, for agent.url.

python examples/agents/service.py langgraph_agent --port 9000

An import of a framework takes seconds: a program for each episode pays them each time, this once.
The agents stand beside this file, and it needs nothing but Python.
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
    """POST /solve; an agent in a thread of its own, or all of them on one event loop."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, solve: Any) -> None:
        super().__init__(("127.0.0.1", port), _Call)
        self._solve = solve
        # One for all: clients that an agent keeps belong to the loop that they were made on.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def answer(self, asked: dict[str, Any]) -> str:
        """What the agent answers to the task."""
        given = (asked["task"]["text"], asked["base_url"], asked["api_key"], asked["model"])
        solving = self._solve(*given, asked["mcp_url"])
        if inspect.isawaitable(solving):
            return str(asyncio.run_coroutine_threadsafe(_result(solving), self._loop).result())
        return str(solving)


async def _result(solving: Any) -> Any:
    return await solving


class _Call(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            status, said = 200, {"answer": self.server.answer(json.loads(body))}
        except Exception as error:  # noqa: BLE001 - its episode is void, the next plays
            traceback.print_exc()
            status, said = 500, {"error": f"{type(error).__name__}: {error}"}
        content = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """A request is no line: there are many."""


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("agent", help="the module: langgraph_agent or smolagents_agent")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one")
    chosen = parser.parse_args()
    service = Service(chosen.port, importlib.import_module(chosen.agent).solve)
    print(f"http://127.0.0.1:{service.server_address[1]}/solve", flush=True)
    service.serve_forever()


if __name__ == "__main__":
    main()
