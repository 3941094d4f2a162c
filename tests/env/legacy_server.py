"""A counting server with the HTTP interface of OpenEnv 0.1.

Like the real server, it has one environment for all clients, ignores unknown keys in bodies,
responds to every error with a bare 500, and has neither /schema nor /metadata.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Counter:
    """The server's only environment, and the requests that the server received."""

    total: int = 0
    step_count: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    may_step: threading.Event = field(default_factory=threading.Event)
    """Event that a step with the action 98 waits for before it returns."""

    def reset(self) -> dict[str, Any]:
        self.total = self.step_count = 0
        return {"observation": {"total": 0}, "reward": None, "done": False}

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if action["add"] == 98:
            self.may_step.wait(60)
        self.total += action["add"]
        self.step_count += 1
        done = action["add"] == 7
        return {"observation": {"total": self.total}, "reward": float(action["add"]), "done": done}


@contextmanager
def legacy_server() -> Iterator[tuple[str, Counter]]:
    """Run the server in a thread, and yield its address and environment."""
    counter = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths = {"/reset": {}, "/step": {}, "/state": {}, "/health": {}}
            responses = {
                "/openapi.json": {"info": {"version": "1.0.0"}, "paths": paths},
                "/health": {"status": "healthy"},
                "/state": {
                    "episode_id": "E",
                    "step_count": counter.step_count,
                    "total": counter.total,
                },
            }
            if self.path in responses:
                self._send(200, json.dumps(responses[self.path]))
            else:
                self._send(404, '{"detail": "Not Found"}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            counter.bodies.append(body)
            counter.headers.append({name.lower(): value for name, value in self.headers.items()})
            with counter.lock:
                try:
                    if self.path == "/reset":
                        response = counter.reset()
                    else:
                        response = counter.step(body.get("action", body))
                except (KeyError, TypeError):
                    self._send(500, "Internal Server Error")
                    return
            self._send(200, json.dumps(response))

        def _send(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", counter
    finally:
        server.shutdown()
        server.server_close()
