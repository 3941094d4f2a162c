"""Options of a server: its ports, sessions, isolation and limits.

    ServerOptions --flags--> arguments of `python -m ludus.env` (serving/application.py)
                       +---> options of `ludus env serve`

The command line imports this file to print its help, so it must not import large modules.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from ludus.env.options import explain_errors
from ludus.env.sandbox.confine import Layer
from ludus.env.security.hosts import is_loopback_name
from ludus.env.security.secret_files import follow_secrets
from ludus.env.security.session_ids import (
    SERVER_KEY_VARIABLE,
    SESSION_KEY_VARIABLE,
    ServerKey,
    check_session_key,
    derive_server_key,
    make_pod_server_id,
)
from ludus.env.security.tokens import AcceptedTokens
from ludus.proto.errors import ConfigError
from ludus.proto.paths import expand_home

Isolation: TypeAlias = Literal["inline", "pool", "process"]

TOKEN_VARIABLE = "LUDUS_ENV_TOKEN"
"""Environment variable with the token that clients must send, which must not be an argument."""
DEFAULT_PORT = 8000
GRPC_PORT_OFFSET = 10_000
STEP_TIMEOUT_S = 60.0
SERVER_ID_VARIABLE = "LUDUS_SERVER_ID"
"""Environment variable with the server id, for servers that a gateway starts."""
_FIELDS_WITHOUT_FLAG = frozenset({"token", "session_key", "server_key", "server_id"})
"""Fields without a flag: every user of a machine can read the arguments of processes."""
_REQUIRED_ISOLATIONS = {
    "num_workers": ("pool",),
    "memory_limit_mb": ("pool", "process"),
    "cpu_limit_s": ("process",),
    "no_network": ("pool", "process"),
    "require_sandbox": ("pool", "process"),
    "accept_missing": ("pool", "process"),
}
"""Isolations that support an option, for options that concern worker processes."""
_GROUPS = {"host": "server", "tls_cert": "TLS", "isolation": "isolation"}
"""Name of each group of flags, by the first field of the group."""


def read_server_id() -> str:
    """Return the server's id from LUDUS_SERVER_ID or POD_UID; '' if neither is set."""
    if server_id := os.environ.get(SERVER_ID_VARIABLE):
        return server_id
    pod_uid = os.environ.get("POD_UID")
    return make_pod_server_id(pod_uid) if pod_uid else ""


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """Addresses of a running server."""

    http: str
    grpc: str
    admin: str = ""
    """Address of the admin port; "" without one."""


class ServerOptions(BaseModel):
    """Options of a server. The docstring under a field is also the help text of its flag.

    Raises:
        ConfigError: the options are not valid.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    _expand_home = field_validator("*")(expand_home)

    host: str = "127.0.0.1"
    """Address to listen on."""
    allow_host: tuple[str, ...] = ()
    """Host name that requests may have when the server listens on loopback, for example the name
    of a proxy on this machine. By default only localhost, 127.0.0.1 and [::1]. Repeatable."""
    port: int = Field(DEFAULT_PORT, ge=0, le=65_535)
    """Port for HTTP and WebSocket; 0 uses a free port."""
    grpc_port: int | None = Field(None, ge=0, le=65_535)
    """Port for gRPC. Default: port + 10000, or a free port if the port is 0."""
    admin_port: int | None = Field(None, ge=0, le=65_535)
    """Port for probes, /drain and /metrics over HTTP, without token and TLS. Only the
    cluster should be able to reach it. 0 uses a free port. Default: no admin port."""
    max_sessions: int = Field(256, ge=1)
    """Maximum number of open sessions."""
    drain_grace_s: float = Field(0.0, ge=0)
    """Seconds that sessions may continue after SIGTERM, while no new session is opened. Must be
    less than a pod's terminationGracePeriodSeconds."""
    idle_timeout_s: float = 600.0
    """Seconds without a call after which a session is closed."""
    wait_for_slot_s: float = Field(0.0, ge=0)
    """Seconds that a request to open a session waits for a free slot."""
    first_seed: int | None = Field(None, ge=0)
    """Seed of the first reset without a seed; each later reset adds 1. Default: random seeds."""
    check_determinism: bool = False
    """Check at the start, for about two seconds, whether equal seeds give equal episodes."""
    deterministic: bool = False
    """Assume that equal seeds give equal episodes, for environments too slow for the check."""
    token: str | None = Field(None, repr=False)
    """Token that clients must send; the variable `token_env` takes precedence."""
    token_env: str = ""
    """Name of the environment variable with the token. The variable may be unset."""
    token_file: Path | None = None
    """File with the tokens that clients may send, one on each line, instead of the variable.
    The file may be replaced while the server runs."""
    insecure: bool = False
    """Allow other machines to connect without a token."""
    record: Path | None = None
    """Record every episode in this .jsonl file, or in a new file in this folder."""
    ready_file: Path | None = None
    """File that is written as JSON (http, grpc, admin, pid) when the server listens."""
    tls_cert: Path | None = None
    """PEM file with the certificate. If set, both ports use TLS. The file may be replaced
    while the server runs."""
    tls_key: Path | None = None
    """PEM file with the certificate's private key."""
    tls_client_ca: Path | None = None
    """PEM file with the certificate authorities that must sign the clients' certificates."""
    isolation: Isolation = "inline"
    """inline: sessions run in the server, which is fastest, but code that crashes or hangs stops
    the server. pool: sessions share worker processes. process: each session has its own."""
    num_workers: int | None = Field(None, ge=1)
    """Number of workers in a pool. Default: one per CPU."""
    num_threads: int = Field(32, ge=1)
    """Number of threads of the server, or of each worker in a pool, for environments that do not
    step on the event loop."""
    step_timeout_s: float = Field(STEP_TIMEOUT_S, ge=0)
    """Time limit of a call in seconds. A longer call ends its session, and the worker if there is
    one. The limit also applies to building an environment. 0 sets no limit. A longer step on the
    event loop stops the server with exit code 70."""
    memory_limit_mb: int = Field(0, ge=0)
    """Memory limit of a worker in MB; 0 sets no limit."""
    cpu_limit_s: float = Field(0.0, ge=0)
    """CPU seconds of a session with isolation=process; 0 sets no limit."""
    disk_limit_mb: int = Field(1024, ge=0)
    """Size limit of a worker's folder in MB; 0 sets no limit."""
    pass_env: tuple[str, ...] = ()
    """Environment variable to pass to workers, which by default receive few variables and no
    secrets. Repeatable."""
    allow_read: tuple[Path, ...] = ()
    """File or folder that workers may read, in addition to the system, the code and the paths in
    the environment's options. Repeatable."""
    allow_write: tuple[Path, ...] = ()
    """File or folder that workers may read and write, in addition to each worker's folder. May be
    repeated."""
    no_network: bool = False
    """Start workers without any network, including loopback. Workers of environments that declare
    that they need no network never have any."""
    max_processes: int = Field(1024, ge=0)
    """Maximum number of processes and threads of a worker with its child processes; 0 sets no
    limit."""
    require_sandbox: bool = False
    """Refuse to start if the workers' sandbox lacks a layer."""
    accept_missing: tuple[Layer, ...] = ()
    """Layer of the sandbox that may be missing. By default a server refuses to start if a missing
    layer means that its workers are not isolated. Repeatable."""
    session_key: str | None = Field(None, repr=False)
    """Key of the gateway, so that clients can open sessions under ids that the gateway signed."""
    session_key_file: Path | None = None
    """File with the keys of the gateway, one on each line, instead of the variable
    LUDUS_SESSION_KEY. The file may be replaced while the server runs."""
    server_key: str | None = Field(None, repr=False)
    """Key of this server only, derived from the gateway's key and the server id."""
    server_key_file: Path | None = None
    """File with the keys of this server only, which `python -m ludus.env.serving.server_keys`
    derives from the gateway's keys. The file may be replaced while the server runs."""
    server_id: str = Field(default_factory=lambda: read_server_id() or secrets.token_hex(6))
    """Name of the server in session ids; LUDUS_SERVER_ID, or derived from POD_UID, if set."""

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, values: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        """Build the options, converting pydantic's errors to ConfigError."""
        if isinstance(values, Mapping) and values.get("token_env"):
            values = {**values, "token": os.environ.get(values["token_env"], values.get("token"))}
        try:
            options = build(values)
        except ValidationError as error:
            raise ConfigError(explain_errors(error)) from None
        options._check_ports()
        options._check_tls()
        options._check_isolation()
        options.make_key()
        options.make_tokens()
        return options

    def _check_ports(self) -> None:
        has_token = bool(self.token or self.token_file)
        if not is_loopback_name(self.host) and not has_token and not self.insecure:
            raise ConfigError(
                f"listening on {self.host}, which other machines can reach, needs a token; set a"
                " token, listen on 127.0.0.1, or allow it as insecure"
            )
        if self.requested_grpc_port > 65_535:
            raise ConfigError(
                f"grpc_port must be between 0 and 65535, got {self.requested_grpc_port};"
                " set port and grpc_port"
            )

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            fields = "tls_cert needs tls_key" if self.tls_cert else "tls_key needs tls_cert"
            raise ConfigError(f"{fields}; give both")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca needs tls_cert and tls_key; give all three")

    def _check_isolation(self) -> None:
        isolation = self.isolation
        if isolation != "inline" and not hasattr(os, "fork"):
            raise ConfigError(
                f"isolation must be 'inline', because this system cannot fork; got {isolation!r}"
            )
        for field_name, isolations in _REQUIRED_ISOLATIONS.items():
            if getattr(self, field_name) and isolation not in isolations:
                raise ConfigError(
                    f"{field_name} needs isolation={' or '.join(map(repr, isolations))}, got"
                    f" {getattr(self, field_name)} with isolation={isolation!r}; set the isolation,"
                    f" or leave out {field_name}"
                )

    @property
    def requested_grpc_port(self) -> int:
        """Requested gRPC port."""
        return choose_grpc_port(self.port, self.grpc_port)

    @property
    def num_pool_workers(self) -> int:
        """Number of workers in a pool, at most one per session."""
        return min(self.num_workers or count_available_cpus(), self.max_sessions)

    def make_key(self) -> ServerKey | None:
        """Return the key that verifies signed session ids of this server; None without one.

        Raises:
            ConfigError: the key is too short, or its file cannot be used.
        """
        server_id = self.server_id
        if self.server_key_file is not None:
            return ServerKey(follow_secrets(self.server_key_file), server_id)
        if self.session_key_file is not None:
            read_keys = follow_secrets(self.session_key_file)
            return ServerKey(
                lambda: tuple(derive_server_key(key, server_id) for key in read_keys()), server_id
            )
        server_key = self.server_key
        if self.session_key:
            check_session_key(self.session_key.encode())
            server_key = derive_server_key(self.session_key, server_id)
        return ServerKey(lambda: (server_key,), server_id) if server_key else None

    def make_tokens(self) -> AcceptedTokens | None:
        """Return the tokens that clients may send; None if clients need none.

        Raises:
            ConfigError: the token file cannot be used.
        """
        if self.token_file is not None:
            return AcceptedTokens(follow_secrets(self.token_file))
        token = self.token
        return AcceptedTokens(lambda: (token,)) if token else None

    def list_exposed_secrets(self) -> list[str]:
        """Return the names of the secrets of other servers that environments can read.

        Environments of isolation inline can read the variables, files and memory of the server.
        Secrets that were derived for this server are useless elsewhere.
        """
        if self.isolation != "inline" or self.server_key or self.server_key_file:
            return []
        secrets_by_name = {
            "session key": self.session_key or self.session_key_file,
            "token": self.token or self.token_file,
        }
        return [name for name, secret in secrets_by_name.items() if secret]


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command line that sets one field of `ServerOptions`."""

    field_name: str
    field_info: FieldInfo
    default: Any
    """Default value on the command line."""
    group: str

    @property
    def name(self) -> str:
        """Name of the flag, for example --grpc-port."""
        if self.default is True:
            return "--no-determinism-check"
        return "--" + self.field_name.replace("_", "-")

    @property
    def annotation(self) -> Any:
        """Type of the flag's value."""
        return self.field_info.annotation

    @property
    def is_switch(self) -> bool:
        """True if the flag takes no value and inverts the default."""
        return isinstance(self.default, bool)

    @property
    def is_repeated(self) -> bool:
        """True if the flag is repeated for several values."""
        return get_origin(self.annotation) is tuple

    @property
    def shown_default(self) -> str:
        """Default for the help text; "" if the text explains it."""
        if self.is_switch or not self.default:
            return ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def help(self) -> str:
        """Help text, from the docstring of the field."""
        text = " ".join((self.field_info.description or "").split())
        return f"Do not {text[0].lower()}{text[1:]}" if self.default is True else text


def make_command_defaults(default_port: int) -> dict[str, Any]:
    """Return defaults of the command line that differ from the defaults of `ServerOptions`."""
    return {"port": default_port, "check_determinism": True, "token_env": TOKEN_VARIABLE}


def list_flags(default_port: int = DEFAULT_PORT) -> Iterator[Flag]:
    """Yield the flags of a server's command line, group by group."""
    defaults = make_command_defaults(default_port)
    group = ""
    for field_name, field_info in ServerOptions.model_fields.items():
        group = _GROUPS.get(field_name, group)
        if field_name not in _FIELDS_WITHOUT_FLAG:
            yield Flag(field_name, field_info, defaults.get(field_name, field_info.default), group)


def choose_grpc_port(port: int, grpc_port: int | None) -> int:
    """Return the gRPC port to request, which is derived from the HTTP port by default."""
    if grpc_port is not None:
        return grpc_port
    return port + GRPC_PORT_OFFSET if port else 0


def count_available_cpus() -> int:
    """Return the number of CPUs that this process may use, limited by a container's quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(num_cpus, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return num_cpus


def make_server_options(values: Mapping[str, Any], default_port: int) -> ServerOptions:
    """Return the options for the values of command-line flags; other names are ignored.

    Raises:
        ConfigError: The options are invalid or cannot be combined.
    """
    settings = make_command_defaults(default_port)
    settings["session_key"] = os.environ.get(SESSION_KEY_VARIABLE)
    settings["server_key"] = os.environ.get(SERVER_KEY_VARIABLE)
    settings |= {name: values[name] for name in ServerOptions.model_fields if name in values}
    return ServerOptions(**settings)
