"""Detection of the kind of server at an HTTP address; also, HTTP refusals as typed errors.

    GET /openapi.json --> GET /schema, GET /metadata --> OpenEnv 0.2 or later: `/ws`
                              | both 404, and /reset exists
                              v
                          OpenEnv 0.1: stateful HTTP

A 0.1 server with its web page enabled accepts `/ws` too, for another purpose. The client therefore
never opens a socket only to find out whether it works.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from ludus.env.security.tracing import trace_headers
from ludus.env.transports.address import ServerAddress
from ludus.env.transports.interface import RemoteServer
from ludus.env.types import JsonObject
from ludus.proto.errors import (
    AuthenticationError,
    ConfigError,
    EnvError,
    RateLimitError,
    UnavailableError,
    error_from_wire,
)

_DISCOVERY_TIMEOUT_S = 10.0
_MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DiscoveredServer:
    """A server's own description over HTTP."""

    metadata: JsonObject
    schema: JsonObject
    is_legacy: bool = False
    """True for OpenEnv 0.1: one environment, used by plain HTTP calls."""


class HttpClient:
    """A blocking HTTP client that runs in threads, for discovery and for OpenEnv 0.1 servers.

    The standard library is enough for both, and keeps an HTTP library out of the SDK.
    """

    def __init__(self, server: RemoteServer) -> None:
        self._server = server
        self._headers = {"content-type": "application/json"}
        if server.authorization:
            self._headers["authorization"] = server.authorization
        handlers: list[urllib.request.BaseHandler] = [
            urllib.request.ProxyHandler({}),
            _NoRedirects(),
        ]
        context = server.ssl_context()
        if context is not None:
            handlers.append(_HttpsHandler(context, server.options.server_name))
        self._opener = urllib.request.build_opener(*handlers)

    async def discover(self) -> DiscoveredServer:
        """Return the server's description.

        Raises:
            UnavailableError: the server does not respond.
            AuthenticationError: the server refuses the token.
        """
        api, schema, metadata = await asyncio.gather(
            self._get_or_none("/openapi.json"),
            self._get_or_none("/schema"),
            self._get_or_none("/metadata"),
        )
        paths = (api or {}).get("paths") or {}
        is_legacy = schema is None and metadata is None and "/reset" in paths
        return DiscoveredServer(metadata or {}, schema or {}, is_legacy)

    async def call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        """Send a request and return the body of the response.

        Raises:
            urllib.error.HTTPError: the response has an error status.
            OSError: the server cannot be reached or is too slow.
        """
        request = urllib.request.Request(
            self._server.address.http_base + path,
            data=body,
            method=method,
            headers={**self._headers, **trace_headers()},
        )
        return await asyncio.to_thread(self._read, request, timeout_s)

    async def _get_or_none(self, path: str) -> JsonObject | None:
        """Return the JSON object at the path, or None if the server has no such path."""
        address = self._server.address
        timeout_s = min(self._server.options.timeout_s, _DISCOVERY_TIMEOUT_S)
        try:
            body = await self.call("GET", path, None, timeout_s)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403, 429, 503):
                wait = error.headers.get("retry-after")
                raise refusal(address, error.code, wait, error.read()) from None
            if 300 <= error.code < 400:
                raise ConfigError(
                    f"expected an environment server at {address}, got a redirect to"
                    f" {error.headers.get('location', '')}; use the address it leads to"
                ) from None
            return None
        except OSError as error:
            raise unreachable(address, error) from error
        try:
            content = json.loads(body)
        except ValueError as error:
            raise unreachable(address, error) from error
        return content if isinstance(content, dict) else {}

    def _read(self, request: urllib.request.Request, timeout_s: float) -> bytes:
        with self._opener.open(request, timeout=timeout_s) as response:
            body: bytes = response.read(_MAX_BODY_BYTES)
            return body


class _HttpsHandler(urllib.request.HTTPSHandler):
    """An HTTPS handler for servers whose certificate may have another name than their address."""

    def __init__(self, context: ssl.SSLContext, server_name: str | None) -> None:
        super().__init__(context=context)
        self._tls, self._server_name = context, server_name

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Send the request over a connection that checks `server_name`."""

        def connect(host: str, **arguments: Any) -> http.client.HTTPConnection:
            return _HttpsConnection(host, self._tls, self._server_name, **arguments)

        return self.do_open(connect, req)


class _HttpsConnection(http.client.HTTPConnection):
    default_port = http.client.HTTPS_PORT

    def __init__(
        self, host: str, context: ssl.SSLContext, server_name: str | None, **arguments: Any
    ) -> None:
        super().__init__(host, **arguments)
        self._tls, self._server_name = context, server_name

    def connect(self) -> None:
        """Connect and verify the server's certificate."""
        super().connect()
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name or self.host)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that rejects redirects, because a redirect could send the token elsewhere."""

    def redirect_request(self, *arguments: object) -> None:
        return None


def refusal(address: ServerAddress, status: int, wait: str | None, body: bytes) -> EnvError:
    """Return the error for an HTTP status. An error code in the body has precedence.

    Args:
        wait: value of the `retry-after` header.
    """
    wait = wait or ""
    retry_after_s = float(wait) if wait.isdecimal() else 0.0
    detail = _read_detail(body)
    if "code" in detail:
        wait_s = detail.get("retry_after_s") or retry_after_s
        return error_from_wire(str(detail["code"]), str(detail.get("message", "")), float(wait_s))
    if status in (401, 403):
        return AuthenticationError(f"{address} refused the token; pass its token to the client")
    if status == 429:
        return RateLimitError(
            f"{address} returned status 429: too many requests; try again later",
            retry_after_s=retry_after_s,
        )
    return UnavailableError(
        f"expected an environment server at {address}, got HTTP status {status};"
        " check the address and that the server runs",
        retry_after_s=retry_after_s,
    )


def unreachable(address: ServerAddress, error: Exception) -> UnavailableError:
    """Return the error for a server that does not respond."""
    return UnavailableError(
        f"could not reach an environment server at {address}: {error}; check the address and that"
        " the server runs"
    )


def _read_detail(body: bytes) -> JsonObject:
    try:
        content = json.loads(body)
    except ValueError:
        return {}
    detail = content.get("detail") if isinstance(content, dict) else None
    return detail if isinstance(detail, dict) else {}
