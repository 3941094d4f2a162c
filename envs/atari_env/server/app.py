"""`python -m envs.atari_env.server.app --game pong --port 8007`: the server.

Environment variables, each of which an option overrides; the names are OpenEnv's:

    ATARI_GAME                 --game                        pong
    ATARI_OBS_TYPE             --obs-type                    ram
    ATARI_FULL_ACTION_SPACE    --full-action-space           false
    ATARI_MODE                 --mode                        the game's first
    ATARI_DIFFICULTY           --difficulty                  the game's first
    ATARI_REPEAT_ACTION_PROB   --repeat-action-probability   0
    ATARI_FRAMESKIP            --frameskip                   4
    MAX_CONCURRENT_ENVS        --max-sessions
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
from .atari_environment import AtariEnvironment

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    Factory = functools.partial[AtariEnvironment]


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
        description="Serves an Atari game over HTTP, WebSocket, MCP and gRPC.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = os.environ.get
    add = parser.add_argument
    add("--game", default=default("ATARI_GAME", "pong"), help="such as space_invaders")
    add("--obs-type", default=default("ATARI_OBS_TYPE", "ram"), help="ram, rgb or grayscale")
    add("--lists-pixels", action="store_true", help="send pictures as lists of numbers")
    add(
        "--full-action-space",
        action=argparse.BooleanOptionalAction,
        default=default("ATARI_FULL_ACTION_SPACE", "false").lower() == "true",
        help="offer all 18 actions",
    )
    add("--mode", type=int, default=default("ATARI_MODE"), help="of the game")
    add("--difficulty", type=int, default=default("ATARI_DIFFICULTY"), help="of the game")
    add(
        "--repeat-action-probability",
        type=float,
        default=default("ATARI_REPEAT_ACTION_PROB", "0"),
        help="of each frame to go on with the action before",
    )
    add("--frameskip", type=int, default=default("ATARI_FRAMESKIP", "4"), help="frames a decision")
    add("--max-turns", type=int, default=0, help="decisions of an episode; 0 is without limit")
    add("--max-scores", type=int, default=0, help="the end of an episode; 0 is the game's own")
    add("--text-style", default="compact", help="compact or rules")
    options, server_options = parse_package_arguments(parser, DEFAULT_PORT, argv)
    return functools.partial(AtariEnvironment, **options), server_options


if __name__ == "__main__":
    main()
