"""`ludus env serve`: every option of a server, as `python -m ludus.env` has them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ludus.services.cli.env_places import Options, Target
from ludus.services.cli.options import parse_options

DEFAULT_PORT = 8000


class IsolationName(StrEnum):
    """Where sessions run."""

    INLINE = "inline"
    POOL = "pool"
    PROCESS = "process"


_ISOLATION = "Where sessions run"
_TLS = "TLS"
Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="For HTTP and WebSocket; 0 takes a free one.")
]
GrpcPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="For gRPC.", show_default="port + 10000"),
]
AdminPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Probes and metrics without a token.", show_default="none"),
]
DrainGrace = Annotated[
    float | None,
    typer.Option(
        "--drain-grace-s", min=0, help="How long SIGTERM lets sessions continue.", show_default="0"
    ),
]
MaxSessions = Annotated[int | None, typer.Option(min=1, help="At once.", show_default="256")]
IdleTimeout = Annotated[
    float | None,
    typer.Option("--idle-timeout-s", help="Ends sessions without a call.", show_default="600"),
]
WaitForSlot = Annotated[
    float | None,
    typer.Option(
        "--wait-for-slot-s", min=0, help="How long an open waits when full.", show_default="0"
    ),
]
FirstSeed = Annotated[
    int | None,
    typer.Option(min=0, help="For resets without a seed, then the next.", show_default="drawn"),
]
NoDeterminismCheck = Annotated[
    bool,
    typer.Option("--no-determinism-check", help="Do not try at the start whether seeds hold."),
]
TokenEnv = Annotated[
    str | None,
    typer.Option(help="Variable that holds the token.", show_default="LUDUS_ENV_TOKEN"),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen beyond this machine without a token.")
]
TlsCert = Annotated[
    Path | None,
    typer.Option(help="PEM file; serves TLS only.", rich_help_panel=_TLS),
]
TlsKey = Annotated[
    Path | None, typer.Option(help="PEM file, the certificate's own.", rich_help_panel=_TLS)
]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(help="Asks clients for certificates of this CA.", rich_help_panel=_TLS),
]
Record = Annotated[
    Path | None,
    typer.Option(help="Write every episode to this .jsonl file or folder; see `env replay`."),
]
ReadyFile = Annotated[
    Path | None, typer.Option(help="Written as JSON (http, grpc, admin, pid) once it listens.")
]
Isolation = Annotated[
    IsolationName | None,
    typer.Option(
        help="inline: in the server; pool: in worker processes; process: one process each.",
        show_default="inline; process where one session is all a process can hold",
        rich_help_panel=_ISOLATION,
    ),
]
NumWorkers = Annotated[
    int | None,
    typer.Option(
        min=1, help="Of a pool.", show_default="one for each CPU", rich_help_panel=_ISOLATION
    ),
]
NumThreads = Annotated[
    int | None,
    typer.Option(
        min=1, help="For slow environments.", show_default="32", rich_help_panel=_ISOLATION
    ),
]
StepTimeout = Annotated[
    float | None,
    typer.Option(
        "--step-timeout-s",
        min=0,
        help="A longer step ends its session; 0 waits for ever.",
        show_default="60 with workers, 0 inline",
        rich_help_panel=_ISOLATION,
    ),
]
MemoryLimit = Annotated[
    int | None,
    typer.Option("--memory-limit-mb", min=0, help="Of a worker.", rich_help_panel=_ISOLATION),
]
CpuLimit = Annotated[
    float | None,
    typer.Option(
        "--cpu-limit-s", min=0, help="Of a session's process.", rich_help_panel=_ISOLATION
    ),
]


def serve(
    target: Target,
    options: Options = None,
    host: Host = None,
    port: Port = DEFAULT_PORT,
    grpc_port: GrpcPort = None,
    admin_port: AdminPort = None,
    drain_grace_s: DrainGrace = None,
    max_sessions: MaxSessions = None,
    idle_timeout_s: IdleTimeout = None,
    wait_for_slot_s: WaitForSlot = None,
    first_seed: FirstSeed = None,
    no_determinism_check: NoDeterminismCheck = False,
    token_env: TokenEnv = None,
    insecure: Insecure = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    record: Record = None,
    ready_file: ReadyFile = None,
    isolation: Isolation = None,
    num_workers: NumWorkers = None,
    num_threads: NumThreads = None,
    step_timeout_s: StepTimeout = None,
    memory_limit_mb: MemoryLimit = None,
    cpu_limit_s: CpuLimit = None,
) -> None:
    """Serve an environment over HTTP, WebSocket and gRPC until Ctrl-C.

    Example: `ludus env serve openspiel_env --option game=blackjack --port 8004`

    Example: `ludus env serve gymnasium:CartPole-v1 --isolation pool --record episodes/`
    """
    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "grpc_port": grpc_port,
        "admin_port": admin_port,
        "drain_grace_s": drain_grace_s,
        "max_sessions": max_sessions,
        "idle_timeout_s": idle_timeout_s,
        "wait_for_slot_s": wait_for_slot_s,
        "first_seed": first_seed,
        "check_determinism": False if no_determinism_check else None,
        "token_env": token_env,
        "insecure": insecure or None,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "record": record,
        "ready_file": ready_file,
        "isolation": None if isolation is None else isolation.value,
        "num_workers": num_workers,
        "num_threads": num_threads,
        "step_timeout_s": step_timeout_s,
        "memory_limit_mb": memory_limit_mb,
        "cpu_limit_s": cpu_limit_s,
    }
    _run(target, parse_options(options or ()), {k: v for k, v in given.items() if v is not None})


def _run(target: str, options: dict[str, Any], given: dict[str, Any]) -> None:
    from ludus.env.serving.server import run_server
    from ludus.env.targets.targets import environment_factory

    run_server(environment_factory(target, options), given, DEFAULT_PORT)
