"""`python -m coding_env.server.app --port 8008`: the server.

Environment variables, each of which an option overrides:

    CODING_MAX_TURNS      --max-turns       3
    CODING_TIME_LIMIT_S   --time-limit-s    2
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
from .coding_environment import CodingEnvironment

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    Factory = functools.partial[CodingEnvironment]


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
        description="Serves programming tasks over HTTP, WebSocket, MCP and gRPC.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = os.environ.get
    parser.add_argument(
        "--max-turns",
        type=int,
        default=default("CODING_MAX_TURNS", "3"),
        help="how many programs may be tried in an episode",
    )
    parser.add_argument(
        "--time-limit-s",
        type=int,
        default=default("CODING_TIME_LIMIT_S", "2"),
        help="of computing for one program, in seconds",
    )
    parser.add_argument(
        "--kinds", nargs="+", help="of tasks to draw from; without it, all but those of one line"
    )
    options, server_options = parse_package_arguments(parser, DEFAULT_PORT, argv)
    return functools.partial(CodingEnvironment, **options), server_options


if __name__ == "__main__":
    main()
