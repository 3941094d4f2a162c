"""Environment servers in containers that a client starts and ends.

    client --start_container--> provider --docker or podman--> container, port 8000
       |                                                            ^
       +-- GET /health until it answers ---- 127.0.0.1:PORT --------+

`ContainerProvider` has the names of OpenEnv's providers, so those fit, too. `LocalContainers` is
ours: what it starts is reached from this machine alone, and is removed when the client closes,
when it does not get ready, and when this process ends, however it ends.
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
"""On which every image of OpenEnv listens, and ours."""
READY_TIMEOUT_S = 30.0
HUB_REGISTRY = "registry.hf.space"

_RUN_TIMEOUT_S = 600.0
"""An image may have to be pulled first."""
_COMMAND_TIMEOUT_S = 30.0
_POLL_S = 0.1
_HEALTH_TIMEOUT_S = 2.0
_GUARD = 'read -r _; "$0" kill "$1"; exec "$0" rm --force --volumes "$1"'
"""Waits until its input ends, which it does with the process that holds the other end."""


def hub_image(repository: str, tag: str = "latest") -> str:
    """The image that Hugging Face builds of a Space, from the Space's "owner/name".

    The registry has it under the name of the Space's page: in small letters, with a hyphen for
    whatever is neither letter nor digit.

    Raises:
        ConfigError: the name or the tag has another form.
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
    """Starts one container, waits for it, and ends it."""

    def start_container(
        self, image: str, port: int | None = None, env_vars: Mapping[str, str] | None = None
    ) -> str:
        """The address of the server in a new container, http://host:port.

        Raises:
            UserError: it cannot be started.
        """

    def wait_for_ready(self, base_url: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once the server answers.

        Raises:
            UnavailableError: it ended, or does not answer within `timeout_s`.
        """

    def stop_container(self) -> None:
        """End the container and remove it; without effect where there is none."""


class LocalContainers:
    """A container of docker or podman on this machine, by their command lines."""

    def __init__(self, engine: str | None = None) -> None:
        """Take the engine of that name or path; None takes the first of both that works."""
        self._wanted = engine
        self._engine = ""
        self._name = ""
        self._guard: subprocess.Popen[bytes] | None = None

    def start_container(
        self, image: str, port: int | None = None, env_vars: Mapping[str, str] | None = None
    ) -> str:
        """The address of the server in a new container, on 127.0.0.1.

        Args:
            port: of this machine; None takes a free one.
            env_vars: variables in the container; their values are on no command line.

        Raises:
            ConfigError: there is no engine that works, a container runs already, or the engine
                refuses image or port.
        """
        if self._name:
            raise ConfigError(
                f"expected a provider without a container, got one that runs '{self._name}'; make "
                "one for each"
            )
        self._engine = self._engine or _engine_that_works(self._wanted)
        self._name = f"ludus-{secrets.token_hex(6)}"
        self._guard = _guard_of(self._engine, self._name)
        variables = dict(env_vars or {})
        try:
            self._ask(
                *("run", "--detach", "--name", self._name),
                *("--publish", f"127.0.0.1:{port or ''}:{CONTAINER_PORT}"),
                *(word for name in variables for word in ("--env", name)),
                image,
                variables=variables,
                timeout_s=_RUN_TIMEOUT_S,
            )
            published = self._ask("port", self._name, f"{CONTAINER_PORT}/tcp")
        except BaseException:
            self.stop_container()
            raise
        return f"http://{published.splitlines()[0]}"

    def wait_for_ready(self, base_url: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once /health answers.

        Raises:
            UnavailableError: the container ended, or does not answer within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while not _is_healthy(base_url):
            if not self._runs():
                raise UnavailableError(
                    f"the server in container '{self._name}' ended while it started: "
                    f"{self._last_words()}"
                )
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"expected {base_url}/health to answer within {timeout_s:g} s, got nothing; "
                    f"its last words: {self._last_words()}"
                )
            time.sleep(_POLL_S)

    def stop_container(self) -> None:
        """End the container and remove it; without effect where there is none."""
        guard, self._guard, self._name = self._guard, None, ""
        if guard is None:
            return
        assert guard.stdin is not None
        guard.stdin.close()
        # One that takes longer goes on by itself.
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(_COMMAND_TIMEOUT_S)

    def _runs(self) -> bool:
        try:
            return self._ask("inspect", "--format", "{{.State.Running}}", self._name) == "true"
        except ConfigError:
            return False

    def _last_words(self) -> str:
        told = subprocess.run(
            [self._engine, "logs", "--tail", "1", self._name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
        return told.stdout.strip()[-500:] or "none"

    def _ask(
        self,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        timeout_s: float = _COMMAND_TIMEOUT_S,
    ) -> str:
        """What the engine answers.

        Raises:
            ConfigError: it refuses; with its last line.
        """
        try:
            answer = subprocess.run(
                [self._engine, *arguments],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env={**os.environ, **(variables or {})},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(
                f"expected '{self._engine} {arguments[0]}' to end within {timeout_s:g} s"
            ) from None
        if answer.returncode:
            reason = (answer.stderr.strip().splitlines() or ["no reason"])[-1]
            raise ConfigError(f"'{self._engine} {arguments[0]}' refuses: {reason}")
        return answer.stdout.strip()


def _engine_that_works(wanted: str | None) -> str:
    """The first engine that is there and answers: a docker without its daemon does not."""
    names = ENGINES if wanted is None else (wanted,)
    silent = []
    for name in names:
        if shutil.which(name) is None:
            continue
        answer = subprocess.run(
            [name, "info"], capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
        if answer.returncode == 0:
            return name
        silent.append(name)
    got = f"{' and '.join(silent)} without an engine that answers" if silent else "none"
    raise ConfigError(
        f"expected {' or '.join(names)} to start a container with, got {got}; install or start "
        "one, or start the server by hand and connect with base_url"
    )


def _guard_of(engine: str, name: str) -> subprocess.Popen[bytes]:
    """A process that removes the container as soon as this one lets go of its input, or ends."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, engine, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A terminal's Ctrl-C is for the owner, which then stops what it has started.
        start_new_session=True,
    )


def _is_healthy(base_url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{base_url}/health", timeout=_HEALTH_TIMEOUT_S) as answer:
            return bool(answer.status == http.client.OK)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False
