"""A small OpenAI-compatible server with scripted completions."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "served"
TOKEN = "endpoint-secret"
MAX_PROMPT_CHARS = 100
"""Number of characters beyond which a prompt exceeds the context."""


@dataclass
class OpenAiServer:
    """The address of the server, and the requests that it has received."""

    url: str = ""
    wants_token: bool = False
    calls_tools: bool = False
    """Call the tool `add` before the first response of each conversation."""
    num_failures: int = 0
    """Number of next requests to refuse with status 503."""
    requests: list[dict[str, Any]] = field(default_factory=list)

    def respond(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of a response."""
        if self.num_failures:
            self.num_failures -= 1
            return 503, {"error": {"message": "overloaded"}}
        self.requests.append(request)
        messages = request["messages"]
        if sum(len(message["content"] or "") for message in messages) > MAX_PROMPT_CHARS:
            message = "This model's maximum context length is 50 tokens."
            return 400, {"error": {"message": message, "code": "context_length_exceeded"}}
        if "tools" in request and self.calls_tools and messages[-1]["role"] == "user":
            function = {"name": "add", "arguments": json.dumps({"a": 1, "b": 2})}
            call = {"id": "call-1", "type": "function", "function": function}
            return 200, make_body({"role": "assistant", "content": None, "tool_calls": [call]})
        answer = str(sum(int(word) for word in messages[0]["content"].split() if word.isdigit()))
        return 200, make_body({"role": "assistant", "content": answer})


def make_body(message: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


@contextmanager
def serve_openai() -> Iterator[OpenAiServer]:
    """Yield a running server on a free loopback port."""
    state = OpenAiServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = {"data": [{"id": MODEL, "object": "model"}]}
            self._send(*((200, models) if self._is_allowed() else (401, {})))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._send(*(state.respond(body) if self._is_allowed() else (401, {})))

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

        def _is_allowed(self) -> bool:
            return not state.wants_token or self.headers["authorization"] == f"Bearer {TOKEN}"

        def _send(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
