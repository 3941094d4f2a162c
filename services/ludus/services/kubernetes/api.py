"""The one file that talks to a Kubernetes API server, for gateways in it and for runs on it.

    gateway   endpointslices, leases, pods, sandboxes      --+
                                                             +-->  KubernetesApi  -->  API server
    runs      RayJobs, ConfigMaps, logs, exec              --+        |
                                                             ApiAccess: address, CA, credentials

Requests go through aiohttp, on the caller's own event loop. The official client's watch
blocks a thread for each stream, cannot be cancelled while the stream is silent, and turns
each object into models (tens of milliseconds for a large slice); here a stream is a plain
asynchronous iterator of JSON objects. kubernetes_asyncio takes 0.8 s and 37 MiB more to
import; its watch asks again for a version that is gone, it reads the CA once, and its election
trusts the wall clock and leads on while the API server is silent.

What the gateway's Role needs, in its own namespace and nothing beyond:

    discovery.k8s.io      endpointslices   list, watch
    ""                    pods             patch               (pod deletion cost)
    coordination.k8s.io   leases           create
    coordination.k8s.io   leases           get, update         (resourceNames: the lease's name)

and where sessions have sandboxes of their own:

    extensions.agents.x-k8s.io   sandboxclaims      create, delete, list, watch
    extensions.agents.x-k8s.io   sandboxwarmpools   get          (resourceNames: the pools')

What a person needs who sends runs there stands in docs/submit.md.

Credentials appear in no message, log or repr, and redirects are not followed: the token goes
to the API server alone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from aiohttp.http_exceptions import LineTooLong
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from ludus.proto.errors import ClusterError, ConfigError
from ludus.services.kubernetes.access import ApiAccess, load_access

JsonObject = dict[str, Any]

_MERGE_PATCH = "application/merge-patch+json"
_MAX_ANSWER_BYTES = 64 * 2**20
_MAX_EVENT_BYTES = 16 * 2**20
_MAX_REASON_CHARS = 500
_WATCH_GRACE_S = 15.0
"""What a watch may last beyond the time that the server was asked to end it after."""
_HEARTBEAT_S = 30.0
"""Between two pings of a WebSocket: what stands between would end one that is silent."""
_NO_ANSWER = 0
GATEWAY_WAYS_OUT: Mapping[int, str] = {
    _NO_ANSWER: "it is tried again; see that a NetworkPolicy lets the gateway reach that address"
    " and port (networkPolicy.apiServer in the chart's values)",
    401: "check the service account's token, or the user of the kubeconfig",
    403: "grant it in the gateway's Role",
    404: "check the namespace and the name",
}
"""What to do, by status of the answer; 0 where none came."""


class ObjectPart(BaseModel):
    """A part of a Kubernetes object, as far as it is read here."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True)


class EventType(StrEnum):
    """What a watch says about an object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


_EVENT_TYPES = frozenset(map(str, EventType))


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One line of a watch; a bookmark's object holds nothing but its resourceVersion."""

    type: EventType
    object: JsonObject


def resource_path(api_version: str, namespace: str, plural: str, name: str = "") -> str:
    """The path of a kind of object, or of one of them: `v1` or `group/v1`.

    Args:
        namespace: empty for what has none, or for the objects of all namespaces.
    """
    path = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    if namespace:
        path += f"/namespaces/{quote(namespace, safe='')}"
    path += f"/{plural}"
    return f"{path}/{quote(name, safe='')}" if name else path


class KubernetesApi:
    """Requests to one API server; each raises a ClusterError with the status when it fails.

    Only access that cannot be loaded from the start is a ConfigError: files that are missing
    later on, while the kubelet replaces them, are trouble that passes.

    Args:
        load: gives the access; called again when credentials or certificates were refused.
        timeout_s: for each request, streams apart.
        ways_out: what to do, by status of the answer; 0 where none came.
    """

    def __init__(
        self,
        load: Callable[[], ApiAccess] = load_access,
        *,
        timeout_s: float = 10.0,
        ways_out: Mapping[int, str] = GATEWAY_WAYS_OUT,
    ) -> None:
        self._load = load
        self._ways_out = ways_out
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._connect_timeout_s = timeout_s
        self._access: ApiAccess | None = None
        self._had_credentials = False
        self._session: aiohttp.ClientSession | None = None

    async def read(self, path: str, query: Mapping[str, str] | None = None) -> JsonObject:
        """The object or list at a path."""
        return await self._call("GET", path, query=query)

    async def create(
        self, path: str, body: JsonObject, query: Mapping[str, str] | None = None
    ) -> JsonObject:
        """The object as it was created in the list at a path."""
        return await self._call("POST", path, body=body, query=query)

    async def replace(self, path: str, body: JsonObject) -> JsonObject:
        """The object as it was stored; status 409 when it is not at `body`'s resourceVersion."""
        return await self._call("PUT", path, body=body)

    async def merge(self, path: str, body: JsonObject) -> JsonObject:
        """The object after a JSON merge patch."""
        return await self._call("PATCH", path, body=body, content_type=_MERGE_PATCH)

    async def delete(self, path: str, body: JsonObject | None = None) -> JsonObject:
        """The object as it was when its end began, or a Status."""
        return await self._call("DELETE", path, body=body)

    async def lines(
        self, path: str, query: Mapping[str, str], *, silence_s: float | None = None
    ) -> AsyncGenerator[str]:
        """The lines of a text, a pod's log for example, until the server ends the stream.

        To be closed by whoever leaves it early (`contextlib.aclosing`).

        Args:
            silence_s: ends it, too, when nothing has come for so long.
        """
        timeout = aiohttp.ClientTimeout(sock_connect=self._connect_timeout_s, sock_read=silence_s)
        with self._as_cluster_errors("GET", path), suppress(aiohttp.SocketTimeoutError):
            async with self._answer("GET", path, query=query, timeout=timeout) as response:
                content, limit = response.content, _MAX_EVENT_BYTES
                while line := await content.readline(max_line_length=limit):
                    yield line.decode(errors="replace").rstrip("\r\n")

    async def messages(
        self, path: str, query: Sequence[tuple[str, str]], protocol: str
    ) -> AsyncGenerator[bytes]:
        """What a WebSocket says, until the server closes it.

        To be closed by whoever leaves it early (`contextlib.aclosing`).
        """
        with self._as_cluster_errors("GET", path):
            access, headers = await self._credentials()
            async with self._open_session().ws_connect(
                access.url + path,
                params=query,
                protocols=(protocol,),
                headers=headers,
                max_msg_size=_MAX_EVENT_BYTES,
                heartbeat=_HEARTBEAT_S,
                **_connection(access),
            ) as socket:
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.BINARY:
                        yield message.data

    async def watch(
        self, path: str, *, version: str, timeout_s: int, query: Mapping[str, str] | None = None
    ) -> AsyncGenerator[WatchEvent]:
        """What changes in a list after a resourceVersion, until the server ends the stream.

        To be closed by whoever leaves it early (`contextlib.aclosing`).

        Raises:
            ClusterError: status 410 when the version is too old to continue from: list again.
        """
        asked = {
            **(query or {}),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(timeout_s),
        }
        timeout = aiohttp.ClientTimeout(
            total=timeout_s + _WATCH_GRACE_S, sock_connect=self._connect_timeout_s
        )
        with self._as_cluster_errors("GET", path):
            async with self._answer("GET", path, query=asked, timeout=timeout) as response:
                content, limit = response.content, _MAX_EVENT_BYTES
                while line := await content.readline(max_line_length=limit):
                    if not line.isspace():
                        yield _event_in(line, path)

    async def close(self) -> None:
        """End all requests."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> KubernetesApi:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = "application/json",
    ) -> JsonObject:
        headers = {"Content-Type": content_type} if body is not None else {}
        data = None if body is None else orjson.dumps(body)
        with self._as_cluster_errors(method, path):
            async with self._answer(
                method, path, query=query, data=data, headers=headers, timeout=self._timeout
            ) as response:
                found = orjson.loads(await _whole(response))
        if not isinstance(found, dict):
            raise ClusterError(f"expected an object from {path}, got {type(found).__name__}")
        return found

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with status 2xx, whose body is yet to be read."""
        options["params"] = options.pop("query", None)
        response = await self._send(method, path, headers or {}, options)
        if response.status == 401:
            # Credentials expire; what is on the disk now may be newer than what was loaded.
            response.release()
            self._access = None
            response = await self._send(method, path, headers or {}, options)
        try:
            if not 200 <= response.status < 300:
                raise await self._refusal(method, path, response)
            yield response
        finally:
            # An answer that was not read to its end would leave the connection unusable.
            response.close()

    async def _send(
        self, method: str, path: str, headers: Mapping[str, str], options: Mapping[str, Any]
    ) -> aiohttp.ClientResponse:
        access, authorization = await self._credentials()
        try:
            return await self._open_session().request(
                method,
                access.url + path,
                headers={**headers, **authorization},
                allow_redirects=False,
                **_connection(access),
                **options,
            )
        except aiohttp.ClientSSLError:
            self._access = None  # the CA may have been replaced on the disk
            raise

    async def _credentials(self) -> tuple[ApiAccess, dict[str, str]]:
        """The access, and the headers that say who asks."""
        try:
            if self._access is None:
                self._access = await asyncio.to_thread(self._load)
            access = self._access
            authorization = await asyncio.to_thread(access.authorization)
        except ConfigError as error:
            if not self._had_credentials:
                raise  # it never worked: for a person to repair
            raise ClusterError(str(error)) from error
        self._had_credentials = True
        return access, {"Authorization": authorization} if authorization else {}

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(socket_factory=_lively_socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                # An API server refuses whoever takes JSON alone what is none: logs, for example.
                headers={"Accept": "application/json, */*", "User-Agent": "ludus"},
            )
        return self._session

    @contextmanager
    def _as_cluster_errors(self, method: str, path: str) -> Iterator[None]:
        try:
            yield
        except orjson.JSONDecodeError as error:
            raise ClusterError(f"expected JSON from {method} {path}, got: {error}") from error
        except LineTooLong as error:
            raise ClusterError(
                f"expected watch events of at most {_MAX_EVENT_BYTES} bytes from {path}, got more"
            ) from error
        except aiohttp.WSServerHandshakeError as error:
            raise self._refused(method, path, error.status, error.message) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ClusterError(
                f"expected an answer from the API server{self._place()} to {method} {path}, got"
                f" {_reason_of(error)}" + self._way_out(_NO_ANSWER)
            ) from error

    async def _refusal(
        self, method: str, path: str, response: aiohttp.ClientResponse
    ) -> ClusterError:
        try:
            said = orjson.loads(await _whole(response))
            reason = str(said.get("message", "")) if isinstance(said, dict) else ""
        except (orjson.JSONDecodeError, aiohttp.ClientError):
            reason = ""
        retry_after = response.headers.get("Retry-After", "")
        return self._refused(
            method,
            path,
            response.status,
            reason or response.reason or "",
            float(retry_after) if retry_after.isdecimal() else 0.0,
        )

    def _refused(
        self, method: str, path: str, status: int, reason: str, retry_after_s: float = 0.0
    ) -> ClusterError:
        said = f"expected the API server to accept {method} {path}, got {status} {reason}"
        return ClusterError(
            said[: _MAX_REASON_CHARS + 200] + self._way_out(status), status, retry_after_s
        )

    def _place(self) -> str:
        return f" at {self._access.url}" if self._access is not None else ""

    def _way_out(self, status: int) -> str:
        known = self._ways_out.get(status)
        return f"; {known}" if known else ""


def _connection(access: ApiAccess) -> dict[str, Any]:
    return {
        "ssl": access.tls or True,
        "server_hostname": access.tls_server_name or None,
        "proxy": access.proxy or None,
    }


def _reason_of(error: Exception) -> str:
    """Why no answer came."""
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    said = (
        f"{type(error).__name__}: {error}"
        if str(error)
        else f"none in time ({type(error).__name__})"
    )
    return said[:_MAX_REASON_CHARS]


def _lively_socket(address: Any) -> socket.socket:
    """A socket that notices within a minute that the other side vanished.

    A watch may be silent for minutes, and without probes a dead one looks just like that.
    """
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 8), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    parts = bytearray()
    async for part in response.content.iter_any():
        parts += part
        if len(parts) > _MAX_ANSWER_BYTES:
            raise ClusterError(
                f"expected at most {_MAX_ANSWER_BYTES} bytes from {response.url.path}, got more"
            )
    return bytes(parts)


def _event_in(line: bytes, path: str) -> WatchEvent:
    said = orjson.loads(line)
    kind = said.get("type") if isinstance(said, dict) else None
    found = said.get("object") if isinstance(said, dict) else None
    if kind == "ERROR" and isinstance(found, dict):
        status = found.get("code")
        raise ClusterError(
            f"expected to continue watching {path}, got {status}"
            f" {str(found.get('message', ''))[:_MAX_REASON_CHARS]}",
            status if isinstance(status, int) else 0,
        )
    if kind not in _EVENT_TYPES or not isinstance(found, dict):
        raise ClusterError(f"expected a watch event from {path}, got type {str(kind)[:40]!r}")
    return WatchEvent(EventType(str(kind)), found)
