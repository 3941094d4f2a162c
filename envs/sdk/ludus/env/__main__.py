"""`python -m ludus.env TARGET [--options JSON] ...`: serve an environment.

Without arguments, as in containers built from `envs/Dockerfile`, it serves the image's environment
package on port 8000, with the options in that package's environment variables.
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

from ludus.env.serving.application import add_server_arguments, parse_json_options
from ludus.env.serving.server import exit_after_user_error, run_server
from ludus.env.sessions.options import DEFAULT_PORT, TOKEN_VARIABLE
from ludus.env.targets.targets import environment_factory

PACKAGE_VARIABLE = "LUDUS_ENVIRONMENT"
"""Environment variable with the name of an image's package."""
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a stop signal, then exit with 0; exit with 2 after a user error."""
    package = os.environ.get(PACKAGE_VARIABLE)
    if package and not (sys.argv[1:] if argv is None else argv):
        _serve_in_container(package)
    parser = argparse.ArgumentParser(
        prog="python -m ludus.env",
        description="Serve an environment over HTTP, WebSocket and gRPC.",
    )
    parser.add_argument("package", help="target of the environment, for example openspiel_env")
    parser.add_argument(
        "--options",
        default="{}",
        help='options of the environment as JSON, for example {"game": "blackjack"}; default: {}',
    )
    parser.add_argument(
        "--exit-with-parent",
        type=int,
        metavar="PID",
        help="exit when the process PID, which started this one, exits",
    )
    add_server_arguments(parser, DEFAULT_PORT)
    arguments = parser.parse_args(argv)
    if arguments.exit_with_parent is not None:
        _exit_with_parent(arguments.exit_with_parent)
    with exit_after_user_error():
        factory = environment_factory(arguments.package, parse_json_options(arguments.options))
    run_server(factory, vars(arguments), DEFAULT_PORT)


def _serve_in_container(package: str) -> NoReturn:
    """Serve the package with its own program, reachable from outside the container.

    The server is open to everyone unless LUDUS_ENV_TOKEN sets a token.
    """
    application = importlib.import_module(f"{package}.server.app")
    access_options = () if os.environ.get(TOKEN_VARIABLE) else ("--insecure",)
    with exit_after_user_error():
        application.main(["--host", "0.0.0.0", "--port", "8000", *access_options])
    sys.exit(0)


def _exit_with_parent(parent_pid: int) -> None:
    """Let the kernel stop this process when its parent dies, even by kill -9 (Linux only).

    The parent passes its id, because it may die before this process can read the parent's id.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # the parent died before the prctl call
        sys.exit(0)


if __name__ == "__main__":
    main()
