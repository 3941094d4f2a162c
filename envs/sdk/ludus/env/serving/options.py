"""How a server listens, how many sessions it holds, and what they may do to it.

    ServerOptions --flags--> arguments of `python -m ludus.env` (cli.py)
                       +---> options of `ludus env serve`

The command line imports this file to print its help, so nothing heavy may be imported here.
"""

from __future__ import annotations

import math
import os
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
    model_validator,
)
from pydantic.fields import FieldInfo

from ludus.env.options.validation import explain
from ludus.env.security.session_ids import SessionKey, new_server_id, pod_server_id
from ludus.env.security.variables import SESSION_KEY_VARIABLE, TOKEN_VARIABLE
from ludus.proto.errors import ConfigError

Isolation: TypeAlias = Literal["inline", "pool", "process"]

DEFAULT_PORT = 8000
GRPC_PORT_OFFSET = 10_000
STEP_TIMEOUT_S = 60.0
_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
_SECRETS_AND_NAMES = frozenset({"token", "session_key", "server_id"})
"""Never flags: arguments are shown to every user of a machine."""
_GROUPS = {"host": "server", "tls_cert": "TLS", "isolation": "where sessions run"}
"""Each group of flags by its first field."""


def _own_server_id() -> str:
    pod_uid = os.environ.get("POD_UID")
    return pod_server_id(pod_uid) if pod_uid else new_server_id()


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """Where a running server listens."""

    http: str
    grpc: str
    admin: str = ""
    """Empty where there is no admin port."""


class ServerOptions(BaseModel):
    """Where and how a server listens, and where its sessions run.

    The text under a field is also the help of its flag.

    Raises:
        ConfigError: the options cannot work.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(DEFAULT_PORT, ge=0, le=65_535)
    """For HTTP and WebSocket; 0 takes a free one."""
    grpc_port: int | None = Field(None, ge=0, le=65_535)
    """For gRPC; else port + 10000, or a free one when the port is 0."""
    admin_port: int | None = Field(None, ge=0, le=65_535)
    """Probes, /drain and /metrics over HTTP, without token and TLS: for a port that only the
    cluster reaches. 0 takes a free one; else there is none."""
    max_sessions: int = Field(256, ge=1)
    """Sessions at once."""
    drain_grace_s: float = Field(0.0, ge=0)
    """How long SIGTERM lets sessions continue, none new; the server ends when the last one has.
    In a pod, stay below its terminationGracePeriodSeconds."""
    idle_timeout_s: float = 600.0
    """A session without a call for so long is ended."""
    wait_for_slot_s: float = Field(0.0, ge=0)
    """How long an open waits for a free session."""
    first_seed: int | None = Field(None, ge=0)
    """Resets without a seed take this one, then the next; else seeds are drawn."""
    check_determinism: bool = False
    """Try at the start, for about two seconds, whether same seeds give same episodes."""
    deterministic: bool = False
    """Take same seeds to give same episodes, untried: for environments too slow to be tried."""
    token: str | None = Field(None, repr=False)
    """What callers must show; the variable `token_env` has precedence."""
    token_env: str = ""
    """Environment variable that holds the token; it may be unset."""
    insecure: bool = False
    """Listen beyond this machine without a token."""
    record: Path | None = None
    """Write every episode to this .jsonl file, or to a file of its own in this folder."""
    ready_file: Path | None = None
    """Written as JSON (http, grpc, admin, pid) once a server process listens."""
    tls_cert: Path | None = None
    """PEM file with the certificate; both ports then speak TLS only. It may be replaced while
    the server runs."""
    tls_key: Path | None = None
    """PEM file with the certificate's private key."""
    tls_client_ca: Path | None = None
    """PEM file; asks clients for certificates of this authority."""
    isolation: Isolation = "inline"
    """inline: in the server itself, fastest, and code that crashes or hangs takes the server
    with it; pool: in worker processes that share the sessions; process: one for each session."""
    num_workers: int | None = Field(None, ge=1)
    """Of a pool; else one for each CPU."""
    num_threads: int = Field(32, ge=1)
    """Of the server or of each worker in a pool, for environments that do not step on the
    event loop."""
    step_timeout_s: float = Field(STEP_TIMEOUT_S, ge=0)
    """A longer call ends its session, with its worker where it has one, and building an
    environment may take as long; 0 waits for ever. A step on the event loop that takes longer
    ends the server with exit code 70."""
    memory_limit_mb: int = Field(0, ge=0)
    """Of a worker; 0 is none."""
    cpu_limit_s: float = Field(0.0, ge=0)
    """CPU time of a session with a process of its own; 0 is none."""
    disk_limit_mb: int = Field(1024, ge=0)
    """Of a worker's own folder; 0 is none."""
    pass_env: tuple[str, ...] = ()
    """Environment variable that workers get too; they get few, and no secrets. May be repeated."""
    allow_read: tuple[Path, ...] = ()
    """File or folder that workers may read, beside the system, the code and what the
    environment's options name. May be repeated."""
    allow_write: tuple[Path, ...] = ()
    """File or folder in which workers may read and write, beside a folder of their own. May be
    repeated."""
    no_network: bool = False
    """Give workers no network, not even loopback."""
    require_sandbox: bool = False
    """Refuse to serve where a layer of the workers' sandbox is missing."""
    session_key: str | None = Field(None, repr=False)
    """The gateway's: lets clients open sessions under ids that it signed."""
    server_id: str = Field(default_factory=_own_server_id)
    """In session ids; that of the pod when POD_UID is set."""

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, given: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        """The options, with errors in this project's words."""
        if isinstance(given, Mapping) and given.get("token_env"):
            given = {**given, "token": os.environ.get(given["token_env"], given.get("token"))}
        try:
            options = build(given)
        except ValidationError as error:
            raise ConfigError(explain(error)) from None
        options._check_ports()
        options._check_tls()
        options._check_isolation()
        _ = options.key
        return options

    def _check_ports(self) -> None:
        if self.host not in _LOOPBACK_HOSTS and not self.token and not self.insecure:
            raise ConfigError(
                f"expected a token to listen on {self.host}, which other machines can reach,"
                " got none; give one, listen on 127.0.0.1, or allow it as insecure"
            )
        if self.bound_grpc_port > 65_535:
            raise ConfigError(
                f"expected grpc_port between 0 and 65535, got {self.bound_grpc_port};"
                " set port and grpc_port"
            )

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ConfigError(
                f"expected tls_cert and tls_key together, got {given} alone; give {missing} too"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError(
                "expected tls_client_ca with tls_cert and tls_key, got it alone; give all three"
            )

    def _check_isolation(self) -> None:
        isolation = self.isolation
        if isolation != "inline" and not hasattr(os, "fork"):
            raise ConfigError(
                f"expected isolation='inline', because this system cannot fork; got {isolation!r}"
            )
        if self.num_workers is not None and isolation != "pool":
            raise ConfigError(
                f"expected num_workers with isolation='pool' only, got {self.num_workers} with"
                f" '{isolation}'; leave it out, or set isolation='pool'"
            )
        if self.memory_limit_mb and isolation == "inline":
            raise ConfigError(
                f"expected memory_limit_mb with worker processes only, got {self.memory_limit_mb}"
                " with isolation='inline'; set isolation='pool' or 'process'"
            )
        for field in ("no_network", "require_sandbox"):
            if getattr(self, field) and isolation == "inline":
                raise ConfigError(
                    f"expected {field} with worker processes only, because nothing confines the"
                    " server itself; got it with isolation='inline'; set isolation='pool' or"
                    " 'process'"
                )
        if self.cpu_limit_s and isolation != "process":
            raise ConfigError(
                "expected cpu_limit_s with isolation='process' only, because it counts the life"
                f" of a whole process; got {self.cpu_limit_s:g} with '{isolation}';"
                " set isolation='process', or bound single steps by step_timeout_s"
            )

    @property
    def bound_grpc_port(self) -> int:
        """The gRPC port to ask for."""
        return bound_grpc_port(self.port, self.grpc_port)

    @property
    def bound_num_workers(self) -> int:
        """How many workers a pool has: no more than sessions."""
        return min(self.num_workers or available_cpus(), self.max_sessions)

    @property
    def key(self) -> SessionKey | None:
        """What reads signed session ids."""
        return SessionKey(self.session_key.encode()) if self.session_key else None


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command line that sets one field of `ServerOptions`."""

    field: str
    info: FieldInfo
    default: Any
    """What the command line takes when the flag is not given."""
    group: str

    @property
    def name(self) -> str:
        """For example --grpc-port."""
        if self.default is True:
            return "--no-determinism-check"
        return "--" + self.field.replace("_", "-")

    @property
    def annotation(self) -> Any:
        """The type of its value."""
        return self.info.annotation

    @property
    def is_switch(self) -> bool:
        """True when it takes no value, and turns the default around."""
        return isinstance(self.default, bool)

    @property
    def is_repeated(self) -> bool:
        """True when it is given once for each value."""
        return get_origin(self.annotation) is tuple

    @property
    def shown_default(self) -> str:
        """The default for people; empty where the text explains it, as it does 0 and None."""
        if self.is_switch or not self.default:
            return ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def help(self) -> str:
        """What the field's own text says."""
        text = " ".join((self.info.description or "").split())
        return f"Do not {text[0].lower()}{text[1:]}" if self.default is True else text


def command_defaults(default_port: int) -> dict[str, Any]:
    """Where a command line takes another default than a program that builds the options."""
    return {"port": default_port, "check_determinism": True, "token_env": TOKEN_VARIABLE}


def flags(default_port: int = DEFAULT_PORT) -> Iterator[Flag]:
    """The flags of a server's command line, group by group."""
    defaults = command_defaults(default_port)
    group = ""
    for field, info in ServerOptions.model_fields.items():
        group = _GROUPS.get(field, group)
        if field not in _SECRETS_AND_NAMES:
            yield Flag(field, info, defaults.get(field, info.default), group)


def bound_grpc_port(port: int, grpc_port: int | None) -> int:
    """The gRPC port to ask for where it may not be given: beside the other one."""
    if grpc_port is not None:
        return grpc_port
    return port + GRPC_PORT_OFFSET if port else 0


def available_cpus() -> int:
    """How many CPUs this process may use, a container's quota counted in."""
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
    settings = command_defaults(default_port)
    settings["session_key"] = os.environ.get(SESSION_KEY_VARIABLE)
    settings |= {name: values[name] for name in ServerOptions.model_fields if name in values}
    return ServerOptions(**settings)
