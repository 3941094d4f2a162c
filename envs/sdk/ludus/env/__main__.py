"""`python -m ludus.env TARGET [--options JSON] ...`: serves an environment.

Without arguments, as a container of `envs/Dockerfile` starts it, it serves the package that the
image was built with, on port 8000, as that package's own variables say.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import orjson

from ludus.env.security.variables import TOKEN_VARIABLE
from ludus.env.serving.cli import add_server_arguments
from ludus.env.serving.options import DEFAULT_PORT
from ludus.env.serving.server import run_server
from ludus.env.targets.targets import environment_factory
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError, UserError

PACKAGE_VARIABLE = "LUDUS_ENVIRONMENT"
"""Names the package of an image."""
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a signal, then exit 0; or exit 2 after one line about bad input."""
    package = os.environ.get(PACKAGE_VARIABLE)
    if package and not (sys.argv[1:] if argv is None else argv):
        _serve_in_container(package)
    parser = argparse.ArgumentParser(
        prog="python -m ludus.env",
        description="Serve an environment over HTTP, WebSocket and gRPC.",
    )
    parser.add_argument("package", help="for example openspiel_env")
    parser.add_argument("--options", default="{}", help='JSON, for example {"game": "blackjack"}')
    parser.add_argument(
        "--exit-with-parent",
        type=int,
        metavar="PID",
        help="never outlive the starter, which is PID",
    )
    add_server_arguments(parser, DEFAULT_PORT)
    arguments = parser.parse_args(argv)
    if arguments.exit_with_parent is not None:
        _exit_with_parent(arguments.exit_with_parent)
    try:
        factory = environment_factory(arguments.package, _parse_options(arguments.options))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(UserError.exit_code)
    run_server(factory, vars(arguments), DEFAULT_PORT)


def _serve_in_container(package: str) -> NoReturn:
    """Serve as the package's own program does; whoever can reach the container may play.

    A token in LUDUS_ENV_TOKEN closes it to others.
    """
    application = importlib.import_module(f"{package}.server.app")
    open_to_all = () if os.environ.get(TOKEN_VARIABLE) else ("--insecure",)
    try:
        application.main(["--host", "0.0.0.0", "--port", "8000", *open_to_all])
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(UserError.exit_code)
    sys.exit(0)


def _parse_options(text: str) -> JsonObject:
    try:
        options = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--options expected a JSON object, got '{text}': {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--options expected a JSON object, got '{text}'")
    return options


def _exit_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process when its parent dies, even by kill -9 (Linux).

    The parent says who it is: it may be dead before this process gets to ask, and whoever
    inherited the process then would be taken for it.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before the kernel was told
        sys.exit(0)


if __name__ == "__main__":
    main()
