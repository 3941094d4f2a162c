"""The asynchronous client of the Kubernetes API server, for gateways and for runs.

    gateway   endpointslices, leases, pods, sandboxes      --+
                                                             +-->  KubernetesApi  -->  API server
    runs      RayJobs, ConfigMaps, logs, exec              --+        |
                                                             ApiAccess: address, CA, credentials

Requests use aiohttp on the caller's event loop. The official client's watch blocks one thread per
stream, cannot be cancelled while the stream is silent, and converts each object to models, which
takes tens of milliseconds for a large slice. Here a stream is an asynchronous iterator of JSON
objects. kubernetes_asyncio is not used, because its import takes 0.8 s and 37 MiB more, its watch
repeats requests for a version that is too old, it reads the CA only once, and its leader election
relies on the wall clock and keeps leading while the API server does not respond.

The chart's Role lists the permissions of a gateway, and docs/submit.md those of submitting runs.

Credentials appear in no message, log or repr. Redirects are not followed, so that only the API
server receives the token.
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
from aiohttp import ClientResponse, ClientTimeout
from aiohttp.http_exceptions import LineTooLong

from ludus.proto.errors import ClusterError, ConfigError
from ludus.services.kubernetes.access import ApiAccess, load_access

JsonObject = dict[str, Any]
_Query = Mapping[str, str]

_EXEC_PROTOCOL = "v4.channel.k8s.io"
"""Subprotocol of pods/exec. The first byte of each message names its stream."""
_STDOUT, _STDERR, _STATUS = b"\x01", b"\x02", b"\x03"
"""The streams of pods/exec. A Status is sent when the command has exited."""
_MAX_STDERR_BYTES = 2000
_MERGE_PATCH = "application/merge-patch+json"
MAX_RESPONSE_BYTES = 64 * 2**20
MAX_EVENT_BYTES = 16 * 2**20
_MAX_MESSAGE_CHARS = 700
_WATCH_GRACE_S = 15.0
"""Seconds that a watch may last beyond its requested duration."""
_HEARTBEAT_S = 30.0
"""Interval between pings of a WebSocket, in seconds; proxies close silent connections."""
_NO_RESPONSE = 0
GATEWAY_REMEDIES: Mapping[int, str] = {
    _NO_RESPONSE: "the request is retried; check that a NetworkPolicy lets the gateway reach"
    " the address and port (networkPolicy.apiServer in the chart's values)",
    401: "check the service account's token, or the user of the kubeconfig",
    403: "grant it in the gateway's Role",
    404: "check the namespace and the name",
}
"""Remedy for each response status; status 0 means no response."""


class EventType(StrEnum):
    """The type of a watch event."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """An event of a watch. The object of a bookmark contains only its resourceVersion."""

    type: EventType
    object: JsonObject


def make_resource_path(api_version: str, namespace: str, plural: str, name: str = "") -> str:
    """Return the API path of all objects of a kind, or of one object if `name` is set.

    Args:
        api_version: `v1` or `group/v1`.
        plural: name of the kind in paths, for example `pods`.
        namespace: empty for objects without a namespace, and for those in all namespaces.
    """
    path = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    if namespace:
        path += f"/namespaces/{quote(namespace, safe='')}"
    path += f"/{plural}"
    return f"{path}/{quote(name, safe='')}" if name else path


class KubernetesApi:
    """A client of one API server. A failed request raises a ClusterError with the status.

    A caller that stops a generator early must close it (`contextlib.aclosing`).

    If the access cannot be loaded for the first request, a ConfigError is raised. If its files are
    missing later, for example while the kubelet replaces them, a ClusterError is raised.

    Args:
        load: returns the access; called again after credentials or certificates were refused.
        timeout_s: timeout of each request, except streams.
        remedies: remedy for each response status; status 0 means no response.
    """

    def __init__(
        self,
        load: Callable[[], ApiAccess] = load_access,
        *,
        timeout_s: float = 10.0,
        remedies: Mapping[int, str] = GATEWAY_REMEDIES,
    ) -> None:
        self._load = load
        self._remedies = remedies
        self._timeout_s = timeout_s
        self._access: ApiAccess | None = None
        self._had_credentials = False
        self._session: aiohttp.ClientSession | None = None

    async def read(self, path: str, query: _Query | None = None) -> JsonObject:
        """Return the object or list at a path."""
        return await self._request_json("GET", path, None, query)

    async def create(self, path: str, body: JsonObject, query: _Query | None = None) -> JsonObject:
        """Create an object in the list at a path, and return the created object."""
        return await self._request_json("POST", path, body, query)

    async def replace(self, path: str, body: JsonObject) -> JsonObject:
        """Replace an object and return the new one; status 409 if it was changed meanwhile."""
        return await self._request_json("PUT", path, body)

    async def merge(self, path: str, body: JsonObject) -> JsonObject:
        """Apply a JSON merge patch and return the patched object."""
        return await self._request_json("PATCH", path, body)

    async def delete(self, path: str, body: JsonObject | None = None) -> JsonObject:
        """Delete an object, and return the object or a Status."""
        return await self._request_json("DELETE", path, body)

    async def read_lines(
        self, path: str, query: _Query, *, silence_s: float | None = None
    ) -> AsyncGenerator[str]:
        """Yield the lines of a text, such as a pod's log, until the server closes the stream.

        Args:
            silence_s: seconds without new data after which the generator ends; None means no limit.
        """
        timeout = ClientTimeout(sock_connect=self._timeout_s, sock_read=silence_s)
        with self._raise_cluster_errors("GET", path), suppress(aiohttp.SocketTimeoutError):
            async with self._request("GET", path, params=query, timeout=timeout) as response:
                stream, limit = response.content, MAX_EVENT_BYTES
                while line := await stream.readline(max_line_length=limit):
                    yield line.decode(errors="replace").rstrip("\r\n")

    async def run_command(
        self, namespace: str, pod: str, container: str, command: Sequence[str]
    ) -> AsyncGenerator[bytes]:
        """Run a command in a container of a pod, and yield its stdout in chunks.

        Raises:
            ClusterError: the command could not be run, or it failed. The message contains its
                stderr.
        """
        shown_pod = f"pod {namespace}/{pod}"
        path = f"{make_resource_path('v1', namespace, 'pods', pod)}/exec"
        query = [("container", container), ("stdout", "true"), ("stderr", "true")]
        query += [("command", argument) for argument in command]
        stderr, status = b"", None
        with self._raise_cluster_errors("GET", path):
            access, headers = await self._read_credentials()
            async with self._open_session().ws_connect(
                access.url + path,
                params=query,
                protocols=(_EXEC_PROTOCOL,),
                headers=headers,
                max_msg_size=MAX_EVENT_BYTES,
                heartbeat=_HEARTBEAT_S,
                **_make_connection_options(access),
            ) as websocket:
                async for message in websocket:
                    stream, content = message.data[:1], message.data[1:]
                    if stream == _STDOUT and content:
                        yield content
                    elif stream == _STDERR:
                        stderr = (stderr + content)[-_MAX_STDERR_BYTES:]
                    elif stream == _STATUS:
                        status = orjson.loads(content)
        if status is None:
            raise ClusterError(f"the connection to {shown_pod} closed before the command finished")
        if status.get("status") != "Success":
            reason = stderr.decode(errors="replace").strip() or status.get("message")
            raise ClusterError(f"a command in {shown_pod} failed: {reason or 'no reason given'}")

    async def watch(
        self, path: str, *, version: str, timeout_s: int, query: _Query | None = None
    ) -> AsyncGenerator[WatchEvent]:
        """Yield the changes of a list after a resourceVersion, until the server ends the stream.

        Raises:
            ClusterError: the status is 410 if the version is too old; then read the list again.
        """
        watch_query = {
            **(query or {}),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(timeout_s),
        }
        timeout = ClientTimeout(timeout_s + _WATCH_GRACE_S, sock_connect=self._timeout_s)
        with self._raise_cluster_errors("GET", path):
            async with self._request("GET", path, params=watch_query, timeout=timeout) as response:
                stream, limit = response.content, MAX_EVENT_BYTES
                while line := await stream.readline(max_line_length=limit):
                    if not line.isspace():
                        yield _parse_event(line, path)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> KubernetesApi:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _request_json(
        self, method: str, path: str, body: JsonObject | None = None, query: _Query | None = None
    ) -> JsonObject:
        options: dict[str, Any] = {"params": query, "timeout": ClientTimeout(self._timeout_s)}
        if body is not None:
            content_type = _MERGE_PATCH if method == "PATCH" else "application/json"
            options |= {"data": orjson.dumps(body), "headers": {"Content-Type": content_type}}
        with self._raise_cluster_errors(method, path):
            async with self._request(method, path, **options) as response:
                content = orjson.loads(await _read_body(response))
        if not isinstance(content, dict):
            raise ClusterError(f"expected an object from {path}, got {type(content).__name__}")
        return content

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> AsyncIterator[ClientResponse]:
        """Send a request and yield its response with status 2xx and an unread body."""
        response = await self._send(method, path, headers or {}, options)
        if response.status == 401:
            # The credentials have expired; their files may contain new ones.
            response.release()
            self._access = None
            response = await self._send(method, path, headers or {}, options)
        try:
            if not 200 <= response.status < 300:
                raise await self._read_error(method, path, response)
            yield response
        finally:
            # A response that was not read completely would leave the connection unusable.
            response.close()

    async def _send(
        self, method: str, path: str, headers: Mapping[str, str], options: Mapping[str, Any]
    ) -> ClientResponse:
        access, authorization = await self._read_credentials()
        try:
            return await self._open_session().request(
                method,
                access.url + path,
                headers={**headers, **authorization},
                allow_redirects=False,
                **_make_connection_options(access),
                **options,
            )
        except aiohttp.ClientSSLError:
            self._access = None  # the CA file may have been replaced
            raise

    async def _read_credentials(self) -> tuple[ApiAccess, dict[str, str]]:
        """Return the access and the authorization headers."""
        try:
            if self._access is None:
                self._access = await asyncio.to_thread(self._load)
            access = self._access
            authorization = await asyncio.to_thread(access.read_authorization)
        except ConfigError as error:
            if not self._had_credentials:
                raise  # the access never worked, so it is not a temporary failure
            raise ClusterError(str(error)) from error
        self._had_credentials = True
        return access, {"Authorization": authorization} if authorization else {}

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(socket_factory=_make_keepalive_socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Clients that accept only JSON cannot read logs and other text.
                headers={"Accept": "application/json, */*", "User-Agent": "ludus"},
            )
        return self._session

    @contextmanager
    def _raise_cluster_errors(self, method: str, path: str) -> Iterator[None]:
        try:
            yield
        except orjson.JSONDecodeError as error:
            raise ClusterError(f"the response to {method} {path} is not JSON: {error}") from error
        except LineTooLong as error:
            raise ClusterError(
                f"a watch event from {path} is larger than {MAX_EVENT_BYTES} bytes"
            ) from error
        except aiohttp.WSServerHandshakeError as error:
            raise self._make_status_error(method, path, error.status, error.message) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            url = f" at {self._access.url}" if self._access is not None else ""
            raise ClusterError(
                f"no response from the API server{url} to {method} {path}:"
                f" {_describe_error(error)}" + self._find_remedy(_NO_RESPONSE)
            ) from error

    async def _read_error(self, method: str, path: str, response: ClientResponse) -> ClusterError:
        try:
            status = orjson.loads(await _read_body(response))
            reason = str(status.get("message", "")) if isinstance(status, dict) else ""
        except (orjson.JSONDecodeError, aiohttp.ClientError):
            reason = ""
        retry_after = response.headers.get("Retry-After", "")
        retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
        reason = reason or response.reason or ""
        return self._make_status_error(method, path, response.status, reason, retry_after_s)

    def _make_status_error(
        self, method: str, path: str, status: int, reason: str, retry_after_s: float = 0.0
    ) -> ClusterError:
        message = f"the API server refused {method} {path}: {status} {reason}"[:_MAX_MESSAGE_CHARS]
        return ClusterError(message + self._find_remedy(status), status, retry_after_s)

    def _find_remedy(self, status: int) -> str:
        remedy = self._remedies.get(status)
        return f"; {remedy}" if remedy else ""


def _make_connection_options(access: ApiAccess) -> dict[str, Any]:
    return {
        "ssl": access.tls or True,
        "server_hostname": access.tls_server_name or None,
        "proxy": access.proxy or None,
    }


def _describe_error(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    message = str(error) or "timed out"
    return f"{type(error).__name__}: {message}"[:_MAX_MESSAGE_CHARS]


def _make_keepalive_socket(address: Any) -> socket.socket:
    """Create a socket with keepalive probes, which detect a dead connection within a minute.

    A watch may receive nothing for minutes, so silence does not show that a connection is dead.
    """
    family, socket_type, protocol, *_ = address
    keepalive_socket = socket.socket(family, socket_type, protocol)
    keepalive_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, number in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 8), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            keepalive_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)
    return keepalive_socket


async def _read_body(response: ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_RESPONSE_BYTES:
            raise ClusterError(
                f"the response of {response.url.path} is larger than {MAX_RESPONSE_BYTES} bytes"
            )
    return bytes(body)


def _parse_event(line: bytes, path: str) -> WatchEvent:
    event = orjson.loads(line)
    event_type = event.get("type") if isinstance(event, dict) else None
    event_object = event.get("object") if isinstance(event, dict) else None
    if event_type == "ERROR" and isinstance(event_object, dict):
        status = event_object.get("code")
        message = f"the watch of {path} failed: {status} {event_object.get('message', '')}"
        status = status if isinstance(status, int) else 0
        raise ClusterError(message[:_MAX_MESSAGE_CHARS], status)
    if event_type not in set(EventType) or not isinstance(event_object, dict):
        raise ClusterError(f"expected a watch event from {path}, got type {str(event_type)[:40]!r}")
    return WatchEvent(EventType(str(event_type)), event_object)
