"""Configuration of a gateway, from a TOML file or command-line options.

[environments.blackjack]          [environments.cards]             [environments.fleet]
kind = "subprocess"               kind = "static"                  kind = "kubernetes"
target = "openspiel_env"          addresses = ["grpc://a:18000"]   service = "cards"
options = {game = "blackjack"}                                     namespace = "arena"

[environments.code]
kind = "sandbox"
warm_pool = "code"
namespace = "arena"
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import grpc
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ludus.env.options import explain_errors
from ludus.env.security.secret_files import ReadSecrets, follow_secrets
from ludus.env.security.session_ids import (
    MIN_KEY_BYTES,
    SESSION_KEY_VARIABLE,
    SessionKey,
    derive_server_token,
)
from ludus.env.security.tls import TlsFiles, build_channel_credentials
from ludus.env.sessions.options import GRPC_PORT_OFFSET, Isolation, choose_grpc_port
from ludus.env.types import JsonObject
from ludus.proto.documents import DocumentError, read_toml
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.paths import expand_home

_Seconds = Annotated[float, Field(gt=0)]
_MAX_PORT = 65_535
_Port = Annotated[int, Field(ge=0, le=_MAX_PORT)]
_NAME_PATTERN = r"^[A-Za-z0-9._-]{1,63}$"


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    _expand_home = field_validator("*")(expand_home)


class StaticEnvironment(_Section):
    """Servers at fixed addresses."""

    kind: Literal["static"] = "static"
    addresses: Annotated[list[str], Field(min_length=1)]
    """gRPC addresses, for example grpc://10.0.0.7:18000."""

    @field_validator("addresses")
    @classmethod
    def _check_addresses(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            scheme, separator, host_and_port = address.partition("://")
            if scheme not in ("grpc", "grpcs") or not separator or ":" not in host_and_port:
                raise ValueError(
                    f"an address must be grpc://host:port or grpcs://host:port, got {address!r}"
                )
        if len(set(addresses)) != len(addresses):
            raise ValueError("addresses must not repeat; remove the duplicate")
        return addresses


class SubprocessEnvironment(_Section):
    """Servers on this machine that the gateway starts, watches and stops."""

    kind: Literal["subprocess"] = "subprocess"
    target: Annotated[str, Field(min_length=1)]
    """An environment package or another target, for example gymnasium:CartPole-v1."""
    options: JsonObject = Field(default_factory=dict)
    """Options for the environment's constructor."""
    num_servers: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of servers."""
    max_sessions: Annotated[int, Field(ge=1)] = 256
    """Maximum number of sessions per server."""
    isolation: Isolation | None = None
    """Isolation of a server's sessions. Default: chosen for the environment."""
    arguments: tuple[str, ...] = ()
    """Additional arguments for each server, for example ["--idle-timeout-s", "60"]."""


class KubernetesEnvironment(_Section):
    """The pods behind a Kubernetes Service."""

    kind: Literal["kubernetes"] = "kubernetes"
    service: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the Service."""
    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    """Namespace of the Service."""
    lease: str = Field(default="", max_length=63)
    """Name of this environment's Lease. The gateway that holds it annotates pods so that a scale-in
    removes the pods with the fewest sessions first. Empty disables the annotations."""


class SandboxEnvironment(_Section):
    """One agent-sandbox pod per session."""

    kind: Literal["sandbox"] = "sandbox"
    warm_pool: Annotated[str, Field(min_length=1, max_length=63)]
    """The SandboxWarmPool that sandboxes are claimed from."""
    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    """Namespace of the pool and of the sandboxes."""
    grpc_port: Annotated[int, Field(ge=1, le=65_535)] = 18_000
    """gRPC port of the server in a sandbox."""


EnvironmentSection = Annotated[
    StaticEnvironment | SubprocessEnvironment | KubernetesEnvironment | SandboxEnvironment,
    Field(discriminator="kind"),
]


class SessionsSection(_Section):
    """Admission and lifetime of sessions."""

    linger_s: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that a session survives the loss of its gateway or gRPC client."""
    idle_timeout_s: _Seconds = 600.0
    """Seconds without a call after which a session is assumed to have ended. Applies only if its
    server does not report an idle timeout."""
    id_lifetime_s: _Seconds = 86_400.0
    """Lifetime of a session id, in seconds."""
    queue_size: Annotated[int, Field(ge=0)] = 1024
    """Maximum number of opens that wait at the same time; additional opens are refused."""
    queue_timeout_s: Annotated[float, Field(ge=0)] = 30.0
    """Maximum time that an open waits for a free session, in seconds; 0 refuses immediately."""
    max_group_size: Annotated[int, Field(ge=1)] = 1024
    """Maximum number of sessions that one call opens together."""


class ServersSection(_Section):
    """Connections to the environment servers."""

    token_env: str = ""
    """Environment variable with the token that the servers require."""
    token_file: Path | None = None
    """File with that token on its first line, instead of the variable. The file may be replaced
    while the gateway runs."""
    derive_tokens: bool = False
    """Send each server a token that is derived from the token and the server's id. Servers accept
    it if `python -m ludus.env.serving.server_keys` derives their secrets, as in the chart. Applies
    to servers in a cluster; a server whose id is unknown gets no token."""
    ca_file: Path | None = None
    """Certificate authority of the servers; enables TLS."""
    cert_file: Path | None = None
    """Client certificate for servers that require one; enables TLS."""
    key_file: Path | None = None
    """Private key of `cert_file`."""
    server_name: str = ""
    """Name in the servers' certificates, if it differs from the host in their addresses, as it does
    for pods. Empty means the host."""
    poll_interval_s: _Seconds = 1.0
    """Mean time between two requests for the state of a server, in seconds. The time is shorter
    while opens wait, and longer in a large fleet."""
    unreachable_after_s: _Seconds = 3.0
    """Seconds without a response after which a server gets no new sessions."""
    retry_within_s: _Seconds = 5.0
    """Maximum time that a call waits for a broken connection, in seconds."""
    call_timeout_s: _Seconds = 600.0
    """Maximum duration of one call, in seconds."""

    @model_validator(mode="after")
    def _check_certificate_pair(self) -> ServersSection:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file must be set together; set both or neither")
        return self

    def make_metadata(self, server_id: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of calls to a server, with its current token if there is one."""
        tokens = self._read_tokens()
        # Code on the server could read the token of the whole fleet.
        is_unknown = self.derive_tokens and not server_id
        if not tokens or is_unknown:
            return ()
        token = derive_server_token(tokens[0], server_id) if self.derive_tokens else tokens[0]
        return (("authorization", f"Bearer {token}"),)

    @cached_property
    def _read_tokens(self) -> ReadSecrets:
        if self.token_file is not None:
            return follow_secrets(self.token_file)
        token = os.environ.get(self.token_env, "")
        return lambda: (token,) if token else ()

    @cached_property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS credentials. If None, only grpcs:// addresses use TLS."""
        if self.cert_file is not None and self.key_file is not None:
            client_certificate = TlsFiles(self.cert_file, self.key_file)
            return build_channel_credentials(self.ca_file, client_certificate)
        return build_channel_credentials(self.ca_file) if self.ca_file else None


class GatewayConfig(_Section):
    """Complete configuration of a gateway."""

    environments: dict[Annotated[str, Field(pattern=_NAME_PATTERN)], EnvironmentSection]
    """Environments by name. A name has up to 63 letters, digits, '.', '_' and '-'."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    allow_host: tuple[str, ...] = ()
    """Host names that requests may have when the gateway listens on loopback, in addition to
    localhost, 127.0.0.1 and [::1]."""
    port: _Port = 8000
    """Port for HTTP and WebSocket; 0 selects a free port."""
    grpc_port: _Port | None = Field(None, validate_default=True)
    """Port for gRPC. Default: port + 10000, or a free port if `port` is 0."""
    admin_port: _Port | None = None
    """Port for probes, /drain and /metrics over HTTP, without token or TLS. Only the cluster should
    be able to reach it. 0 selects a free port. Default: no admin port."""
    insecure: bool = False
    """Allow other machines to connect without a token."""
    token_env: str = "LUDUS_GATEWAY_TOKEN"
    """Environment variable with the token shared by all clients; it may be unset."""
    token_file: Path | None = None
    """File with such tokens, one on each line, instead of the variable. The file may be replaced
    while the gateway runs."""
    tenants_file: Path | None = None
    """File with the tokens, scopes and quotas of several tenants."""
    session_key_env: str = SESSION_KEY_VARIABLE
    """Environment variable with the key that signs session ids, shared by gateways and servers."""
    session_key_file: Path | None = None
    """File with session keys, one on each line, instead of the variable. The first key signs, and
    every key verifies. The file may be replaced while the gateway runs."""
    max_connection_age_s: Annotated[float, Field(ge=0)] = 0.0
    """Maximum age of a gRPC connection, in seconds. Older connections are closed so that clients
    also reach new gateways; their sessions continue. 0 means no limit."""
    drain_grace_s: _Seconds = 600.0
    """Maximum time that a stopping gateway waits for its sessions, in seconds."""
    tls: TlsFiles | None = None
    """PEM files for TLS: cert, key and optionally client_ca, the authorities of client
    certificates. The files may be replaced while the gateway runs."""
    sessions: SessionsSection = SessionsSection()
    servers: ServersSection = ServersSection()

    @field_validator("grpc_port")
    @classmethod
    def _check_grpc_port(cls, grpc_port: int | None, info: ValidationInfo) -> int | None:
        port = info.data.get("port", 0)
        default_port = choose_grpc_port(port, grpc_port)
        if default_port > _MAX_PORT:
            raise ValueError(
                f"port = {port} needs a grpc_port, because its default, port + {GRPC_PORT_OFFSET},"
                f" is {default_port}, and ports end at {_MAX_PORT}; set grpc_port"
            )
        return grpc_port

    @classmethod
    def read(cls, path: Path, overrides: JsonObject | None = None) -> GatewayConfig:
        """Read the configuration from a TOML file; `overrides` replace its top-level fields."""
        try:
            raw_fields = read_toml(path)
        except FileNotFoundError:
            raise NotFoundError(f"gateway configuration {path} does not exist") from None
        except (OSError, DocumentError) as error:
            raise ConfigError(f"{path} is not a TOML file: {error}") from None
        return cls.parse(raw_fields | (overrides or {}), str(path))

    @classmethod
    def parse(cls, raw_fields: JsonObject, source: str = "gateway") -> GatewayConfig:
        """Validate the fields and return the configuration; error messages start with `source`."""
        try:
            return cls.model_validate(raw_fields)
        except ValidationError as error:
            raise ConfigError(f"{source}: {explain_errors(error)}") from None

    def make_session_key(self) -> SessionKey:
        """Return the key that signs the session ids of servers that are started elsewhere.

        If no key is configured, return a random key. This requires that the gateway starts all
        servers itself.

        Raises:
            ConfigError: the key is missing and some servers are started elsewhere, or it cannot be
                used.
        """
        if self.session_key_file is not None:
            return SessionKey(follow_secrets(self.session_key_file))
        if key := os.environ.get(self.session_key_env):
            return SessionKey(key.encode())
        for name, section in self.environments.items():
            if section.kind != "subprocess":
                raise ConfigError(
                    f"{self.session_key_env} is not set; it must contain the session key (at least"
                    f" {MIN_KEY_BYTES} bytes) that the servers of '{name}' also use; create one"
                    f" with: export {self.session_key_env}=$(openssl rand -hex 32), or set"
                    " session_key_file"
                )
        return SessionKey.random()
