"""`OPENSPIEL_GAME=blackjack python -m envs.openspiel_env.server.app --port 8004`: the server.

Environment variables, each of which an option overrides:

    OPENSPIEL_GAME              --game            catch
    OPENSPIEL_GAME_PARAMS       --game-params     {}, as JSON
    OPENSPIEL_AGENT_PLAYER      --agent-player    0
    OPENSPIEL_OPPONENT_POLICY   --opponent        random
    OPENSPIEL_TEXT_STYLE        --text-style      compact
    MAX_CONCURRENT_ENVS         --max-sessions    256
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ludus.env.core import CoreOptions, SessionCore
from ludus.env.hosts import local_host
from ludus.env.http_app import build_app
from ludus.env.server import ServerOptions, run_server_cli
from ludus.env.types import JsonObject
from ludus.proto.errors import UserError

from .. import DEFAULT_PORT
from .openspiel_environment import build_environment

if TYPE_CHECKING:
    from fastapi import FastAPI


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Ends the process: 0 after a signal, 2 after one line on standard error for bad input."""
    options, server_arguments = _parse(argv)
    factory = functools.partial(build_environment, **options)
    try:
        factory()  # bad options end here, not in a session
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(UserError.exit_code)
    run_server_cli(factory, DEFAULT_PORT, ["--max-sessions", _max_sessions(), *server_arguments])


def __getattr__(name: str) -> FastAPI:
    # OpenEnv's images run `uvicorn server.app:app`; nobody else pays for an application.
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    options, _ = _parse([])
    factory = functools.partial(build_environment, **options)
    options = CoreOptions(max_sessions=int(_max_sessions()))
    return build_app(SessionCore(local_host(factory), options))


def _parse(argv: Sequence[str] | None) -> tuple[dict[str, Any], list[str]]:
    """The environment's options, and the arguments that are left for the server."""
    parser = argparse.ArgumentParser(
        description="Serves an OpenSpiel game over HTTP, WebSocket and gRPC.",
        epilog="Options of the server: --host, --port, --grpc-port, --max-sessions, "
        "--idle-timeout-s, --token-env, --insecure, --ready-file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = os.environ.get
    parser.add_argument("--game", default=default("OPENSPIEL_GAME", "catch"))
    parser.add_argument(
        "--game-params",
        type=_json_object,
        default=default("OPENSPIEL_GAME_PARAMS", "{}"),
        help='JSON, for example {"players": 3}',
    )
    parser.add_argument(
        "--agent-player",
        type=int,
        default=default("OPENSPIEL_AGENT_PLAYER", "0"),
        help="seat to play from",
    )
    parser.add_argument(
        "--opponent",
        default=default("OPENSPIEL_OPPONENT_POLICY", "random"),
        help="random, first, last, middle, or a fixed policy of the game",
    )
    parser.add_argument(
        "--text-style", default=default("OPENSPIEL_TEXT_STYLE", "compact"), help="compact or rules"
    )
    own, server_arguments = parser.parse_known_args(argv)
    return vars(own), server_arguments


def _json_object(text: str) -> JsonObject:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return found


def _max_sessions() -> str:
    return os.environ.get("MAX_CONCURRENT_ENVS", str(ServerOptions().max_sessions))


if __name__ == "__main__":
    main()
