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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ludus.env.http.app import build_app
from ludus.env.serving.cli import add_server_arguments
from ludus.env.serving.server import ServerOptions, run_server
from ludus.env.sessions.core import SessionCore
from ludus.env.sessions.hosts import local_host
from ludus.env.sessions.options import CoreOptions
from ludus.env.types import JsonObject

from .. import DEFAULT_PORT
from .openspiel_environment import build_environment

if TYPE_CHECKING:
    from fastapi import FastAPI


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve until a signal, then exit 0; or exit 2 after one line about bad input."""
    options, server_arguments = _parse(argv)
    factory = functools.partial(build_environment, **options)
    run_server(factory, server_arguments, DEFAULT_PORT)


def __getattr__(name: str) -> FastAPI:
    # OpenEnv's images run `uvicorn server.app:app`; nobody else pays for an application.
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    options, server_options = _parse([])
    factory = functools.partial(build_environment, **options)
    core_options = CoreOptions(max_sessions=server_options["max_sessions"])
    return build_app(SessionCore(local_host(factory), core_options))


def _parse(argv: Sequence[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The environment's options, and the server's that are given."""
    parser = argparse.ArgumentParser(
        description="Serves an OpenSpiel game over HTTP, WebSocket and gRPC.",
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
    own_names = set(vars(parser.parse_args([])))
    add_server_arguments(parser, DEFAULT_PORT)
    parser.set_defaults(max_sessions=default("MAX_CONCURRENT_ENVS", ServerOptions().max_sessions))
    given = vars(parser.parse_args(argv))
    own = {name: given.pop(name) for name in own_names}
    return own, given


def _json_object(text: str) -> JsonObject:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return found


if __name__ == "__main__":
    main()
