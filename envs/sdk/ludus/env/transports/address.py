"""Addresses of environment servers and gateways, and the options for connecting to them.

grpc://host:port[/NAME]            grpcs:// with TLS; NAME is an environment at a gateway
http://[user:token@]host:port[/path]   likewise https://, ws:// and wss://
"""

from __future__ import annotations

import base64
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import grpc

from ludus.env.security.tls import TlsFiles, build_channel_credentials, build_client_context
from ludus.proto.errors import ConfigError
from ludus.proto.paths import parse_path

GRPC_SCHEMES = ("grpc", "grpcs")
HTTP_SCHEMES = ("http", "https", "ws", "wss")
_TLS_SCHEMES = ("grpcs", "https", "wss")


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
    def uses_tls(self) -> bool:
        """True if connections to the address use TLS."""
        return self.scheme in _TLS_SCHEMES

    @property
    def is_grpc(self) -> bool:
        """True for the gRPC wire."""
        return self.scheme in GRPC_SCHEMES

    @property
    def is_websocket(self) -> bool:
        """True if the scheme selects OpenEnv's WebSocket."""
        return self.scheme in ("ws", "wss")

    @property
    def environment_name(self) -> str:
        """The name of the environment in a gRPC address; empty if there is none."""
        return self.path.removeprefix("/")

    @property
    def websocket_url(self) -> str:
        """The URL of OpenEnv's WebSocket without `/ws`."""
        return f"{'wss' if self.uses_tls else 'ws'}://{self.authority}{self.path}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def parse_address(address: str) -> ServerAddress:
    """Parse an address.

    Raises:
        ConfigError: the address is malformed. The message contains no credentials.
    """
    try:
        url = urlsplit(address)
        _ = url.port
    except ValueError:
        raise _make_malformed_error(address, "a host and a port up to 65535") from None
    user_info, _, authority = url.netloc.rpartition("@")
    if url.scheme not in (*GRPC_SCHEMES, *HTTP_SCHEMES) or not authority:
        raise _make_malformed_error(address, "one of the schemes grpc, grpcs, http, https, ws, wss")
    if url.query or url.fragment:
        raise _make_malformed_error(address, "no query and no fragment")
    path = url.path.rstrip("/")
    if url.scheme in HTTP_SCHEMES:
        path = path.removesuffix("/ws")
    elif path.count("/") > 1:
        raise _make_malformed_error(address, "at most one name after the port")
    return ServerAddress(url.scheme, authority, path, _make_basic_credentials(user_info))


def _make_basic_credentials(user_info: str) -> str | None:
    if not user_info:
        return None
    user, _, password = user_info.partition(":")
    credentials = f"{unquote(user)}:{unquote(password)}"
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


def _make_malformed_error(address: str, requirement: str) -> ConfigError:
    scheme, separator, rest_of_address = address.rpartition("://")
    safe_address = f"{scheme}{separator}{rest_of_address.rpartition('@')[2]}"
    return ConfigError(
        "expected an address like grpc://host:port or http://host:port with"
        f" {requirement}; got {safe_address.partition('?')[0]!r}"
    )


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """Options for connecting to a server. They are the same for every wire."""

    token: str | None = field(default=None, repr=False)
    """Bearer token for servers that require one."""
    timeout_s: float = 60.0
    """Time limit of one call. A call that takes longer ends its session."""
    connect_timeout_s: float = 10.0
    """Time limit for the first response of the server."""
    reconnect_timeout_s: float = 60.0
    """Maximum time to wait for an unavailable server, for an open or for a call of a session that
    outlives a broken connection."""
    ca_file: str | None = None
    """PEM file of the authorities that may sign a TLS server's certificate. Default: the
    system's authorities."""
    cert_file: str | None = None
    """PEM file of the certificate for TLS servers that require one from the client."""
    key_file: str | None = None
    """PEM file of the private key of `cert_file`."""
    server_name: str | None = None
    """Name in the certificate of a TLS server. Default: the host of the address."""
    keepalive_s: float = 10.0
    """Time without traffic after which a gRPC connection is probed. The connection is closed if
    the response to the probe takes longer than the same time."""
    allow_ignored_seed: bool = False
    """Allow seeds for OpenEnv 0.1 servers, which ignore them. Their episodes cannot be repeated.
    By default, such a seed is a ConfigError."""
    max_calls_per_message: int = 0
    """Maximum number of calls in one gRPC message. 0 sends all pending calls in one message."""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError(
                "cert_file and key_file must be set together, got"
                f" {self.cert_file!r} and {self.key_file!r}; set both or neither"
            )


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server's address and the options for connecting to it."""

    address: ServerAddress
    options: ConnectOptions = field(default_factory=ConnectOptions)

    def __post_init__(self) -> None:
        if self.options.token and self.address.credentials:
            raise ConfigError(
                f"{self.address} must have one way to authenticate, got a token and credentials in"
                " the address; remove one of them"
            )

    @property
    def authorization(self) -> str | None:
        """The value of the `authorization` header."""
        token = self.options.token
        return f"Bearer {token}" if token else self.address.credentials

    def make_ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for HTTPS and WSS, or None if the address uses no TLS."""
        return build_client_context(*self._find_tls_files()) if self.address.uses_tls else None

    def make_channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return the TLS credentials for gRPC, or None if the address uses no TLS."""
        return build_channel_credentials(*self._find_tls_files()) if self.address.uses_tls else None

    def _find_tls_files(self) -> tuple[Path | None, TlsFiles | None]:
        options = self.options
        client_tls_files = None
        if options.cert_file and options.key_file:
            client_tls_files = TlsFiles(Path(options.cert_file), Path(options.key_file))
        ca_file = parse_path(options.ca_file) if options.ca_file else None
        return ca_file, client_tls_files
