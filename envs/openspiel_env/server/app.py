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

from ludus.env.serving.cli import parse_package_arguments
from ludus.env.serving.server import openenv_app, run_server
from ludus.env.types import JsonObject

from .. import DEFAULT_PORT
from .openspiel_environment import OpenSpielEnvironment, build_environment

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    Factory = functools.partial[OpenSpielEnvironment]


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
        help="random, first, last, middle, mcts(SIMULATIONS), or a fixed policy of the game",
    )
    parser.add_argument(
        "--text-style", default=default("OPENSPIEL_TEXT_STYLE", "compact"), help="compact or rules"
    )
    options, server_options = parse_package_arguments(parser, DEFAULT_PORT, argv)
    return functools.partial(build_environment, **options), server_options


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
