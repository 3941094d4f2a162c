"""The servers of `ludus env`: a running server at an address, or a new one for a target.

TARGET  --> `python -m ludus.env TARGET` as a child process --> the child's address
ADDRESS ----------------------------------------------------> ADDRESS
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ludus.proto.errors import ConfigError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from ludus.env.client import EnvClient

CONNECT_TIMEOUT_S = 3.0
"""Seconds to wait for the first response of a server."""
MAX_PROCESSES = 8
"""Maximum number of concurrent sessions if each session needs a separate process."""


def require_options_only_for_targets(location: str, options: dict[str, Any]) -> None:
    """Refuse options for the environment of a running server.

    Raises:
        ConfigError: the location is an address, and there are options.
    """
    if "://" in location and options:
        raise ConfigError(
            "--option cannot be combined with an address, because that server's environment is "
            "already built; remove the option, or name a target"
        )


@contextlib.contextmanager
def serve_target(location: str, options: dict[str, Any], max_sessions: int = 1024) -> Iterator[str]:
    """Yield the address of a server. A server for a target runs until the context ends.

    Raises:
        UserError: the target or its options are invalid.
    """
    require_options_only_for_targets(location, options)
    if "://" in location:
        yield location
        return
    from ludus.env.serving.subprocess import LocalServer
    from ludus.env.targets.targets import environment_factory

    factory = environment_factory(location, options)  # finds mistakes before a process is started
    num_sessions = min(max_sessions, MAX_PROCESSES) if factory.one_per_process else max_sessions
    server = LocalServer(location, options, max_sessions=num_sessions)
    try:
        yield server.start().grpc
    finally:
        server.stop()


@contextlib.contextmanager
def connect_client(location: str, options: dict[str, Any], token_env: str) -> Iterator[EnvClient]:
    """Yield a client of the server for a target or at an address.

    Raises:
        NotFoundError: no server responds at the address.
    """
    from ludus.env.client import ConnectOptions, EnvClient

    token = os.environ.get(token_env) if "://" in location else None
    with serve_target(location, options, max_sessions=8) as address:
        connect_options = ConnectOptions(token=token, connect_timeout_s=CONNECT_TIMEOUT_S)
        try:
            client = EnvClient.connect(address, connect_options)
        except UnavailableError as error:
            raise NotFoundError(f"{error}; start a server with `ludus env serve`") from None
        with client:
            yield client
