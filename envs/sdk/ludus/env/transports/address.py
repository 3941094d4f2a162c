"""Addresses of environment servers and gateways, with optional credentials.

grpc://host:port[/NAME]            grpcs:// with TLS; NAME is an environment at a gateway
http://[user:token@]host:port[/path]   likewise https://, ws:// and wss://
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from ludus.proto.errors import ConfigError

GRPC_SCHEMES = ("grpc", "grpcs")
HTTP_SCHEMES = ("http", "https", "ws", "wss")
_SECURE_SCHEMES = ("grpcs", "https", "wss")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A parsed server address. Its `str` contains no credentials."""

    scheme: str
    authority: str
    """Host and port."""
    path: str = ""
    """Path with a leading slash and no trailing slash."""
    credentials: str | None = field(default=None, repr=False)
    """Value of the `authorization` header, if the address contains a user and a token."""

    @property
    def is_secure(self) -> bool:
        """True if the connection uses TLS."""
        return self.scheme in _SECURE_SCHEMES

    @property
    def is_grpc(self) -> bool:
        """True for the gRPC wire."""
        return self.scheme in GRPC_SCHEMES

    @property
    def is_websocket(self) -> bool:
        """True if the address explicitly requests OpenEnv's WebSocket."""
        return self.scheme in ("ws", "wss")

    @property
    def environment(self) -> str:
        """The environment that a gRPC address names; empty if it names none."""
        return self.path.removeprefix("/")

    @property
    def http_base(self) -> str:
        """The base URL of OpenEnv's HTTP endpoints."""
        return f"{'https' if self.is_secure else 'http'}://{self.authority}{self.path}"

    @property
    def ws_base(self) -> str:
        """The base URL of OpenEnv's WebSocket."""
        return f"{'wss' if self.is_secure else 'ws'}://{self.authority}{self.path}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def parse_address(address: str) -> ServerAddress:
    """Parse an address.

    Raises:
        ConfigError: the address is malformed. The message contains no credentials.
    """
    try:
        parts = urlsplit(address)
    except ValueError:
        raise _malformed_error(address, "a host and a port") from None
    userinfo, _, authority = parts.netloc.rpartition("@")
    if parts.scheme not in (*GRPC_SCHEMES, *HTTP_SCHEMES) or not authority:
        raise _malformed_error(address, "a scheme out of grpc, grpcs, http, https, ws, wss")
    if parts.query or parts.fragment:
        raise _malformed_error(address, "no query and no fragment")
    path = parts.path.rstrip("/")
    if parts.scheme in HTTP_SCHEMES:
        path = path.removesuffix("/ws")
    elif path.count("/") > 1:
        raise _malformed_error(address, "at most one name after the port")
    return ServerAddress(parts.scheme, authority, path, _basic_credentials(userinfo))


def _basic_credentials(userinfo: str) -> str | None:
    if not userinfo:
        return None
    user, _, password = userinfo.partition(":")
    credentials = f"{unquote(user)}:{unquote(password)}"
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


def _malformed_error(address: str, expected: str) -> ConfigError:
    scheme, separator, location = address.rpartition("://")
    without_credentials = f"{scheme}{separator}{location.rpartition('@')[2]}"
    return ConfigError(
        "expected an address like grpc://host:port or http://host:port with"
        f" {expected}; got {without_credentials.partition('?')[0]!r}"
    )
