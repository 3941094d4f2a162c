"""Environment servers in containers that a client starts and stops.

    client --start_container--> provider --docker or podman--> container, port 8000
       |                                                            ^
       +-- GET /health until it responds --- 127.0.0.1:PORT --------+

`ContainerProvider` is also the interface of OpenEnv's providers, so a client can use those. The
containers of `LocalContainers` are only reachable from this machine. They are removed when the
client closes, when the server does not become ready, and when this process exits for any reason.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import secrets
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Protocol

from ludus.proto.errors import ConfigError, UnavailableError

ENGINES = ("docker", "podman")
CONTAINER_PORT = 8000
"""Port on which servers listen in the images of OpenEnv and Ludus."""
READY_TIMEOUT_S = 30.0
HUB_REGISTRY = "registry.hf.space"

_RUN_TIMEOUT_S = 600.0
"""Time limit of `run`, which includes the download of the image."""
_COMMAND_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.1
_HEALTH_TIMEOUT_S = 2.0
_GUARD_SCRIPT = 'read -r _; "$0" kill "$1"; exec "$0" rm --force --volumes "$1"'
"""Shell script that waits for the end of its input, and then removes the container. The input ends
when the process that started the script closes it or exits."""


def make_hub_image_name(repository: str, tag: str = "latest") -> str:
    """Return the name of the image that Hugging Face builds for the Space "owner/name".

    The registry uses the name of the Space's page: lower case, with a hyphen for each character
    that is neither a letter nor a digit.

    Raises:
        ConfigError: the name or the tag is malformed.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository, re.ASCII):
        raise ConfigError(
            "expected a Space of the Hub as owner/name, such as openenv/echo_env, got"
            f" {repository!r}"
        )
    if not re.fullmatch(r"\w[\w.-]{0,127}", tag, re.ASCII):
        raise ConfigError(f"expected the tag of an image, such as latest, got {tag!r}")
    return f"{HUB_REGISTRY}/{re.sub('[^a-z0-9]', '-', repository.lower())}:{tag}"


class ContainerProvider(Protocol):
    """A provider that starts one container, waits for its server, and stops it."""

    def start_container(
        self, image: str, port: int | None = None, env_vars: Mapping[str, str] | None = None
    ) -> str:
        """Start a container and return its server's address, http://host:port.

        Raises:
            UserError: the container cannot be started.
        """

    def wait_for_ready(self, base_url: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the server responds.

        Raises:
            UnavailableError: the server exited, or did not respond within `timeout_s`.
        """

    def stop_container(self) -> None:
        """Stop and remove the container, if there is one."""


class LocalContainers:
    """A provider that uses the command line of docker or podman on this machine.

    Args:
        engine: name or path of the program. Default: docker, or podman if docker does not work.
    """

    def __init__(self, engine: str | None = None) -> None:
        self._requested_engine = engine
        self._engine = ""
        self._container_name = ""
        self._guard: subprocess.Popen[bytes] | None = None

    def start_container(
        self, image: str, port: int | None = None, env_vars: Mapping[str, str] | None = None
    ) -> str:
        """Start a container and return its server's address on 127.0.0.1.

        Args:
            port: port on this machine. Default: a free port.
            env_vars: variables in the container. Their values do not appear on the command line.

        Raises:
            ConfigError: no engine works, the provider already has a container, or the engine
                refuses the image or the port.
        """
        if self._container_name:
            raise ConfigError(
                f"a provider can run one container, and this one runs"
                f" '{self._container_name}'; make a provider for each container"
            )
        self._engine = self._engine or _find_engine(self._requested_engine)
        self._container_name = f"ludus-{secrets.token_hex(6)}"
        self._guard = _start_guard(self._engine, self._container_name)
        variables = dict(env_vars or {})
        try:
            self._run_engine(
                *("run", "--detach", "--name", self._container_name),
                *("--publish", f"127.0.0.1:{port or ''}:{CONTAINER_PORT}"),
                *(argument for name in variables for argument in ("--env", name)),
                image,
                variables=variables,
                timeout_s=_RUN_TIMEOUT_S,
            )
            addresses = self._run_engine("port", self._container_name, f"{CONTAINER_PORT}/tcp")
        except BaseException:
            self.stop_container()
            raise
        return f"http://{addresses.splitlines()[0]}"

    def wait_for_ready(self, base_url: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until /health responds."""
        deadline_s = time.monotonic() + timeout_s
        while not _is_healthy(base_url):
            if not self._is_running():
                raise UnavailableError(
                    f"the server in container '{self._container_name}' exited while it"
                    f" started; last line of its log: {self._read_last_log_line()}"
                )
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"{base_url}/health did not respond within {timeout_s:g} s; last line of its"
                    f" log: {self._read_last_log_line()}"
                )
            time.sleep(_POLL_INTERVAL_S)

    def stop_container(self) -> None:
        """Stop and remove the container, if there is one."""
        guard, self._guard, self._container_name = self._guard, None, ""
        if guard is None:
            return
        assert guard.stdin is not None
        guard.stdin.close()
        # A guard process that takes longer finishes in the background.
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(_COMMAND_TIMEOUT_S)

    def _is_running(self) -> bool:
        try:
            state_text = self._run_engine(
                "inspect", "--format", "{{.State.Running}}", self._container_name
            )
        except ConfigError:
            return False
        return state_text == "true"

    def _read_last_log_line(self) -> str:
        logs_process = subprocess.run(
            [self._engine, "logs", "--tail", "1", self._container_name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
        return logs_process.stdout.strip()[-500:] or "none"

    def _run_engine(
        self,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        timeout_s: float = _COMMAND_TIMEOUT_S,
    ) -> str:
        """Run the engine's command line and return its output.

        Raises:
            ConfigError: the command failed; the message contains the last line of its errors.
        """
        try:
            completed_process = subprocess.run(
                [self._engine, *arguments],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env={**os.environ, **(variables or {})},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(
                f"'{self._engine} {arguments[0]}' did not finish within {timeout_s:g} s"
            ) from None
        if completed_process.returncode:
            reason = (completed_process.stderr.strip().splitlines() or ["no reason"])[-1]
            raise ConfigError(f"'{self._engine} {arguments[0]}' failed: {reason}")
        return completed_process.stdout.strip()


def _find_engine(requested_engine: str | None) -> str:
    """Return the first engine that is installed and responds. Docker needs its daemon for that."""
    engine_names = ENGINES if requested_engine is None else (requested_engine,)
    unresponsive_engines = []
    for engine_name in engine_names:
        if shutil.which(engine_name) is None:
            continue
        info_process = subprocess.run(
            [engine_name, "info"], capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
        if info_process.returncode == 0:
            return engine_name
        unresponsive_engines.append(engine_name)
    if unresponsive_engines:
        reason = f"{' and '.join(unresponsive_engines)} does not respond"
    else:
        reason = f"{' or '.join(engine_names)} is not installed"
    raise ConfigError(
        f"cannot start a container: {reason}; install or start one of the engines"
        f" {' and '.join(engine_names)}, or start the server manually and connect with base_url"
    )


def _start_guard(engine: str, container_name: str) -> subprocess.Popen[bytes]:
    """Start a process that removes the container when this process closes its input or exits."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD_SCRIPT, engine, container_name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C in a terminal must only reach the calling process, which then stops the container.
        start_new_session=True,
    )


def _is_healthy(base_url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{base_url}/health", timeout=_HEALTH_TIMEOUT_S) as response:
            return bool(response.status == http.client.OK)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False
