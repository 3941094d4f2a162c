"""What kind of server answers at an HTTP address, and its refusals as typed errors.

    GET /openapi.json --> GET /schema, GET /metadata --> OpenEnv 0.2 or later: `/ws`
                              | 404, and /reset is there
                              v
                          OpenEnv 0.1: stateful HTTP

A 0.1 server with its web page on accepts `/ws` too and means something else by it, so
sockets are never tried out.
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
from ludus.env.transports.interface import ConnectOptions
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
    """What a server said of itself over HTTP."""

    metadata: JsonObject
    schema: JsonObject
    is_legacy: bool = False
    """OpenEnv 0.1: one environment, driven by plain HTTP calls."""


class HttpClient:
    """Blocking HTTP in threads, for discovery and for servers that speak nothing else."""

    def __init__(self, options: ConnectOptions) -> None:
        self._options = options
        self._headers = {"content-type": "application/json"}
        if options.authorization:
            self._headers["authorization"] = options.authorization
        handlers: list[urllib.request.BaseHandler] = [
            urllib.request.ProxyHandler({}),
            _NoRedirects(),
        ]
        context = options.ssl_context()
        if context is not None:
            handlers.append(_Https(context, options.server_name))
        self._opener = urllib.request.build_opener(*handlers)

    async def discover(self) -> DiscoveredServer:
        """What the server is.

        Raises:
            UnavailableError: it does not answer.
            AuthenticationError: it refuses the token.
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
        """The body of the answer.

        Raises:
            urllib.error.HTTPError: its status is an error.
            OSError: the server cannot be reached or is too slow.
        """
        request = urllib.request.Request(
            self._options.address.http_base + path,
            data=body,
            method=method,
            headers={**self._headers, **trace_headers()},
        )
        return await asyncio.to_thread(self._read, request, timeout_s)

    async def _get_or_none(self, path: str) -> JsonObject | None:
        """The JSON object at the path; None when the server has no such path."""
        timeout_s = min(self._options.timeout_s, _DISCOVERY_TIMEOUT_S)
        try:
            body = await self.call("GET", path, None, timeout_s)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403, 429, 503):
                wait = error.headers.get("retry-after")
                raise refusal(self._options, error.code, wait, error.read()) from None
            if 300 <= error.code < 400:
                raise ConfigError(
                    f"expected an environment server at {self._options.address}, got a redirect"
                    f" to {error.headers.get('location', '')}; use the address it leads to"
                ) from None
            return None
        except OSError as error:
            raise unreachable(self._options, error) from error
        try:
            found = json.loads(body)
        except ValueError as error:
            raise unreachable(self._options, error) from error
        return found if isinstance(found, dict) else {}

    def _read(self, request: urllib.request.Request, timeout_s: float) -> bytes:
        with self._opener.open(request, timeout=timeout_s) as response:
            body: bytes = response.read(_MAX_BODY_BYTES)
            return body


class _Https(urllib.request.HTTPSHandler):
    """HTTPS to a server whose certificate may have another name than its address."""

    def __init__(self, context: ssl.SSLContext, server_name: str | None) -> None:
        super().__init__(context=context)
        self._tls, self._server_name = context, server_name

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """The answer."""

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
        """Connect, and let the server show who it is."""
        super().connect()
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name or self.host)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to wherever it points."""

    def redirect_request(self, *arguments: object) -> None:
        return None


def refusal(options: ConnectOptions, status: int, wait: str | None, body: bytes) -> EnvError:
    """The error that an HTTP status stands for; a code in the body has precedence.

    Args:
        wait: the value of the `retry-after` header.
    """
    wait = wait or ""
    retry_after_s = float(wait) if wait.isdecimal() else 0.0
    detail = _detail(body)
    if "code" in detail:
        asked_s = detail.get("retry_after_s") or retry_after_s
        return error_from_wire(str(detail["code"]), str(detail.get("message", "")), float(asked_s))
    if status in (401, 403):
        return AuthenticationError(
            f"{options.address} refused the token; pass its token to the client"
        )
    if status == 429:
        return RateLimitError(
            f"{options.address} answered 429: too many requests; try again later",
            retry_after_s=retry_after_s,
        )
    return UnavailableError(
        f"expected an environment server at {options.address}, got HTTP status {status};"
        " check the address and that the server runs",
        retry_after_s=retry_after_s,
    )


def unreachable(options: ConnectOptions, error: Exception) -> UnavailableError:
    """The error for a server that does not answer."""
    return UnavailableError(
        f"expected an environment server at {options.address}, could not reach it:"
        f" {error}; check the address and that the server runs"
    )


def _detail(body: bytes) -> JsonObject:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    detail = found.get("detail") if isinstance(found, dict) else None
    return detail if isinstance(detail, dict) else {}
