"""A fake Kubernetes API server that speaks HTTP, stores any kind of object and injects failures.

    async with FakeKubernetes() as cluster:
        cluster.put(pod("a"))                       # simulate kubectl or a controller
        api = make_api_client(cluster)              # connect the client under test
        cluster.cut_watches()                       # inject a failure

The server implements the behavior that clients depend on:

- one revision for the whole store, and updates checked against resourceVersion
- watches that resume from a revision, or end with 410 after the history was compacted
- label and field selectors, merge patches, the status subresource and finalizers

Objects are stored by path, so the server needs no list of kinds.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from tests.gateway.fake_kubernetes_pods import FakePods
from tests.gateway.fake_kubernetes_store import (
    Change,
    Json,
    ObjectStore,
    Selection,
    StatusError,
    Target,
    get_current_time,
    make_event,
    make_too_old_error,
    merge_patch,
)

_PATH_PATTERN = re.compile(
    r"/(?:api|apis)/(?P<api_version>v1|[^/]+/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[a-z0-9]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>status|log|exec))?"
)


@dataclass(frozen=True)
class ApiRequest:
    """A request that the server received."""

    verb: str
    """RBAC verb: get, list, watch, create, update, patch or delete."""
    target: Target
    query: dict[str, str]
    token: str
    body: Any


@dataclass
class InjectedFailure:
    """A failure of the next matching requests. With status 0, only the response is lost."""

    status: int
    verb: str
    plural: str
    num_remaining: int
    retry_after: str = ""


@dataclass(eq=False)
class Watch:
    """An open watch stream."""

    target: Target
    selection: Selection
    transport: asyncio.Transport
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class FakeKubernetes:
    """The server. Its methods must be called in the event loop that runs the server."""

    def __init__(self, *, tls: ssl.SSLContext | None = None, revision: int = 100) -> None:
        self.requests: list[ApiRequest] = []
        self.pods = FakePods()
        self.groups: dict[str, Json] = {}
        """Discovery responses by path, for example /apis/ray.io/v1."""
        self.tokens: set[str] | None = None
        """Accepted tokens, or None to accept every client."""
        self.refuses_old_watches = False
        """If True, a watch of an expired version gets status 410 instead of an error event."""
        self.delay_s = 0.0
        """Delay before each response, in seconds."""
        self.bytes_per_write = 0
        """Maximum number of bytes per write to a watch. 0 writes whole lines."""
        self._tls = tls
        self._store = ObjectStore(revision, self._notify_watches)
        self._watches: set[Watch] = set()
        self._failures: list[InjectedFailure] = []
        self._port = 0

    # Access for tests.

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def num_requests(self, verb: str, plural: str = "") -> int:
        return sum(
            request.verb == verb and plural in ("", request.target.plural)
            for request in self.requests
        )

    def get(self, api_version: str, plural: str, namespace: str, name: str) -> Json | None:
        return copy.deepcopy(self._store.find(Target(api_version, plural, namespace, name)))

    def list_objects(self, api_version: str, plural: str) -> list[Json]:
        return copy.deepcopy(self._store.list_objects(Target(api_version, plural, "", "")))

    # Actions of other clients.

    def put(self, json_object: Json, plural: str = "") -> Json:
        """Create or replace an object, including its status, without a version check."""
        metadata = {"namespace": "default", **json_object["metadata"]}
        plural = plural or json_object["kind"].lower() + "s"
        target = Target(json_object["apiVersion"], plural, metadata["namespace"], metadata["name"])
        old_object = self._store.find(target)
        if old_object is not None:
            metadata = {"uid": old_object["metadata"]["uid"], **metadata}
        return self._store.store(target, old_object, {**json_object, "metadata": metadata})

    def remove(self, api_version: str, plural: str, namespace: str, name: str) -> None:
        target = Target(api_version, plural, namespace, name)
        self._store.store(target, self._store.find(target), None)

    # Failures.

    def fail(
        self,
        status: int,
        *,
        verb: str = "",
        plural: str = "",
        times: int = 1,
        retry_after: str = "",
    ) -> None:
        """Fail the next matching requests. With status 0, only the response is lost."""
        self._failures.append(InjectedFailure(status, verb, plural, times, retry_after))

    def clear_failures(self) -> None:
        self._failures.clear()

    def compact(self) -> None:
        """Remove the history, so that no watch can start from an earlier version."""
        self._store.compact()

    def expire_watches(self) -> None:
        """Compact the history, and end the open watches with an expiry error."""
        self.compact()
        for watch in self._watches:
            watch.lines.put_nowait(make_event("ERROR", make_too_old_error().body))
            watch.lines.put_nowait(None)

    def send_bookmarks(self) -> None:
        for watch in self._watches:
            watch.lines.put_nowait(self._make_bookmark(watch.target))

    def send_raw(self, line: bytes) -> None:
        for watch in self._watches:
            watch.lines.put_nowait(line)

    def end_watches(self) -> None:
        """End all watches without an error, as the server does after timeoutSeconds."""
        for watch in self._watches:
            watch.lines.put_nowait(None)

    def cut_watches(self) -> None:
        for watch in self._watches:
            watch.transport.abort()

    async def go_down(self) -> None:
        """Refuse new connections and abort open connections."""
        await self._site.stop()
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def come_up(self) -> None:
        self._site = web.TCPSite(
            self._runner, "127.0.0.1", self._port, ssl_context=self._tls, reuse_address=True
        )
        await self._site.start()

    async def __aenter__(self) -> FakeKubernetes:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        await self.come_up()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.end_watches()
        await self._runner.cleanup()

    # Requests.

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            if request.path in self.groups:
                return web.json_response(self.groups[request.path])
            api_request = await self._read_request(request)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            failure = self._take_failure(api_request)
            if failure is not None and failure.status:
                message = f"cannot {api_request.verb} {api_request.target.plural}: failure injected"
                raise StatusError(failure.status, message, retry_after=failure.retry_after)
            if api_request.verb == "watch":
                return await self._stream(request, api_request)
            if (
                api_request.target.subresource in ("log", "exec")
                and "*/*" not in request.headers["Accept"]
            ):
                raise StatusError(406, "the body of the request was in an unknown format")
            if api_request.target.subresource == "log":
                return await self.pods.send_log(request, api_request.target.name)
            if api_request.target.subresource == "exec":
                return await self.pods.send_exec(request, api_request.target.name)
            response_body = getattr(self, f"_{api_request.verb}")(api_request, request)
            response = web.json_response(
                response_body, status=201 if api_request.verb == "create" else 200
            )
            if failure is not None and request.transport is not None:
                request.transport.abort()
            return response
        except StatusError as error:
            return web.json_response(error.body, status=error.status, headers=error.headers)

    async def _read_request(self, request: web.Request) -> ApiRequest:
        match = _PATH_PATTERN.fullmatch(request.path)
        if match is None:
            raise StatusError(404, f"the server could not find {request.path}")
        target = Target(**{key: value or "" for key, value in match.groupdict().items()})
        body = await request.read()
        try:
            content = json.loads(body) if body else None
        except ValueError as error:
            raise StatusError(400, f"the body is not valid JSON: {error}") from error
        verb = {"POST": "create", "PUT": "update"}.get(request.method, request.method.lower())
        if request.method == "GET" and not target.name:
            verb = "watch" if request.query.get("watch") in ("true", "1") else "list"
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        api_request = ApiRequest(verb, target, dict(request.query), token, content)
        self.requests.append(api_request)
        if self.tokens is not None and token not in self.tokens:
            raise StatusError(401, "Unauthorized")
        return api_request

    def _take_failure(self, api_request: ApiRequest) -> InjectedFailure | None:
        for failure in self._failures:
            if failure.verb in ("", api_request.verb) and failure.plural in (
                "",
                api_request.target.plural,
            ):
                failure.num_remaining -= 1
                if not failure.num_remaining:
                    self._failures.remove(failure)
                return failure
        return None

    def _get(self, api_request: ApiRequest, request: web.Request) -> Json:
        return self._store.require(api_request.target)

    def _list(self, api_request: ApiRequest, request: web.Request) -> Json:
        selection = _make_selection(api_request)
        items = [
            json_object
            for json_object in self._store.list_objects(api_request.target)
            if json_object in selection
        ]
        return {
            "apiVersion": api_request.target.api_version,
            "kind": f"{items[0]['kind'] if items else ''}List",
            "metadata": {"resourceVersion": str(self._store.revision)},
            "items": items,
        }

    def _create(self, api_request: ApiRequest, request: web.Request) -> Json:
        new_object = self._read_object(api_request)
        metadata = new_object["metadata"]
        if "generateName" in metadata and not metadata.get("name"):
            metadata["name"] = f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
        if metadata.get("resourceVersion"):
            raise StatusError(400, "resourceVersion should not be set on objects to be created")
        target = Target(*api_request.target.kind, api_request.target.namespace, metadata["name"])
        if self._store.find(target) is not None:
            raise StatusError(
                409, f'{target.plural} "{target.name}" already exists', "AlreadyExists"
            )
        new_object.pop("status", None)
        if api_request.query.get("dryRun") == "All":
            return new_object
        return self._store.store(target, None, new_object)

    def _update(self, api_request: ApiRequest, request: web.Request) -> Json:
        old_object = self._store.require(api_request.target)
        return self._store.change(api_request.target, old_object, self._read_object(api_request))

    def _patch(self, api_request: ApiRequest, request: web.Request) -> Json:
        if request.content_type != "application/merge-patch+json":
            raise StatusError(415, f"expected a merge patch, got {request.content_type}")
        old_object = self._store.require(api_request.target)
        return self._store.change(
            api_request.target, old_object, merge_patch(old_object, api_request.body)
        )

    def _delete(self, api_request: ApiRequest, request: web.Request) -> Json:
        old_object = self._store.require(api_request.target)
        required_uid = ((api_request.body or {}).get("preconditions") or {}).get("uid")
        if required_uid not in (None, old_object["metadata"]["uid"]):
            raise StatusError(
                409, "the uid in the precondition does not match the uid of the object"
            )
        if not old_object["metadata"].get("finalizers"):
            self._store.store(api_request.target, old_object, None)
            return {"apiVersion": "v1", "kind": "Status", "status": "Success"}
        deleted_object = copy.deepcopy(old_object)
        deleted_object["metadata"].setdefault("deletionTimestamp", get_current_time())
        return self._store.store(api_request.target, old_object, deleted_object)

    async def _stream(self, request: web.Request, api_request: ApiRequest) -> web.StreamResponse:
        version = api_request.query.get("resourceVersion", "")
        selection = _make_selection(api_request)
        is_too_old = version not in ("", "0") and int(version) < self._store.oldest_revision
        if is_too_old and self.refuses_old_watches:
            raise make_too_old_error()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        assert isinstance(request.transport, asyncio.Transport)
        watch = Watch(api_request.target, selection, request.transport)
        if is_too_old:
            await response.write(make_event("ERROR", make_too_old_error().body))
            return response
        for line in self._store.list_backlog(api_request.target, version, selection):
            watch.lines.put_nowait(line)
        self._watches.add(watch)  # no await since the backlog was read, so no change is missed
        try:
            async with asyncio.timeout(int(api_request.query.get("timeoutSeconds", "1800"))):
                while (line := await watch.lines.get()) is not None:
                    await self._write_in_chunks(response, line)
        except TimeoutError:
            await response.write(self._make_bookmark(api_request.target))
        except ConnectionError:
            pass
        finally:
            self._watches.discard(watch)
        return response

    async def _write_in_chunks(self, response: web.StreamResponse, line: bytes) -> None:
        chunk_size = self.bytes_per_write or len(line)
        for start in range(0, len(line), chunk_size):
            await response.write(line[start : start + chunk_size])
            if self.bytes_per_write:
                await asyncio.sleep(0.001)

    def _read_object(self, api_request: ApiRequest) -> Json:
        json_object, target = api_request.body, api_request.target
        if not isinstance(json_object, dict) or not isinstance(json_object.get("metadata"), dict):
            raise StatusError(400, "expected an object with metadata")
        if json_object.get("apiVersion") != target.api_version or not json_object.get("kind"):
            raise StatusError(400, f"expected an object of {target.api_version}")
        metadata = json_object["metadata"]
        if metadata.setdefault("namespace", target.namespace) != target.namespace:
            raise StatusError(400, "the namespace of the object does not match the request")
        if target.name and metadata.get("name") != target.name:
            raise StatusError(400, "the name of the object does not match the request")
        return json_object

    def _notify_watches(self, change: Change) -> None:
        for watch in self._watches:
            line = change.make_line(watch.selection) if watch.target.kind == change.kind else None
            if line is not None:
                watch.lines.put_nowait(line)

    def _make_bookmark(self, target: Target) -> bytes:
        metadata = {"resourceVersion": str(self._store.revision)}
        return make_event("BOOKMARK", {"apiVersion": target.api_version, "metadata": metadata})


T = TypeVar("T")
Call = Callable[[Callable[[FakeKubernetes], T]], T]


@contextmanager
def run_cluster_in_thread() -> Iterator[tuple[str, Call]]:
    """Run a server in a thread; yield its URL and a function that runs code in its event loop.

    with run_cluster_in_thread() as (url, call):
        call(lambda cluster: cluster.put(pod("a")))
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake-kubernetes")
    thread.start()
    cluster = FakeKubernetes()

    def call(function: Callable[[FakeKubernetes], T]) -> T:
        async def call_in_loop() -> T:
            return function(cluster)

        return asyncio.run_coroutine_threadsafe(call_in_loop(), loop).result(60)

    try:
        asyncio.run_coroutine_threadsafe(cluster.__aenter__(), loop).result(60)
        yield cluster.url, call
        asyncio.run_coroutine_threadsafe(cluster.__aexit__(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def _make_selection(api_request: ApiRequest) -> Selection:
    return Selection(
        api_request.target.namespace,
        tuple(_parse_selector(api_request.query.get("labelSelector", ""))),
        tuple(_parse_selector(api_request.query.get("fieldSelector", ""))),
    )


def _parse_selector(selector: str) -> Iterator[tuple[str, str | None]]:
    """Yield the key and the required value of each term. The value None means any value."""
    for term in selector.replace("==", "=").split(","):
        key, separator, value = term.partition("=")
        if key:
            yield key, value if separator else None
