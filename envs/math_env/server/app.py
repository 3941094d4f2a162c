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

from ludus.env.http.app import build_app
from ludus.env.serving.cli import add_server_arguments
from ludus.env.serving.server import ServerOptions, run_server
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import local_host
from ludus.env.sessions.options import CoreOptions

from .. import DEFAULT_PORT
from .math_environment import MathEnvironment

if TYPE_CHECKING:
    from fastapi import FastAPI


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve until a signal, then exit 0; or exit 2 after one line about bad input."""
    options, server_arguments = _parse(argv)
    run_server(functools.partial(MathEnvironment, **options), server_arguments, DEFAULT_PORT)


def __getattr__(name: str) -> FastAPI:
    # OpenEnv's images run `uvicorn server.app:app`; nobody else pays for an application.
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    options, server_arguments = _parse([])
    factory = functools.partial(MathEnvironment, **options)
    core_options = CoreOptions(max_sessions=server_arguments["max_sessions"])
    return build_app(SessionCore(local_host(factory), core_options))


def _parse(argv: Sequence[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The environment's options, and the server's that are given."""
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
    own_names = set(vars(parser.parse_args([])))
    add_server_arguments(parser, DEFAULT_PORT)
    parser.set_defaults(max_sessions=default("MAX_CONCURRENT_ENVS", ServerOptions().max_sessions))
    given = vars(parser.parse_args(argv))
    own = {name: given.pop(name) for name in own_names}
    return own, given


if __name__ == "__main__":
    main()
