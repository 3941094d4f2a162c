"""The one file of the gateway that talks to a Kubernetes API server.

    source         GET  endpointslices, then watch  --+
    leadership     GET, POST, PUT  one Lease        --+-->  KubernetesApi  -->  API server
    deletion_cost  PATCH  annotations of pods       --+        |
                                                      ApiAccess: address, CA, credentials

Requests go through aiohttp, on the gateway's own event loop. The official client's watch
blocks a thread for each stream, cannot be cancelled while the stream is silent, and turns
each object into models (tens of milliseconds for a large slice); here a stream is a plain
asynchronous iterator of JSON objects. kubernetes_asyncio takes 0.8 s and 37 MiB more to
import; its watch asks again for a version that is gone, it reads the CA once, and its election
trusts the wall clock and leads on while the API server is silent.

The official client still reads kubeconfig files (contexts, certificates, exec plugins, OIDC):
that is code nobody should write twice. In a pod it is not even imported: there, access is an
address, a CA file and a token file. The token file is read again before each request, because
the kubelet replaces it about hourly.

What the gateway's Role needs, in its own namespace and nothing beyond:

    discovery.k8s.io      endpointslices   list, watch
    ""                    pods             patch               (pod deletion cost)
    coordination.k8s.io   leases           create
    coordination.k8s.io   leases           get, update         (resourceNames: the lease's name)

Credentials appear in no message, log or repr, and redirects are not followed: the token goes
to the API server alone.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import orjson
from aiohttp.http_exceptions import LineTooLong
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from ludus.proto.errors import ClusterError, ConfigError

JsonObject = dict[str, Any]

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MERGE_PATCH = "application/merge-patch+json"
_MAX_ANSWER_BYTES = 64 * 2**20
_MAX_EVENT_BYTES = 16 * 2**20
_MAX_REASON_CHARS = 500
_WATCH_GRACE_S = 15.0
"""What a watch may last beyond the time that the server was asked to end it after."""
_WAY_OUT = {
    401: "; check the service account's token, or the user of the kubeconfig",
    403: "; grant it in the gateway's Role",
    404: "; check the namespace and the name",
}


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


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """How to reach an API server, and as whom."""

    url: str
    authorization: Callable[[], str] = field(repr=False)
    """The Authorization header, empty for none. It may read a file or run a plugin, so it is
    called in a thread, before each request."""
    tls: ssl.SSLContext | None = None
    tls_server_name: str = ""
    """The name to expect in the server's certificate, where it is not the address."""
    proxy: str = field(default="", repr=False)


def load_access(kubeconfig: Path | None = None, context: str = "") -> ApiAccess:
    """The access of this pod, or that of a kubeconfig where one is named or there is no pod.

    Raises:
        ConfigError: neither can be read.
    """
    if kubeconfig is None and not context and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return in_cluster_access()
    return kubeconfig_access(kubeconfig, context)


def in_cluster_access(
    folder: Path = _SERVICE_ACCOUNT, environ: Mapping[str, str] = os.environ
) -> ApiAccess:
    """The access that Kubernetes gives a pod.

    Raises:
        ConfigError: the address, the CA file or the token file is missing.
    """
    token_file, ca_file = folder / "token", folder / "ca.crt"
    try:
        host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
        token_file.read_bytes()
        tls = ssl.create_default_context(cafile=str(ca_file))
    except (KeyError, OSError) as error:
        raise ConfigError(
            f"expected a service account in {folder}, got {type(error).__name__} ({error}); set"
            " automountServiceAccountToken on the pod, or name a kubeconfig"
        ) from error
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return ApiAccess(
        url=f"https://{authority}",
        authorization=lambda: f"Bearer {token_file.read_text(encoding='utf-8').strip()}",
        tls=tls,
    )


def kubeconfig_access(path: Path | None = None, context: str = "") -> ApiAccess:
    """The access of a kubeconfig's context; KUBECONFIG or ~/.kube/config without a path.

    Raises:
        ConfigError: the file or the context cannot be read.
    """
    # Imported here because it costs a third of a second, which a pod would pay for nothing.
    import yaml
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, load_kube_config

    configuration = Configuration()
    try:
        load_kube_config(
            config_file=None if path is None else str(path),
            context=context or None,
            client_configuration=configuration,
        )
        tls = _tls_of(configuration)
    except (ConfigException, OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        # What a parser says may quote a line of the file, and such lines hold tokens.
        is_harmless = isinstance(error, ConfigException | OSError)
        raise ConfigError(
            f"expected a kubeconfig at {path or 'KUBECONFIG or ~/.kube/config'}, got"
            f" {error if is_harmless else type(error).__name__};"
            " see: kubectl config get-contexts"
        ) from (error if is_harmless else None)
    host = urlsplit(configuration.host).hostname or ""
    direct = {"no": configuration.no_proxy or ""}
    is_direct = urllib.request.proxy_bypass_environment(host, direct)  # type: ignore[attr-defined]

    def authorization() -> str:
        # The configuration renews a token that expires each time that it is asked.
        try:
            settings = configuration.auth_settings().get("BearerToken")
        except ConfigException as error:
            raise ConfigError(f"expected credentials from the kubeconfig, got: {error}") from error
        return str(settings["value"] or "") if settings else ""

    return ApiAccess(
        url=configuration.host.rstrip("/"),
        authorization=authorization,
        tls=tls,
        tls_server_name=configuration.tls_server_name or "",
        proxy="" if is_direct else configuration.proxy or "",
    )


def _tls_of(configuration: Any) -> ssl.SSLContext:
    tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
    if configuration.cert_file:
        tls.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    return tls


def resource_path(api_version: str, namespace: str, plural: str, name: str = "") -> str:
    """The path of a kind of object in a namespace, or of one of them: `v1` or `group/v1`."""
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    path = f"{root}/namespaces/{quote(namespace, safe='')}/{plural}"
    return f"{path}/{quote(name, safe='')}" if name else path


class KubernetesApi:
    """Requests to one API server; each raises a ClusterError with the status when it fails.

    Only access that cannot be loaded from the start is a ConfigError: files that are missing
    later on, while the kubelet replaces them, are trouble that passes.

    Args:
        load: gives the access; called again when credentials or certificates were refused.
        timeout_s: for each request, watches apart.
    """

    def __init__(
        self, load: Callable[[], ApiAccess] = load_access, *, timeout_s: float = 10.0
    ) -> None:
        self._load = load
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._connect_timeout_s = timeout_s
        self._access: ApiAccess | None = None
        self._had_credentials = False
        self._session: aiohttp.ClientSession | None = None

    async def read(self, path: str, query: Mapping[str, str] | None = None) -> JsonObject:
        """The object or list at a path."""
        return await self._call("GET", path, query=query)

    async def create(self, path: str, body: JsonObject) -> JsonObject:
        """The object as it was created in the list at a path."""
        return await self._call("POST", path, body=body)

    async def replace(self, path: str, body: JsonObject) -> JsonObject:
        """The object as it was stored; status 409 when it is not at `body`'s resourceVersion."""
        return await self._call("PUT", path, body=body)

    async def merge(self, path: str, body: JsonObject) -> JsonObject:
        """The object after a JSON merge patch."""
        return await self._call("PATCH", path, body=body, content_type=_MERGE_PATCH)

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
        with _as_cluster_errors("GET", path):
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
        with _as_cluster_errors(method, path):
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
                raise await _refusal(method, path, response)
            yield response
        finally:
            # An answer that was not read to its end would leave the connection unusable.
            response.close()

    async def _send(
        self, method: str, path: str, headers: Mapping[str, str], options: Mapping[str, Any]
    ) -> aiohttp.ClientResponse:
        access, authorization = await self._credentials()
        sent = {**headers, **({"Authorization": authorization} if authorization else {})}
        try:
            return await self._open_session().request(
                method,
                access.url + path,
                headers=sent,
                ssl=access.tls or True,
                server_hostname=access.tls_server_name or None,
                proxy=access.proxy or None,
                allow_redirects=False,
                **options,
            )
        except aiohttp.ClientSSLError:
            self._access = None  # the CA may have been replaced on the disk
            raise

    async def _credentials(self) -> tuple[ApiAccess, str]:
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
        return access, authorization

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(socket_factory=_lively_socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": "application/json", "User-Agent": "ludus-gateway"},
            )
        return self._session


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


@contextmanager
def _as_cluster_errors(method: str, path: str) -> Iterator[None]:
    try:
        yield
    except orjson.JSONDecodeError as error:
        raise ClusterError(f"expected JSON from {method} {path}, got: {error}") from error
    except LineTooLong as error:
        raise ClusterError(
            f"expected watch events of at most {_MAX_EVENT_BYTES} bytes from {path}, got more"
        ) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
        raise ClusterError(
            f"expected an answer from the API server to {method} {path}, got {reason}; it is"
            " tried again"
        ) from error


async def _refusal(method: str, path: str, response: aiohttp.ClientResponse) -> ClusterError:
    try:
        said = orjson.loads(await _whole(response))
        reason = str(said.get("message", "")) if isinstance(said, dict) else ""
    except (orjson.JSONDecodeError, aiohttp.ClientError):
        reason = ""
    status = response.status
    retry_after = response.headers.get("Retry-After", "")
    return ClusterError(
        f"expected the API server to accept {method} {path}, got {status}"
        f" {reason or response.reason or ''}"[: _MAX_REASON_CHARS + 200]
        + _WAY_OUT.get(status, ""),
        status,
        float(retry_after) if retry_after.isdecimal() else 0.0,
    )


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
