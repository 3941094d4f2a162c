"""A fake Kubernetes API server with real HTTP, any kind of object and injected failures.

    async with FakeKubernetes() as cluster:
        cluster.put(pod("a"))                       # what kubectl or a controller would do
        api = make_api_client(cluster)              # what is tested
        cluster.cut_watches()                       # what goes wrong

It keeps the rules that clients rely on: one revision for the whole store, updates checked
against resourceVersion, watches that continue after a revision or end with 410 once the history
was compacted, label and field selectors, merge patches, a status apart, finalizers. Objects
are kept by path, so it needs no list of kinds.
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

from tests.gateway.fake_kubernetes_pods import PodInsides
from tests.gateway.fake_kubernetes_store import (
    Change,
    Json,
    ObjectStore,
    Refused,
    Selection,
    Target,
    event,
    merge_patch,
    now,
    too_old,
)

_PATH = re.compile(
    r"/(?:api|apis)/(?P<api_version>v1|[^/]+/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[a-z0-9]+)(?:/(?P<name>[^/]+))?(?:/(?P<part>status|log|exec))?"
)


@dataclass(frozen=True)
class ApiRequest:
    """A received request."""

    verb: str
    """RBAC verb: get, list, watch, create, update, patch or delete."""
    target: Target
    query: dict[str, str]
    token: str
    body: Any


@dataclass
class Trouble:
    """A failure of the next matching requests; status 0 only loses the response."""

    status: int
    verb: str
    plural: str
    times: int
    retry_after: str = ""


@dataclass(eq=False)
class Watch:
    """An open stream."""

    target: Target
    selects: Selection
    transport: asyncio.Transport
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class FakeKubernetes:
    """The server, used with `async with`; call its methods in its event loop."""

    def __init__(self, *, tls: ssl.SSLContext | None = None, revision: int = 100) -> None:
        self.requests: list[ApiRequest] = []
        self.pods = PodInsides()
        self.groups: dict[str, Json] = {}
        """Discovery response by path, for example /apis/ray.io/v1."""
        self.tokens: set[str] | None = None
        """Accepted tokens; None accepts every client."""
        self.gone_as_status = False
        """True if a watch from a too old version is refused instead of failing later."""
        self.delay_s = 0.0
        """Delay before each response, in seconds."""
        self.bytes_per_write = 0
        """Size of the pieces of a stream in bytes; 0 sends whole lines."""
        self._tls = tls
        self._store = ObjectStore(revision, self._tell_watches)
        self._watches: set[Watch] = set()
        self._trouble: list[Trouble] = []
        self._port = 0

    # Access for tests.

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def num_requests(self, verb: str, plural: str = "") -> int:
        return sum(r.verb == verb and plural in ("", r.target.plural) for r in self.requests)

    def get(self, api_version: str, plural: str, namespace: str, name: str) -> Json | None:
        return copy.deepcopy(self._store.find(Target(api_version, plural, namespace, name)))

    def all(self, api_version: str, plural: str) -> list[Json]:
        return copy.deepcopy(self._store.list_objects(Target(api_version, plural, "", "")))

    # Actions of other clients.

    def put(self, stored: Json, plural: str = "") -> Json:
        """Create or replace an object with its status, without a check of its version."""
        metadata = {"namespace": "default", **stored["metadata"]}
        plural = plural or stored["kind"].lower() + "s"
        target = Target(stored["apiVersion"], plural, metadata["namespace"], metadata["name"])
        previous = self._store.find(target)
        if previous is not None:
            metadata = {"uid": previous["metadata"]["uid"], **metadata}
        return self._store.store(target, previous, {**stored, "metadata": metadata})

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
        """Refuse the next requests; status 0 performs them and cuts the connection."""
        self._trouble.append(Trouble(status, verb, plural, times, retry_after))

    def heal(self) -> None:
        self._trouble.clear()

    def compact(self) -> None:
        """Remove the history, so that no watch can start from an earlier version."""
        self._store.compact()

    def expire_watches(self) -> None:
        """Compact, and fail the open watches as too old."""
        self.compact()
        for watch in self._watches:
            watch.lines.put_nowait(event("ERROR", too_old().body))
            watch.lines.put_nowait(None)

    def send_bookmarks(self) -> None:
        for watch in self._watches:
            watch.lines.put_nowait(self._bookmark(watch.target))

    def send_raw(self, line: bytes) -> None:
        for watch in self._watches:
            watch.lines.put_nowait(line)

    def end_watches(self) -> None:
        """End all watches, as after timeoutSeconds."""
        for watch in self._watches:
            watch.lines.put_nowait(None)

    def cut_watches(self) -> None:
        for watch in self._watches:
            watch.transport.abort()

    async def go_down(self) -> None:
        """Refuse new connections and cut open ones."""
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
            requested = await self._read(request)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            trouble = self._take_trouble(requested)
            if trouble is not None and trouble.status:
                message = f"cannot {requested.verb} {requested.target.plural}: as the test wants it"
                raise Refused(trouble.status, message, retry_after=trouble.retry_after)
            if requested.verb == "watch":
                return await self._stream(request, requested)
            if requested.target.part in ("log", "exec") and "*/*" not in request.headers["Accept"]:
                raise Refused(406, "the body of the request was in an unknown format")
            if requested.target.part == "log":
                return await self.pods.answer_log(request, requested.target.name)
            if requested.target.part == "exec":
                return await self.pods.answer_exec(request, requested.target.name)
            content = getattr(self, f"_{requested.verb}")(requested, request)
            answer = web.json_response(content, status=201 if requested.verb == "create" else 200)
            if trouble is not None and request.transport is not None:
                request.transport.abort()
            return answer
        except Refused as refused:
            return web.json_response(refused.body, status=refused.status, headers=refused.headers)

    async def _read(self, request: web.Request) -> ApiRequest:
        stored = _PATH.fullmatch(request.path)
        if stored is None:
            raise Refused(404, f"the server could not find {request.path}")
        target = Target(**{key: value or "" for key, value in stored.groupdict().items()})
        body = await request.read()
        try:
            content = json.loads(body) if body else None
        except ValueError as error:
            raise Refused(400, f"the body is no JSON: {error}") from error
        verb = {"POST": "create", "PUT": "update"}.get(request.method, request.method.lower())
        if request.method == "GET" and not target.name:
            verb = "watch" if request.query.get("watch") in ("true", "1") else "list"
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        requested = ApiRequest(verb, target, dict(request.query), token, content)
        self.requests.append(requested)
        if self.tokens is not None and token not in self.tokens:
            raise Refused(401, "Unauthorized")
        return requested

    def _take_trouble(self, requested: ApiRequest) -> Trouble | None:
        for trouble in self._trouble:
            if trouble.verb in ("", requested.verb) and trouble.plural in (
                "",
                requested.target.plural,
            ):
                trouble.times -= 1
                if not trouble.times:
                    self._trouble.remove(trouble)
                return trouble
        return None

    def _get(self, requested: ApiRequest, request: web.Request) -> Json:
        return self._store.require(requested.target)

    def _list(self, requested: ApiRequest, request: web.Request) -> Json:
        selects = _selection(requested)
        items = [item for item in self._store.list_objects(requested.target) if item in selects]
        return {
            "apiVersion": requested.target.api_version,
            "kind": f"{items[0]['kind'] if items else ''}List",
            "metadata": {"resourceVersion": str(self._store.revision)},
            "items": items,
        }

    def _create(self, requested: ApiRequest, request: web.Request) -> Json:
        made = self._read_body_object(requested)
        metadata = made["metadata"]
        if "generateName" in metadata and not metadata.get("name"):
            metadata["name"] = f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
        if metadata.get("resourceVersion"):
            raise Refused(400, "resourceVersion should not be set on objects to be created")
        target = Target(*requested.target.kind, requested.target.namespace, metadata["name"])
        if self._store.find(target) is not None:
            raise Refused(409, f'{target.plural} "{target.name}" already exists', "AlreadyExists")
        made.pop("status", None)
        if requested.query.get("dryRun") == "All":
            return made
        return self._store.store(target, None, made)

    def _update(self, requested: ApiRequest, request: web.Request) -> Json:
        previous = self._store.require(requested.target)
        return self._store.change(requested.target, previous, self._read_body_object(requested))

    def _patch(self, requested: ApiRequest, request: web.Request) -> Json:
        if request.content_type != "application/merge-patch+json":
            raise Refused(415, f"expected a merge patch, got {request.content_type}")
        previous = self._store.require(requested.target)
        return self._store.change(requested.target, previous, merge_patch(previous, requested.body))

    def _delete(self, requested: ApiRequest, request: web.Request) -> Json:
        previous = self._store.require(requested.target)
        wanted_uid = ((requested.body or {}).get("preconditions") or {}).get("uid")
        if wanted_uid not in (None, previous["metadata"]["uid"]):
            raise Refused(409, "the uid in the precondition is another one")
        if not previous["metadata"].get("finalizers"):
            self._store.store(requested.target, previous, None)
            return {"apiVersion": "v1", "kind": "Status", "status": "Success"}
        doomed = copy.deepcopy(previous)
        doomed["metadata"].setdefault("deletionTimestamp", now())
        return self._store.store(requested.target, previous, doomed)

    async def _stream(self, request: web.Request, requested: ApiRequest) -> web.StreamResponse:
        version = requested.query.get("resourceVersion", "")
        selects = _selection(requested)
        is_too_old = version not in ("", "0") and int(version) < self._store.oldest
        if is_too_old and self.gone_as_status:
            raise too_old()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        assert isinstance(request.transport, asyncio.Transport)
        watch = Watch(requested.target, selects, request.transport)
        if is_too_old:
            await response.write(event("ERROR", too_old().body))
            return response
        for line in self._store.backlog(requested.target, version, selects):
            watch.lines.put_nowait(line)
        self._watches.add(watch)  # no await after the backlog, so no change is missed
        try:
            async with asyncio.timeout(int(requested.query.get("timeoutSeconds", "1800"))):
                while (line := await watch.lines.get()) is not None:
                    await self._trickle(response, line)
        except TimeoutError:
            await response.write(self._bookmark(requested.target))
        except ConnectionError:
            pass
        finally:
            self._watches.discard(watch)
        return response

    async def _trickle(self, response: web.StreamResponse, line: bytes) -> None:
        size = self.bytes_per_write or len(line)
        for start in range(0, len(line), size):
            await response.write(line[start : start + size])
            if self.bytes_per_write:
                await asyncio.sleep(0.001)

    def _read_body_object(self, requested: ApiRequest) -> Json:
        stored, target = requested.body, requested.target
        if not isinstance(stored, dict) or not isinstance(stored.get("metadata"), dict):
            raise Refused(400, "expected an object with metadata")
        if stored.get("apiVersion") != target.api_version or not stored.get("kind"):
            raise Refused(400, f"expected an object of {target.api_version}")
        metadata = stored["metadata"]
        if metadata.setdefault("namespace", target.namespace) != target.namespace:
            raise Refused(400, "the namespace of the object is not that of the request")
        if target.name and metadata.get("name") != target.name:
            raise Refused(400, "the name of the object is not that of the request")
        return stored

    def _tell_watches(self, change: Change) -> None:
        for watch in self._watches:
            line = change.line(watch.selects) if watch.target.kind == change.kind else None
            if line is not None:
                watch.lines.put_nowait(line)

    def _bookmark(self, target: Target) -> bytes:
        metadata = {"resourceVersion": str(self._store.revision)}
        return event("BOOKMARK", {"apiVersion": target.api_version, "metadata": metadata})


T = TypeVar("T")
Call = Callable[[Callable[[FakeKubernetes], T]], T]


@contextmanager
def cluster_in_thread() -> Iterator[tuple[str, Call]]:
    """Run a server with a separate event loop; yield its address and a function to call it.

    with cluster_in_thread() as (url, call):
        call(lambda cluster: cluster.put(pod("a")))
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake-kubernetes")
    thread.start()
    cluster = FakeKubernetes()

    def call(function: Callable[[FakeKubernetes], T]) -> T:
        async def do() -> T:
            return function(cluster)

        return asyncio.run_coroutine_threadsafe(do(), loop).result(60)

    try:
        asyncio.run_coroutine_threadsafe(cluster.__aenter__(), loop).result(60)
        yield cluster.url, call
        asyncio.run_coroutine_threadsafe(cluster.__aexit__(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def _selection(requested: ApiRequest) -> Selection:
    return Selection(
        requested.target.namespace,
        tuple(_pairs(requested.query.get("labelSelector", ""))),
        tuple(_pairs(requested.query.get("fieldSelector", ""))),
    )


def _pairs(selector: str) -> Iterator[tuple[str, str | None]]:
    """Parse a selector into names and required values; None means any value."""
    for item in selector.replace("==", "=").split(","):
        key, equals, value = item.partition("=")
        if key:
            yield key, value if equals else None
