"""Servers for tests, in this event loop or in a process that can be killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quiet_ports import quiet_ports

from ludus.env.serving.server import EnvServer, ServerOptions
from ludus.env.sessions.hosts import EnvironmentFactory
from tests.env.counting_env import CountingEnv

WIRES = ("grpc", "http")


def serve(factory: EnvironmentFactory = CountingEnv, **options: Any) -> EnvServer:
    """Return a server that uses free ports. Start it with `async with`."""
    return EnvServer(factory, ServerOptions(**{"port": 0, **options}))


def server_address(server: EnvServer | ServerProcess, wire: str) -> str:
    return server.grpc_address if wire == "grpc" else server.http_address


@contextmanager
def reserve_port() -> Iterator[int]:
    """Yield a reserved port that refuses connections."""
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        yield bound_socket.getsockname()[1]


def make_fixed_port_arguments() -> list[str]:
    """Return arguments that fix the ports, so that a restarted server uses the same ones."""
    http_port, grpc_port = quiet_ports(2)
    return ["--port", str(http_port), "--grpc-port", str(grpc_port)]


@dataclass
class ServerProcess:
    """A counting server in a separate process."""

    process: subprocess.Popen[str]
    http_address: str
    grpc_address: str
    admin_address: str = ""


@contextmanager
def start_server_process(
    folder: Path,
    *arguments: str,
    module: str = str(Path(__file__).with_name("counting_env.py")),
    env: dict[str, str] | None = None,
) -> Iterator[ServerProcess]:
    ready_file = folder / f"ready-{time.monotonic_ns()}.json"
    command = [sys.executable, *module.split(), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--ready-file", str(ready_file), *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        ready_report = _read_when_ready(ready_file, process)
        assert ready_report["pid"] == process.pid
        yield ServerProcess(
            process, ready_report["http"], ready_report["grpc"], ready_report.get("admin", "")
        )
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _read_when_ready(ready_file: Path, process: subprocess.Popen[str]) -> dict[str, Any]:
    deadline_s = time.monotonic() + 120.0
    while not ready_file.exists():
        if process.poll() is not None:
            raise AssertionError(f"server exited before it was ready: {process.communicate()[1]}")
        assert time.monotonic() < deadline_s, "server was not ready within 120 s"
        time.sleep(0.02)
    return json.loads(ready_file.read_text())
