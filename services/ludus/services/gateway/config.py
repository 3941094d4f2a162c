"""What a gateway is started with: a TOML file, or options of the command line.

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
import secrets
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ludus.env.security.session_ids import MIN_KEY_BYTES
from ludus.env.security.tls import TlsFiles
from ludus.env.security.variables import SESSION_KEY_VARIABLE
from ludus.env.serving.options import (
    Isolation,
    bound_grpc_port,
    explain,
)
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, NotFoundError

TOKEN_VARIABLE = "LUDUS_GATEWAY_TOKEN"
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Port = Annotated[int, Field(ge=0, le=65_535)]
_NAME_PATTERN = r"^[A-Za-z0-9._-]{1,63}$"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StaticEnvironment(_Section):
    """Servers at fixed addresses."""

    kind: Literal["static"] = "static"
    addresses: Annotated[list[str], Field(min_length=1)]
    """gRPC addresses, for example grpc://10.0.0.7:18000."""

    @field_validator("addresses")
    @classmethod
    def _are_grpc(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            scheme, separator, rest = address.partition("://")
            if scheme not in ("grpc", "grpcs") or not separator or ":" not in rest:
                raise ValueError(f"expected grpc://host:port or grpcs://, got {address!r}")
        if len(set(addresses)) != len(addresses):
            raise ValueError("expected each address once, got one twice")
        return addresses


class SubprocessEnvironment(_Section):
    """Servers on this machine that the gateway starts, watches and stops."""

    kind: Literal["subprocess"] = "subprocess"
    target: Annotated[str, Field(min_length=1)]
    """An environment package or another target, for example gymnasium:CartPole-v1."""
    options: JsonObject = Field(default_factory=dict)
    """What the environment is built with."""
    num_servers: Annotated[int, Field(ge=1, le=256)] = 1
    max_sessions: Annotated[int, Field(ge=1)] = 256
    """For each server."""
    isolation: Isolation | None = None
    """Where a server's sessions run; None is what fits the environment."""
    arguments: tuple[str, ...] = ()
    """Further arguments for each server, for example ["--idle-timeout-s", "60"]."""
    drain_grace_s: _Seconds = 600.0
    """How long a server that is scaled away may finish its sessions."""


class KubernetesEnvironment(_Section):
    """The pods behind a Service of the cluster."""

    kind: Literal["kubernetes"] = "kubernetes"
    service: Annotated[str, Field(min_length=1, max_length=63)]
    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    lease: str = Field(default="", max_length=63)
    """A Lease of its own for each environment: the gateway that holds it tells the cluster
    which pods a scale-in should remove first. Empty tells nothing."""


class SandboxEnvironment(_Section):
    """A pod of agent-sandbox for each session."""

    kind: Literal["sandbox"] = "sandbox"
    warm_pool: Annotated[str, Field(min_length=1, max_length=63)]
    """The SandboxWarmPool to claim from."""
    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    grpc_port: Annotated[int, Field(ge=1, le=65_535)] = 18_000
    """Where the server in a sandbox listens."""


Environment = Annotated[
    StaticEnvironment | SubprocessEnvironment | KubernetesEnvironment | SandboxEnvironment,
    Field(discriminator="kind"),
]


class SessionsSection(_Section):
    """How sessions are admitted, and how long they last."""

    linger_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """How long a session outlives a gateway, or a client on gRPC, that went away."""
    idle_timeout_s: _Seconds = 600.0
    """Without a call for so long a session is taken for ended, where its server does not say
    when it ends those that are idle."""
    id_lifetime_s: _Seconds = 86_400.0
    queue_size: Annotated[int, Field(ge=0)] = 1024
    """Opens that may wait at once; more are refused right away."""
    queue_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """How long an open waits for a free session; 0 refuses at once."""
    max_group_size: Annotated[int, Field(ge=1)] = 1024


class ServersSection(_Section):
    """How the environment servers are reached."""

    token_env: str = ""
    """Environment variable with the token that the servers ask for."""
    ca_file: Path | None = None
    """Reaches the servers over TLS and trusts this authority."""
    cert_file: Path | None = None
    """The certificate that servers are shown which ask for one; reaches them over TLS."""
    key_file: Path | None = None
    """Its private key."""
    server_name: str = ""
    """The name in the servers' certificates, where that is not the host of their addresses, such
    as those of pods; empty is the host."""
    poll_interval_s: _Seconds = 1.0
    unreachable_after_s: _Seconds = 3.0
    """A server that is silent for so long gets no new sessions."""
    retry_within_s: _Seconds = 5.0
    """How long a call waits for a connection that broke."""
    call_timeout_s: _Seconds = 600.0

    @model_validator(mode="after")
    def _shows_a_pair(self) -> ServersSection:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("expected cert_file and key_file together, got one; give both or none")
        return self

    @property
    def identity(self) -> TlsFiles | None:
        """What is shown to servers that ask for certificates."""
        if self.cert_file is None or self.key_file is None:
            return None
        return TlsFiles(self.cert_file, self.key_file)


class TlsSection(_Section):
    """PEM files; they may be replaced while the gateway runs."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    """Asks clients for certificates of this authority."""


class GatewayConfig(_Section):
    """Everything a gateway is started with."""

    environments: dict[Annotated[str, Field(pattern=_NAME_PATTERN)], Environment]
    host: str = "127.0.0.1"
    port: _Port = 8000
    """HTTP and WebSocket; 0 takes a free one."""
    grpc_port: _Port | None = None
    """None means port + 10000, or a free one when `port` is 0."""
    admin_port: _Port | None = None
    """Probes, /drain and /metrics over HTTP, without token and TLS: for a port that only the
    cluster reaches. 0 takes a free one; None means there is none."""
    insecure: bool = False
    """Allows listening beyond this machine without a token."""
    token_env: str = TOKEN_VARIABLE
    """Environment variable with the one token of everybody; it may be unset."""
    tenants_file: Path | None = None
    """Tokens, scopes and quotas of several tenants."""
    session_key_env: str = SESSION_KEY_VARIABLE
    """Environment variable with the key that gateways and servers share."""
    max_connection_age_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Older gRPC connections are ended, so that clients find gateways that were added; their
    sessions continue. 0 lets them live."""
    drain_grace_s: _Seconds = 600.0
    """How long a gateway that is told to end waits for its sessions."""
    tls: TlsSection | None = None
    sessions: SessionsSection = SessionsSection()
    servers: ServersSection = ServersSection()

    @property
    def bound_grpc_port(self) -> int:
        """The gRPC port to ask for."""
        return bound_grpc_port(self.port, self.grpc_port)

    @classmethod
    def read(cls, path: Path, overrides: JsonObject | None = None) -> GatewayConfig:
        """The configuration in a TOML file.

        Args:
            overrides: top-level fields that have precedence.

        Raises:
            NotFoundError: the file is not there.
            ConfigError: it cannot be used; names the field, the value and what was expected.
        """
        try:
            raw = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise NotFoundError(f"expected a gateway configuration at {path}, got none") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: expected a TOML file: {error}") from None
        return cls.of(raw | (overrides or {}), str(path))

    @classmethod
    def of(cls, raw: JsonObject, place: str = "gateway") -> GatewayConfig:
        """The configuration that the values say.

        Raises:
            ConfigError: they cannot be used.
        """
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise ConfigError(f"{place}: {explain(error)}") from None

    @property
    def secret_variables(self) -> frozenset[str]:
        """The environment variables that it reads secrets from, beside those of tenants."""
        return frozenset({self.token_env, self.servers.token_env, self.session_key_env} - {""})

    def session_key(self) -> str:
        """The key from the environment; a random one where only this gateway needs it.

        Raises:
            ConfigError: there is none and servers that others start must know it.
        """
        key = os.environ.get(self.session_key_env, "")
        if key:
            return key
        others = [name for name, one in self.environments.items() if one.kind != "subprocess"]
        if others:
            raise ConfigError(
                f"expected a session key of at least {MIN_KEY_BYTES} bytes in"
                f" {self.session_key_env}, which the servers of '{others[0]}' are started with"
                f" too, got none; make one with: export {self.session_key_env}=$(openssl rand"
                " -hex 32)"
            )
        return secrets.token_hex(32)


def value_of(variable: str) -> str:
    """The value of an environment variable; empty where it is unset or has no name."""
    return os.environ.get(variable, "") if variable else ""
