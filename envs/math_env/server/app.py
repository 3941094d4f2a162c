"""`python -m math_env.server.app --port 8005`: the server.

Environment variables, each of which an option overrides:

    MATH_OPERATION        --operation       add
    MATH_LIMIT            --limit           20
    MAX_CONCURRENT_ENVS   --max-sessions    256
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
from .math_environment import MathEnvironment

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    Factory = functools.partial[MathEnvironment]


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
        description="Serves arithmetic over HTTP, WebSocket, MCP and gRPC.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = os.environ.get
    parser.add_argument(
        "--operation", default=default("MATH_OPERATION", "add"), help="add, subtract or multiply"
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=default("MATH_LIMIT", "20"),
        help="the numbers are 0 to this one less 1",
    )
    options, server_options = parse_package_arguments(parser, DEFAULT_PORT, argv)
    return functools.partial(MathEnvironment, **options), server_options


if __name__ == "__main__":
    main()
