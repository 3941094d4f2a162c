"""A server process on this machine that this process starts, watches, restarts and stops."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ludus.env.runtime import make_module_command
from ludus.env.sessions.options import TOKEN_VARIABLE, Isolation, ServerAddresses
from ludus.env.types import JsonObject
from ludus.proto.errors import UnavailableError, UserError

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 0.02
_USER_ERROR_EXIT_CODE = 2


@dataclass(slots=True)
class LocalServer:
    """`python -m ludus.env PACKAGE` as a child process, which exits with this process."""

    package: str
    options: JsonObject = field(default_factory=dict)
    max_sessions: int = 1024
    log_file: Path | None = None
    """File for the server's output; None discards the output unless the start fails."""
    isolation: Isolation | None = None
    """Isolation of sessions (see `ServerOptions`); None uses the environment's default."""
    extra_arguments: list[str] = field(default_factory=list)
    """Further options of `python -m ludus.env`; every user of this machine can read them."""
    extra_variables: dict[str, str] = field(default_factory=dict, repr=False)
    """Additional environment variables, such as the secret LUDUS_SERVER_KEY."""
    hidden_variables: frozenset[str] = frozenset()
    """Environment variables of this process that the server must not receive, in addition to the
    token of other servers."""
    num_restarts: int = 0
    addresses: ServerAddresses | None = None
    """Addresses of the server when it last ran; None before the first start."""
    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None if the server is not running."""
        return self._process.pid if self.is_running and self._process else None

    @property
    def is_running(self) -> bool:
        """False if the server was not started, was stopped, or died."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> ServerAddresses:
        """Start the server and return its addresses; a restart uses the same ports.

        Raises:
            UserError: the server refused its package, options or ports, with its own message.
            UnavailableError: the server did not listen in time.
        """
        # The server is reachable on loopback only and needs no token.
        hidden_names = self.hidden_variables | {TOKEN_VARIABLE}
        variables = {name: value for name, value in os.environ.items() if name not in hidden_names}
        with tempfile.TemporaryDirectory(prefix="ludus-env-") as folder:
            ready_file, errors_file = Path(folder) / "ready.json", Path(folder) / "errors"
            with errors_file.open("wb") as errors_output:
                self._process = subprocess.Popen(
                    self._build_command(ready_file),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self.log_file.open("ab") if self.log_file else errors_output,
                    env={**variables, **self.extra_variables},
                    # Ctrl-C in a terminal is for this process, which then stops its servers.
                    start_new_session=True,
                )
            self._wait_until_ready(ready_file, self.log_file or errors_file)
            ready_addresses = json.loads(ready_file.read_text())
        self.addresses = ServerAddresses(
            ready_addresses["http"], ready_addresses["grpc"], ready_addresses.get("admin", "")
        )
        return self.addresses

    def restart(self) -> ServerAddresses:
        """Restart the server and return its addresses."""
        self.stop()
        self.num_restarts += 1
        return self.start()

    def stop(self) -> None:
        """Terminate the process, and kill it if it does not exit."""
        if self._process is None or not self.is_running:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _build_command(self, ready_file: Path) -> list[str]:
        old_addresses = self.addresses
        return [
            *make_module_command("ludus.env"),
            self.package,
            *("--options", json.dumps(self.options)),
            *("--port", str(urlsplit(old_addresses.http).port) if old_addresses else "0"),
            *("--grpc-port", str(urlsplit(old_addresses.grpc).port) if old_addresses else "0"),
            *("--max-sessions", str(self.max_sessions)),
            *(("--isolation", self.isolation) if self.isolation else ()),
            *self.extra_arguments,
            *("--ready-file", str(ready_file)),
            *("--exit-with-parent", str(os.getpid())),
        ]

    def _wait_until_ready(self, ready_file: Path, output_file: Path) -> None:
        process = self._process
        assert process is not None
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not ready_file.exists():
            if process.poll() is not None:
                message = _read_last_line(output_file) or f"exit code {process.returncode}"
                if process.returncode == _USER_ERROR_EXIT_CODE:
                    raise UserError(message.removeprefix("error: "))
                raise UnavailableError(
                    f"the server of '{self.package}' exited while it started: {message}"
                )
            if time.monotonic() > deadline_s:
                self.stop()
                raise UnavailableError(
                    f"the server of '{self.package}' did not listen within {_START_TIMEOUT_S:g} s; "
                    f"start it by hand to see why: ludus env serve {self.package}"
                )
            time.sleep(_POLL_INTERVAL_S)


def _read_last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
