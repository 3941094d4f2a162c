"""HTTP requests to a server: detection of its version, typed errors, and the OpenEnv 0.1 wire.

    GET /openapi.json --> GET /schema, GET /metadata --> OpenEnv 0.2 or later: `/ws`
                              | both 404, and /reset exists
                              v
                          OpenEnv 0.1: stateful HTTP

An OpenEnv 0.1 server with its web page enabled also has a `/ws`, for another purpose. The client
therefore never detects the version by opening a WebSocket.
"""

from __future__ import annotations

import asyncio
import http.client
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from ludus.env.security.tracing import make_trace_headers
from ludus.env.text.unicode import load_json
from ludus.env.transports.address import RemoteServer, ServerAddress
from ludus.env.types import JsonObject
from ludus.proto.errors import (
    AuthenticationError,
    ConfigError,
    EnvError,
    ExecutionError,
    InvalidCallError,
    RateLimitError,
    UnavailableError,
    make_wire_error,
)

_DISCOVERY_TIMEOUT_S = 10.0
_MAX_BODY_BYTES = 64 * 1024 * 1024
_ABSENT_STATUSES = (404, 405, 501)
"""Statuses of a server that has no such path."""


class DiscoveredServer(NamedTuple):
    """A server's responses to the requests for its description."""

    metadata: JsonObject
    schema: JsonObject
    is_legacy: bool
    """True for OpenEnv 0.1, which has one environment and only plain HTTP calls."""


class HttpReply(NamedTuple):
    """The response to a request."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


class HttpClient:
    """A client for HTTP requests, each on a new connection.

    The client ignores proxies. It follows no redirects, which could send the token elsewhere.
    """

    def __init__(self, server: RemoteServer) -> None:
        self.server = server
        self._ssl_context = server.make_ssl_context()
        self._headers = {"content-type": "application/json"}
        if server.authorization:
            self._headers["authorization"] = server.authorization

    async def discover(self) -> DiscoveredServer:
        """Return the server's description.

        Raises:
            UnavailableError: the server does not respond.
            AuthenticationError: the server refuses the token.
        """
        paths = ("/openapi.json", "/schema", "/metadata")
        requests = map(self._get_json_or_none, paths)
        replies: list[Any] = await asyncio.gather(*requests, return_exceptions=True)
        for reply in replies:  # after all have ended, so that no exception is lost and logged
            if isinstance(reply, BaseException):
                raise reply
        openapi, schema, metadata = replies
        address = self.server.address
        if replies == [None] * len(paths) and address.path:
            raise ConfigError(
                f"expected an environment server at {address}, got status 404 for its description;"
                f" remove or correct the path {address.path}"
            )
        paths_json = (openapi or {}).get("paths")
        has_reset = isinstance(paths_json, dict) and "/reset" in paths_json
        has_description = schema is not None or metadata is not None
        is_legacy = has_reset and not has_description and not address.is_websocket
        return DiscoveredServer(metadata or {}, schema or {}, is_legacy)

    async def request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> HttpReply:
        """Send a request and return the response.

        Raises:
            TimeoutError: the server is too slow.
            UnavailableError: the server cannot be reached.
        """
        headers = {**self._headers, **make_trace_headers()}
        url_path = self.server.address.path + path
        try:
            return await asyncio.to_thread(self._send, method, url_path, body, headers, timeout_s)
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise make_unreachable_error(self.server.address, error) from error

    async def _get_json_or_none(self, path: str) -> JsonObject | None:
        """Return the JSON object at the path, or None if the server has no such path."""
        address = self.server.address
        timeout_s = min(self.server.options.timeout_s, _DISCOVERY_TIMEOUT_S)
        try:
            reply = await self.request("GET", path, None, timeout_s)
        except TimeoutError as error:
            raise make_unreachable_error(address, error) from error
        if reply.status in _ABSENT_STATUSES:
            return None
        if reply.status >= 400:  # an ingress without a ready server also returns 500, 502 or 504
            retry_after = reply.headers.get("retry-after")
            raise make_refusal_error(address, reply.status, retry_after, reply.body)
        if 300 <= reply.status < 400:
            raise ConfigError(
                f"expected an environment server at {address}, got a redirect to"
                f" {reply.headers.get('location', '')}; connect to that address"
            )
        reply_json = _parse_json(address, reply.body)
        return reply_json if isinstance(reply_json, dict) else {}

    def _send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> HttpReply:
        netloc = urlsplit(f"//{self.server.address.authority}")
        host, port = (netloc.hostname or "", netloc.port or (443 if self._ssl_context else 80))
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        try:
            connection.connect()
            if self._ssl_context is not None:
                server_name = self.server.options.server_name or host
                connection.sock = self._ssl_context.wrap_socket(
                    connection.sock, server_hostname=server_name
                )
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return HttpReply(response.status, response.headers, response.read(_MAX_BODY_BYTES))
        finally:
            connection.close()


class HttpChannel:
    """A channel to an OpenEnv 0.1 server, whose callers all play in the same episode.

    POST /reset {}               --> {"observation", "reward", "done"}
    POST /step  {"action": ...}  --> the same
    GET  /state                  --> the state

    The server reports every failure as status 500 without a reason.
    """

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def call(self, message: JsonObject) -> JsonObject:
        """Send a message of OpenEnv's WebSocket as an HTTP request, and return the response's JSON.

        Raises:
            TimeoutError: the server is too slow.
        """
        method, path, body = "POST", f"/{message['type']}", None
        match message["type"]:
            case "reset":
                body = orjson.dumps(message["data"])
            case "step":
                body = orjson.dumps({"action": message["data"]})
            case _:
                method = "GET"
        server = self._client.server
        reply = await self._client.request(method, path, body, server.options.timeout_s)
        if reply.status >= 300:
            raise _make_call_error(server.address, path, reply)
        reply_json = _parse_json(server.address, reply.body)
        if not isinstance(reply_json, dict):
            raise ExecutionError(f"expected a JSON object from {path}, got {reply.body[:80]!r}")
        return reply_json

    async def close(self) -> None:
        """Do nothing: the server keeps its environment."""


def make_refusal_error(
    address: ServerAddress, status: int, retry_after: str | None, body: bytes
) -> EnvError:
    """Return the error for an HTTP status. An error code in the body takes precedence.

    Args:
        retry_after: value of the `retry-after` header.
    """
    retry_after = retry_after or ""
    retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
    detail = _read_error_detail(body)
    if "code" in detail:
        wait_s = detail.get("retry_after_s") or retry_after_s
        return make_wire_error(str(detail["code"]), str(detail.get("message", "")), float(wait_s))
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


def make_unreachable_error(address: ServerAddress, error: Exception) -> UnavailableError:
    """Return the error for a server that does not respond."""
    return UnavailableError(
        f"could not reach an environment server at {address}: {error}; check the address and that"
        " the server runs"
    )


def _make_call_error(address: ServerAddress, path: str, reply: HttpReply) -> EnvError:
    if reply.status == 500:
        return ExecutionError(
            f"{path} failed on {address}: the environment raised an error, or the action is"
            " not valid (OpenEnv 0.1 does not report which); see the server's log"
        )
    if reply.status in (400, 422):
        return InvalidCallError(f"{path} was refused: {reply.body[:500].decode(errors='replace')}")
    return make_refusal_error(address, reply.status, reply.headers.get("retry-after"), reply.body)


def _parse_json(address: ServerAddress, body: bytes) -> Any:
    try:
        return load_json(body)
    except (ValueError, RecursionError) as error:
        raise make_unreachable_error(address, error) from error


def _read_error_detail(body: bytes) -> JsonObject:
    try:
        reply_json = load_json(body)
    except (ValueError, RecursionError):
        return {}
    detail = reply_json.get("detail") if isinstance(reply_json, dict) else None
    return detail if isinstance(detail, dict) else {}
