"""The server's command line: from arguments and environment variables to `ServerOptions`.

Secrets come from environment variables only: arguments are shown to every user of a machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ludus.env.serving.options import (
    WORKER_STEP_TIMEOUT_S,
    Isolation,
    ServerAddresses,
    ServerOptions,
)
from ludus.env.sessions.hosts import STEP_THREAD_NAME

_log = logging.getLogger(__name__)

SESSION_KEY_VARIABLE = "LUDUS_SESSION_KEY"
TOKEN_VARIABLE = "LUDUS_ENV_TOKEN"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What a command line asks for."""

    options: ServerOptions
    ready_file: Path | None

    def announce(self, addresses: ServerAddresses) -> None:
        """Logs where the server listens, and writes the ready file whole."""
        found = {name: url for name, url in dataclasses.asdict(addresses).items() if url}
        _log.info("listening on %s", ", ".join(found.values()))
        if self.ready_file is None:
            return
        ready = {**found, "pid": os.getpid()}
        unfinished = self.ready_file.with_name(f"{self.ready_file.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(ready))
        unfinished.replace(self.ready_file)

    def withdraw(self) -> None:
        """Removes the ready file."""
        if self.ready_file is not None:
            self.ready_file.unlink(missing_ok=True)


def add_server_arguments(parser: argparse.ArgumentParser, default_port: int) -> None:
    """Nothing; adds every option of a server. Only what is given appears in the namespace."""
    defaults = ServerOptions(server_id="-")
    where = parser.add_argument_group("server")
    _add(where, "--host", str, f"default: {defaults.host}")
    _add(where, "--port", int, f"0 takes a free port; default: {default_port}")
    _add(where, "--grpc-port", int, "default: port + 10000")
    _add(where, "--admin-port", int, "probes and metrics without a token; default: none")
    _add(where, "--max-sessions", int, f"default: {defaults.max_sessions}")
    _add(where, "--drain-grace-s", float, "how long SIGTERM lets sessions continue; default: 0")
    _add(where, "--idle-timeout-s", float, f"default: {defaults.idle_timeout_s:g}")
    _add(where, "--wait-for-slot-s", float, "how long an open waits when full; default: 0")
    _add(where, "--first-seed", int, "for resets without a seed, then the next; default: random")
    where.add_argument(
        "--no-determinism-check",
        dest="check_determinism",
        action="store_false",
        default=argparse.SUPPRESS,
        help="do not try at the start whether the environment is deterministic",
    )
    _add(where, "--token-env", str, f"variable with the token; default: {TOKEN_VARIABLE}")
    where.add_argument(
        "--insecure",
        action="store_true",
        default=argparse.SUPPRESS,
        help="listen beyond this machine without a token",
    )
    _add(where, "--tls-cert", Path, "PEM file with the certificate; serves TLS only")
    _add(where, "--tls-key", Path, "PEM file with the certificate's private key")
    _add(where, "--tls-client-ca", Path, "asks clients for certificates of this authority")
    _add(where, "--record", Path, "write every episode to this .jsonl file or folder")
    _add(where, "--ready-file", Path, "written as JSON (http, grpc, admin, pid) once it listens")
    _add_isolation(parser, defaults)
    parser.epilog = (
        f"{SESSION_KEY_VARIABLE}, where it is set, lets clients open sessions under ids that a"
        " gateway with the same key signed; POD_UID names the server in them."
    )


def server_parser(default_port: int) -> argparse.ArgumentParser:
    """What reads the arguments of a server and no others."""
    parser = argparse.ArgumentParser(
        description="Serves an environment over HTTP, WebSocket and gRPC."
    )
    add_server_arguments(parser, default_port)
    return parser


def command_of(given: Mapping[str, Any], default_port: int) -> ServerCommand:
    """The command that a namespace of `add_server_arguments` stands for.

    Raises:
        ConfigError: the options cannot work together.
    """
    settings: dict[str, Any] = {
        "port": default_port,
        "check_determinism": True,
        "token": os.environ.get(given.get("token_env", TOKEN_VARIABLE)),
        "session_key": os.environ.get(SESSION_KEY_VARIABLE),
    }
    names = {option.name for option in dataclasses.fields(ServerOptions)}
    settings |= {name: value for name, value in given.items() if name in names}
    return ServerCommand(ServerOptions(**settings), given.get("ready_file"))


def leave_stuck_threads_behind() -> None:
    """Ends the process here when a step hangs in a thread: the interpreter would wait for it."""
    for thread in threading.enumerate():
        if thread.name.startswith(STEP_THREAD_NAME):
            thread.join(timeout=0.2)
            if thread.is_alive():
                logging.shutdown()
                os._exit(0)


def _add_isolation(parser: argparse.ArgumentParser, defaults: ServerOptions) -> None:
    group = parser.add_argument_group(
        "isolation", "where sessions run, and what a session may do to the others"
    )
    group.add_argument(
        "--isolation",
        choices=get_args(Isolation),
        default=argparse.SUPPRESS,
        help="inline: in the server, fastest, nothing is isolated; pool: in worker processes"
        " that share the sessions; process: one process for each session"
        f" (default: {defaults.isolation})",
    )
    _add(group, "--num-workers", int, "of a pool; default: one for each CPU")
    _add(group, "--num-threads", int, f"for slow environments; default: {defaults.num_threads}")
    _add(
        group,
        "--step-timeout-s",
        float,
        "a longer reset or step ends its session, with its worker where it has one; 0 waits"
        f" for ever; default: {WORKER_STEP_TIMEOUT_S:g} with workers, 0 inline",
    )
    _add(group, "--memory-limit-mb", int, "of a worker; default: none")
    _add(group, "--cpu-limit-s", float, "of a session with --isolation process; default: none")


def _add(target: Any, flag: str, kind: type, explanation: str) -> None:
    target.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=explanation)
