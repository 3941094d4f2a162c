"""How a server listens, how many sessions it holds, and what they may do to it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from ludus.env.security.session_ids import SessionKey, new_server_id, server_id_of
from ludus.env.security.tls import TlsFiles
from ludus.env.workers.host import WorkerOptions
from ludus.env.workers.protocol import WorkerLimits
from ludus.proto.errors import ConfigError

Isolation: TypeAlias = Literal["inline", "pool", "process"]

GRPC_PORT_OFFSET = 10_000
WORKER_STEP_TIMEOUT_S = 60.0
_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


def _own_server_id() -> str:
    pod_uid = os.environ.get("POD_UID")
    return server_id_of(pod_uid) if pod_uid else new_server_id()


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """Where a running server listens."""

    http: str
    grpc: str
    admin: str = ""
    """Empty where there is no admin port."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where and how a server listens, and where its sessions run."""

    host: str = "127.0.0.1"
    port: int = 8000
    """HTTP and WebSocket; 0 takes a free port."""
    grpc_port: int | None = None
    """None means port + 10000, or a free port when `port` is 0."""
    admin_port: int | None = None
    """Probes, `/drain` and `/metrics` over HTTP, without token and TLS: for a port that only
    the cluster reaches. 0 takes a free one, None opens none."""
    tls_cert: Path | None = None
    """PEM file, that may be replaced while the server runs; with `tls_key`, both ports speak
    TLS only."""
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """Asks clients for certificates of this authority."""
    drain_grace_s: float = 0.0
    """How long SIGTERM lets sessions continue, none new; the server ends when the last one has.
    In a pod, stay below its terminationGracePeriodSeconds."""
    max_sessions: int = 256
    idle_timeout_s: float = 600.0
    """A session without a call for so long is ended."""
    wait_for_slot_s: float = 0.0
    """How long an open waits for a free session."""
    isolation: Isolation = "inline"
    """Where sessions run: `inline` in the server itself, `pool` in worker processes that
    share them, `process` in one of its own each. Inline, code that crashes or hangs takes
    the server with it."""
    num_workers: int | None = None
    """Of a pool; None takes one for each CPU."""
    num_threads: int = 32
    """Of the server or of each worker in a pool, for environments that do not step on the
    event loop."""
    step_timeout_s: float | None = None
    """A reset or step that takes longer ends its session, with its worker where it has one;
    0 waits for ever. None means 60 with workers, 0 without."""
    memory_limit_mb: int = 0
    """Of a worker; 0 is none."""
    cpu_limit_s: float = 0.0
    """CPU time of a session, where each has a process of its own; 0 is none."""
    first_seed: int | None = None
    """Resets without a seed take this one, then the next; None draws them."""
    check_determinism: bool = False
    """Tries at the start, for about two seconds, whether same seeds give same episodes."""
    record: Path | None = None
    """Every episode is written to this .jsonl file, or to a file of its own in this folder."""
    token: str | None = field(default=None, repr=False)
    insecure: bool = False
    """Allows listening beyond this machine without a token."""
    session_key: str | None = field(default=None, repr=False)
    """The gateway's: lets clients open sessions under ids that it signed."""
    server_id: str = field(default_factory=_own_server_id)
    """In session ids; that of the pod when POD_UID is set."""

    def __post_init__(self) -> None:
        if self.host not in _LOOPBACK_HOSTS and not self.token and not self.insecure:
            raise ConfigError(
                f"expected a token to listen on {self.host}, which other machines can reach,"
                " got none; give one, listen on 127.0.0.1, or allow it as insecure"
            )
        self._check_ports()
        self._check_tls()
        self._check_numbers()
        self._check_isolation()
        _ = self.key

    def _check_ports(self) -> None:
        ports = {"port": self.port, "grpc_port": self.bound_grpc_port}
        if self.admin_port is not None:
            ports["admin_port"] = self.admin_port
        for name, port in ports.items():
            if not 0 <= port <= 65_535:
                raise ConfigError(
                    f"expected {name} between 0 and 65535, got {port}; set port and {name}"
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

    def _check_numbers(self) -> None:
        lowest = {
            **dict.fromkeys(("max_sessions", "num_workers", "num_threads"), 1),
            **dict.fromkeys(("wait_for_slot_s", "step_timeout_s", "drain_grace_s"), 0),
            **dict.fromkeys(("memory_limit_mb", "cpu_limit_s", "first_seed"), 0),
        }
        for name, least in lowest.items():
            value = getattr(self, name)
            if value is not None and not (value >= least and math.isfinite(value)):
                raise ConfigError(f"expected {name} >= {least}, got {value}")

    def _check_isolation(self) -> None:
        isolation = self.isolation
        if isolation not in get_args(Isolation):
            raise ConfigError(
                f"expected isolation to be one of {', '.join(get_args(Isolation))};"
                f" got {isolation!r}"
            )
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
        if self.cpu_limit_s and isolation != "process":
            raise ConfigError(
                "expected cpu_limit_s with isolation='process' only, because it counts the life"
                f" of a whole process; got {self.cpu_limit_s:g} with '{isolation}';"
                " set isolation='process', or bound single steps by step_timeout_s"
            )

    @property
    def tls(self) -> TlsFiles | None:
        """The files of TLS; None speaks none."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def bound_grpc_port(self) -> int:
        """The gRPC port to ask for."""
        if self.grpc_port is not None:
            return self.grpc_port
        return self.port + GRPC_PORT_OFFSET if self.port else 0

    @property
    def bound_step_timeout_s(self) -> float:
        """The limit of a step; 0 is none."""
        if self.step_timeout_s is not None:
            return self.step_timeout_s
        return 0.0 if self.isolation == "inline" else WORKER_STEP_TIMEOUT_S

    @property
    def key(self) -> SessionKey | None:
        """What reads signed session ids."""
        return SessionKey(self.session_key.encode()) if self.session_key else None

    @property
    def worker_options(self) -> WorkerOptions:
        """What workers are told, where there are any."""
        num_workers = self.num_workers or available_cpus()
        return WorkerOptions(
            isolation="process" if self.isolation == "process" else "pool",
            num_workers=min(num_workers, self.max_sessions),
            max_sessions=self.max_sessions,
            num_threads=self.num_threads,
            step_timeout_s=self.bound_step_timeout_s,
            limits=WorkerLimits(self.memory_limit_mb, self.cpu_limit_s),
            check_determinism=self.check_determinism,
            secrets=frozenset(filter(None, (self.token, self.session_key))),
        )


def available_cpus() -> int:
    """How many CPUs this process may use, a container's quota counted in."""
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(num_cpus, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return num_cpus
