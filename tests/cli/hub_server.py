"""A server that plays the Hugging Face Hub: repositories, large files and commits."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

OWNER = "me"
TOKENS = {"hf_write": "write", "hf_read": "read"}
"""Role of each token; other tokens are refused."""


@dataclass
class Repository:
    is_private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Hub:
    """The content of the Hub."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256."""
    paths: list[str] = field(default_factory=list)
    """Paths of the requests, in order."""
    refuses_commits: bool = False


class _Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def run_hub() -> Iterator[Hub]:
    """Yield a Hub that listens on a local port."""
    hub = Hub()

    class Handler(_Handler):
        content = hub

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    content: Hub

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def do_PUT(self) -> None:
        self._respond()

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def _respond(self) -> None:
        path = self.path.partition("?")[0]
        self.content.paths.append(path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, message = 200, ""
        try:
            document = self._answer(path, body)
        except _Refusal as refusal:
            status, message, document = refusal.status, str(refusal), {"error": str(refusal)}
        reply = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        if message:
            self.send_header("X-Error-Message", message)
        self.end_headers()
        self.wfile.write(reply)

    def _answer(self, path: str, body: bytes) -> Any:
        hub = self.content
        if path.startswith("/objects/"):
            digest = hashlib.sha256(body).hexdigest()
            assert path.endswith(digest), "the content of a large file is wrong"
            hub.objects[digest] = body
            return {}
        role = TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if role is None:
            raise _Refusal(401, "Invalid credentials")
        match path.strip("/").split("/"):
            case ["api", "whoami-v2"]:
                return {"type": "user", "name": OWNER, "auth": {"accessToken": {"role": role}}}
            case ["api", "validate-yaml"]:
                return {"errors": [], "warnings": []}
            case ["api", "repos", "create"]:
                return self._create(**json.loads(body))
            case ["api", "models", owner, name, *rest]:
                return self._answer_repository(f"{owner}/{name}", rest, body)
            case [owner, name, "info", "lfs", "objects", "batch"]:
                assert f"{owner}/{name.removesuffix('.git')}" in hub.repositories
                return {"objects": [self._offer(entry) for entry in json.loads(body)["objects"]]}
        raise _Refusal(404, f"no path {path}")

    def _create(
        self, name: str, organization: str | None = None, visibility: str = "public", **_: Any
    ) -> Any:
        repository_id = f"{organization or OWNER}/{name}"
        if organization not in (None, OWNER):
            raise _Refusal(403, f'You have no rights to create a model under "{organization}"')
        repository = Repository(is_private=visibility == "private")
        self.content.repositories.setdefault(repository_id, repository)
        return {"url": f"{self.content.address}/{repository_id}"}

    def _answer_repository(self, repository_id: str, path: list[str], body: bytes) -> Any:
        repository = self.content.repositories.get(repository_id)
        if repository is None:
            raise _Refusal(404, "Repository not found")
        match path:
            case [] | ["revision", _]:
                siblings = [{"rfilename": name} for name in repository.files]
                fields = {"id": repository_id, "sha": "0" * 40, "tags": [], "downloads": 0}
                return fields | {"private": repository.is_private, "siblings": siblings}
            case ["tree", *_]:
                return [
                    {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                    for name, content in repository.files.items()
                ]
            case ["preupload", _]:
                names = [entry["path"] for entry in json.loads(body)["files"]]
                return {"files": [self._choose_mode(name) for name in names]}
            case ["commit", _]:
                if self.content.refuses_commits:
                    raise _Refusal(403, "the storage is full")
                for line in body.splitlines():
                    self._apply(repository, **json.loads(line))
                address = f"{self.content.address}/{repository_id}/commit/{'1' * 40}"
                return {"success": True, "commitOid": "1" * 40, "commitUrl": address}
        raise _Refusal(404, f"no path {path}")

    def _choose_mode(self, name: str) -> Any:
        mode = "lfs" if name.endswith(".safetensors") else "regular"
        return {"path": name, "uploadMode": mode, "shouldIgnore": False}

    def _offer(self, entry: dict[str, Any]) -> Any:
        """Return the address for the content of a large file."""
        address = f"{self.content.address}/objects/{entry['oid']}"
        return entry | {"actions": {"upload": {"href": address}}}

    def _apply(self, repository: Repository, key: str, value: dict[str, Any]) -> None:
        """Apply one line of a commit."""
        match key:
            case "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            case "lfsFile":
                repository.files[value["path"]] = self.content.objects[value["oid"]]
            case "deletedFile":
                del repository.files[value["path"]]
