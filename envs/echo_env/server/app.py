"""`python -m echo_env.server.app --port 8000`: the server; `--help` lists its options.

The variable MAX_CONCURRENT_ENVS stands for --max-sessions, which overrides it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from ludus.env.serving.cli import parse_package_arguments
from ludus.env.serving.server import openenv_app, run_server

from .. import DEFAULT_PORT
from .echo_environment import EchoEnvironment

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve until a signal, then exit 0; or exit 2 after one line about bad input."""
    parser = argparse.ArgumentParser(
        description="Serves echoes over HTTP, WebSocket, MCP and gRPC.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _, server_options = parse_package_arguments(parser, DEFAULT_PORT, argv)
    run_server(EchoEnvironment, server_options, DEFAULT_PORT)


def __getattr__(name: str) -> ASGIApp:
    # OpenEnv's images run `uvicorn server.app:app`; nobody else pays for an application.
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _, server_options = parse_package_arguments(argparse.ArgumentParser(), DEFAULT_PORT, [])
    return openenv_app(EchoEnvironment, server_options)


if __name__ == "__main__":
    main()
