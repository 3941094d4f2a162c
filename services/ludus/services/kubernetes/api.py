"""The asynchronous client of the Kubernetes API server, for gateways and for runs.

    gateway   endpointslices, leases, pods, sandboxes      --+
                                                             +-->  KubernetesApi  -->  API server
    runs      RayJobs, ConfigMaps, logs, exec              --+        |
                                                             ApiAccess: address, CA, credentials

Requests use aiohttp on the caller's event loop. The official client's watch blocks one thread per
stream, cannot be cancelled while the stream is silent, and converts each object to models, which
takes tens of milliseconds for a large slice. Here a stream is an asynchronous iterator of JSON
objects. kubernetes_asyncio needs 0.8 s and 37 MiB more to import. Its watch requests a version
again that is gone, it reads the CA only once, and its leader election relies on the wall clock and
keeps leading while the API server is silent.

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
from aiohttp.http_exceptions import LineTooLong

from ludus.proto.errors import ClusterError, ConfigError
from ludus.services.kubernetes.access import ApiAccess, load_access

JsonObject = dict[str, Any]

_EXEC_PROTOCOL = "v4.channel.k8s.io"
"""Subprotocol of pods/exec. The first byte of each message is its stream."""
_STDOUT, _STDERR, _STATUS = b"\x01", b"\x02", b"\x03"
"""The streams of pods/exec; the Status follows the command's exit."""
_MAX_STDERR_BYTES = 2000
_MERGE_PATCH = "application/merge-patch+json"
MAX_RESPONSE_BYTES = 64 * 2**20
MAX_EVENT_BYTES = 16 * 2**20
_MAX_REASON_CHARS = 500
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
    """The kind of change in a watch event."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One event of a watch; the object of a bookmark contains only its resourceVersion."""

    type: EventType
    object: JsonObject


def resource_path(api_version: str, namespace: str, plural: str, name: str = "") -> str:
    """Return the path of a kind of object, or of one object if `name` is set.

    Args:
        api_version: `v1` or `group/v1`.
        namespace: empty for objects without namespace or in all namespaces.
    """
    path = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    if namespace:
        path += f"/namespaces/{quote(namespace, safe='')}"
    path += f"/{plural}"
    return f"{path}/{quote(name, safe='')}" if name else path


class KubernetesApi:
    """A client of one API server; a failed request raises a ClusterError with the status.

    A ConfigError means that the access could never be loaded. Files that are missing later, while
    the kubelet replaces them, are a temporary failure.

    Args:
        load: returns the access; called again after refused credentials or certificates.
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
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._connect_timeout_s = timeout_s
        self._access: ApiAccess | None = None
        self._had_credentials = False
        self._session: aiohttp.ClientSession | None = None

    async def read(self, path: str, query: Mapping[str, str] | None = None) -> JsonObject:
        """Return the object or list at a path."""
        return await self._call("GET", path, query=query)

    async def create(
        self, path: str, body: JsonObject, query: Mapping[str, str] | None = None
    ) -> JsonObject:
        """Create an object in the list at a path, and return the created object."""
        return await self._call("POST", path, body=body, query=query)

    async def replace(self, path: str, body: JsonObject) -> JsonObject:
        """Replace an object and return the new one; status 409 if its resourceVersion differs."""
        return await self._call("PUT", path, body=body)

    async def merge(self, path: str, body: JsonObject) -> JsonObject:
        """Apply a JSON merge patch and return the patched object."""
        return await self._call("PATCH", path, body=body, content_type=_MERGE_PATCH)

    async def delete(self, path: str, body: JsonObject | None = None) -> JsonObject:
        """Delete an object, and return the object or a Status."""
        return await self._call("DELETE", path, body=body)

    async def lines(
        self, path: str, query: Mapping[str, str], *, silence_s: float | None = None
    ) -> AsyncGenerator[str]:
        """Yield the lines of a text, such as a pod's log, until the server ends the stream.

        A caller that stops early must close the generator (`contextlib.aclosing`).

        Args:
            silence_s: seconds without data after which the stream ends; None means no limit.
        """
        timeout = aiohttp.ClientTimeout(sock_connect=self._connect_timeout_s, sock_read=silence_s)
        with self._raise_cluster_errors("GET", path), suppress(aiohttp.SocketTimeoutError):
            async with self._request("GET", path, query=query, timeout=timeout) as response:
                content, limit = response.content, MAX_EVENT_BYTES
                while line := await content.readline(max_line_length=limit):
                    yield line.decode(errors="replace").rstrip("\r\n")

    async def command_output(
        self, namespace: str, pod: str, container: str, command: Sequence[str]
    ) -> AsyncGenerator[bytes]:
        """Run a command in a container of a pod and yield its stdout in pieces.

        A caller that stops early must close the generator (`contextlib.aclosing`).

        Raises:
            ClusterError: the command could not be run, or it failed. The message contains its
                stderr.
        """
        path = f"{resource_path('v1', namespace, 'pods', pod)}/exec"
        query = [("container", container), ("stdout", "true"), ("stderr", "true")]
        query += [("command", part) for part in command]
        stderr, status = b"", None
        with self._raise_cluster_errors("GET", path):
            access, headers = await self._credentials()
            async with self._open_session().ws_connect(
                access.url + path,
                params=query,
                protocols=(_EXEC_PROTOCOL,),
                headers=headers,
                max_msg_size=MAX_EVENT_BYTES,
                heartbeat=_HEARTBEAT_S,
                **_connection_options(access),
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
            raise ClusterError(
                f"the connection to pod {namespace}/{pod} closed before the command finished"
            )
        if status.get("status") != "Success":
            reason = stderr.decode(errors="replace").strip() or status.get("message")
            raise ClusterError(
                f"a command in pod {namespace}/{pod} failed: {reason or 'no reason given'}"
            )

    async def watch(
        self, path: str, *, version: str, timeout_s: int, query: Mapping[str, str] | None = None
    ) -> AsyncGenerator[WatchEvent]:
        """Yield the changes of a list after a resourceVersion, until the server ends the stream.

        A caller that stops early must close the generator (`contextlib.aclosing`).

        Raises:
            ClusterError: status 410 if the version is too old, so the list must be read again.
        """
        watch_query = {
            **(query or {}),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(timeout_s),
        }
        timeout = aiohttp.ClientTimeout(
            total=timeout_s + _WATCH_GRACE_S, sock_connect=self._connect_timeout_s
        )
        with self._raise_cluster_errors("GET", path):
            async with self._request("GET", path, query=watch_query, timeout=timeout) as response:
                content, limit = response.content, MAX_EVENT_BYTES
                while line := await content.readline(max_line_length=limit):
                    if not line.isspace():
                        yield _parse_event(line, path)

    async def close(self) -> None:
        """Close all requests."""
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
        with self._raise_cluster_errors(method, path):
            async with self._request(
                method, path, query=query, data=data, headers=headers, timeout=self._timeout
            ) as response:
                body_json = orjson.loads(await _read_body(response))
        if not isinstance(body_json, dict):
            raise ClusterError(f"expected an object from {path}, got {type(body_json).__name__}")
        return body_json

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its response with status 2xx and an unread body."""
        options["params"] = options.pop("query", None)
        response = await self._send(method, path, headers or {}, options)
        if response.status == 401:
            # Credentials expire, and the files may be newer than the loaded credentials.
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
    ) -> aiohttp.ClientResponse:
        access, authorization = await self._credentials()
        try:
            return await self._open_session().request(
                method,
                access.url + path,
                headers={**headers, **authorization},
                allow_redirects=False,
                **_connection_options(access),
                **options,
            )
        except aiohttp.ClientSSLError:
            self._access = None  # the CA file may have been replaced
            raise

    async def _credentials(self) -> tuple[ApiAccess, dict[str, str]]:
        """Return the access and the authorization headers."""
        try:
            if self._access is None:
                self._access = await asyncio.to_thread(self._load)
            access = self._access
            authorization = await asyncio.to_thread(access.authorization)
        except ConfigError as error:
            if not self._had_credentials:
                raise  # the access never worked, so a person must correct it
            raise ClusterError(str(error)) from error
        self._had_credentials = True
        return access, {"Authorization": authorization} if authorization else {}

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(socket_factory=_make_keepalive_socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                # An API server refuses logs and other text to clients that accept only JSON.
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
            raise self._status_error(method, path, error.status, error.message) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ClusterError(
                f"no response from the API server{self._shown_url()} to {method} {path}:"
                f" {_describe_error(error)}" + self._remedy(_NO_RESPONSE)
            ) from error

    async def _read_error(
        self, method: str, path: str, response: aiohttp.ClientResponse
    ) -> ClusterError:
        try:
            status = orjson.loads(await _read_body(response))
            reason = str(status.get("message", "")) if isinstance(status, dict) else ""
        except (orjson.JSONDecodeError, aiohttp.ClientError):
            reason = ""
        retry_after = response.headers.get("Retry-After", "")
        return self._status_error(
            method,
            path,
            response.status,
            reason or response.reason or "",
            float(retry_after) if retry_after.isdecimal() else 0.0,
        )

    def _status_error(
        self, method: str, path: str, status: int, reason: str, retry_after_s: float = 0.0
    ) -> ClusterError:
        message = f"the API server refused {method} {path}: {status} {reason}"
        return ClusterError(
            message[: _MAX_REASON_CHARS + 200] + self._remedy(status), status, retry_after_s
        )

    def _shown_url(self) -> str:
        return f" at {self._access.url}" if self._access is not None else ""

    def _remedy(self, status: int) -> str:
        remedy = self._remedies.get(status)
        return f"; {remedy}" if remedy else ""


def _connection_options(access: ApiAccess) -> dict[str, Any]:
    return {
        "ssl": access.tls or True,
        "server_hostname": access.tls_server_name or None,
        "proxy": access.proxy or None,
    }


def _describe_error(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    text = str(error) or "timed out"
    return f"{type(error).__name__}: {text}"[:_MAX_REASON_CHARS]


def _make_keepalive_socket(address: Any) -> socket.socket:
    """Create a socket with keepalive probes, which detect a dead peer within a minute.

    A watch may be silent for minutes. Without probes a dead connection looks the same.
    """
    family, kind, protocol = address[:3]
    keepalive_socket = socket.socket(family, kind, protocol)
    keepalive_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 8), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            keepalive_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return keepalive_socket


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    parts = bytearray()
    async for part in response.content.iter_any():
        parts += part
        if len(parts) > MAX_RESPONSE_BYTES:
            raise ClusterError(
                f"the response of {response.url.path} is larger than {MAX_RESPONSE_BYTES} bytes"
            )
    return bytes(parts)


def _parse_event(line: bytes, path: str) -> WatchEvent:
    event = orjson.loads(line)
    kind = event.get("type") if isinstance(event, dict) else None
    body = event.get("object") if isinstance(event, dict) else None
    if kind == "ERROR" and isinstance(body, dict):
        status = body.get("code")
        raise ClusterError(
            f"the watch of {path} failed: {status}"
            f" {str(body.get('message', ''))[:_MAX_REASON_CHARS]}",
            status if isinstance(status, int) else 0,
        )
    if kind not in set(EventType) or not isinstance(body, dict):
        raise ClusterError(f"expected a watch event from {path}, got type {str(kind)[:40]!r}")
    return WatchEvent(EventType(str(kind)), body)
