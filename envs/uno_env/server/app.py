"""`python -m envs.uno_env.server.app --num-players 2 --port 8010`: the server.

Environment variables, each of which an option overrides:

    UNO_NUM_PLAYERS       --num-players    2
    UNO_OPPONENT          --opponent       random
    MAX_CONCURRENT_ENVS   --max-sessions
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ludus.env.serving.cli import parse_package_arguments
from ludus.env.serving.server import openenv_app, run_server

from .. import DEFAULT_PORT
from .uno_environment import UnoEnvironment

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    Factory = functools.partial[UnoEnvironment]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve until a signal, then exit 0; or exit 2 after one line about bad input."""
    run_server(*_parse(argv), DEFAULT_PORT)


def __getattr__(name: str) -> ASGIApp:
    # OpenEnv's images run `uvicorn server.app:app`; nobody else pays for an application.
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return openenv_app(*_parse([]))


def _parse(argv: Sequence[str] | None) -> tuple[Factory, dict[str, Any]]:
    """What builds the environment, and the server's options that are given."""
    parser = argparse.ArgumentParser(
        description="Serves Uno over HTTP, WebSocket, MCP and gRPC.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = os.environ.get
    add = parser.add_argument
    add("--num-players", type=int, default=default("UNO_NUM_PLAYERS", "2"), help="2 to 10")
    add("--opponent", default=default("UNO_OPPONENT", "random"), help="random or greedy")
    add("--max-turns", type=int, default=100, help="moves of the player")
    add("--text-style", default="compact", help="compact or rules")
    options, server_options = parse_package_arguments(parser, DEFAULT_PORT, argv)
    return functools.partial(UnoEnvironment, **options), server_options


if __name__ == "__main__":
    main()
