"""Where `ludus env` commands play: on a running server, or on one that they start.

TARGET  --> `python -m ludus.env TARGET` as a child process --> its address
ADDRESS ----------------------------------------------------> itself
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.proto.errors import ConfigError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from ludus.env.client import EnvClient

TARGET_HELP = (
    "Package (openspiel_env), module:Class, gymnasium:CartPole-v1, openenv:module:Class,"
    " openenv:module:app"
)
Target = Annotated[str, typer.Argument(metavar="TARGET", help=f"{TARGET_HELP}.")]
Place = Annotated[
    str,
    typer.Argument(
        metavar="TARGET|ADDRESS", help=f"{TARGET_HELP}; or http://, ws://, grpc:// address."
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="What to build it with; may be repeated."),
]
TokenEnv = Annotated[
    str, typer.Option(help="Environment variable that holds the token; it may be unset.")
]

CONNECT_TIMEOUT_S = 3.0
MAX_PROCESSES = 8
"""Sessions at once, where each needs a process of its own."""


def require_options_only_for_targets(place: str, options: dict[str, Any]) -> None:
    """Refuse options for a server whose environment was built already.

    Raises:
        ConfigError: there are some.
    """
    if "://" in place and options:
        raise ConfigError(
            "expected --option or an address, got both: the server at the address was built "
            "already; leave one of them out"
        )


@contextlib.contextmanager
def serving(place: str, options: dict[str, Any], max_sessions: int = 1024) -> Iterator[str]:
    """The address of a server; one that is started here ends with the context.

    Raises:
        UserError: the target, or its options, cannot work.
    """
    require_options_only_for_targets(place, options)
    if "://" in place:
        yield place
        return
    from ludus.env.serving.subprocess import LocalServer
    from ludus.env.targets.targets import environment_factory

    factory = environment_factory(place, options)  # a mistake ends here, not in a child process
    num_sessions = min(max_sessions, MAX_PROCESSES) if factory.one_per_process else max_sessions
    server = LocalServer(place, options, max_sessions=num_sessions)
    try:
        yield server.start().grpc
    finally:
        server.stop()


@contextlib.contextmanager
def client_of(place: str, options: dict[str, Any], token_env: str) -> Iterator[EnvClient]:
    """A client of the server at the place.

    Raises:
        NotFoundError: nothing answers at the address.
    """
    from ludus.env.client import ConnectOptions, EnvClient

    token = os.environ.get(token_env) if "://" in place else None
    with serving(place, options, max_sessions=8) as address:
        try:
            client = EnvClient.connect(
                address, ConnectOptions(token=token, connect_timeout_s=CONNECT_TIMEOUT_S)
            )
        except UnavailableError as error:
            raise NotFoundError(f"{error}; start one with `ludus env serve`") from None
        with client:
            yield client
