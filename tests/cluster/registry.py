"""An image registry for tests, which accepts pushes but stores only manifests.

The nodes do not pull from this registry. LUDUS_IMAGE_LOADER copies images to the nodes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class _Handler(BaseHTTPRequestHandler):
    """A request handler for pushes and digest queries of the distribution protocol."""

    protocol_version = "HTTP/1.1"
    server: _Registry

    def do_GET(self) -> None:
        """Respond with 200 if the registry, blob or manifest exists."""
        if self.path == "/v2/":
            self._respond(200)
        elif "/manifests/" in self.path and self.path in self.server.manifests:
            content_type, body = self.server.manifests[self.path]
            self._respond(
                200,
                {"Content-Type": content_type, "Docker-Content-Digest": _compute_digest(body)},
                body,
            )
        else:
            self._respond(200 if self.path.rpartition("/")[2] in self.server.blobs else 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Start an upload."""
        self._read_body()
        self._respond(202, {"Location": f"{self.path.rstrip('/')}/upload", "Range": "0-0"})

    def do_PATCH(self) -> None:
        """Receive and discard a chunk of an upload."""
        size = len(self._read_body())
        self._respond(202, {"Location": self.path, "Range": f"0-{size}"})

    def do_PUT(self) -> None:
        """Finish an upload, or store a manifest."""
        body, url = self._read_body(), urlsplit(self.path)
        if "/manifests/" in url.path:
            digest = _compute_digest(body)
            self.server.manifests[url.path] = (self.headers["Content-Type"], body)
        else:
            (digest,) = parse_qs(url.query)["digest"]
            self.server.blobs.add(digest)
        self._respond(201, {"Location": url.path, "Docker-Content-Digest": digest})

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the log entry."""

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _respond(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Registry(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.blobs: set[str] = set()
        self.manifests: dict[str, tuple[str, bytes]] = {}


@contextmanager
def run_registry() -> Iterator[str]:
    """Start a registry; yield its address, which is the prefix of its image names."""
    server = _Registry()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"localhost:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _compute_digest(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"
