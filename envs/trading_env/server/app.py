"""`python -m envs.trading_env.server.app --market regimes --port 8009`: the server.

Environment variables, each of which an option overrides:

    TRADING_MARKET        --market          reverting
    TRADING_PATH          --path            a file of prices instead
    TRADING_NUM_STEPS     --num-steps       16
    TRADING_COST          --cost            0.001
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
from .trading_environment import TradingEnvironment

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    Factory = functools.partial[TradingEnvironment]


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
        description="Serves a market over HTTP, WebSocket, MCP and gRPC.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = os.environ.get
    add = parser.add_argument
    add("--market", default=default("TRADING_MARKET", "reverting"), help="walk, regimes, reverting")
    add("--path", default=default("TRADING_PATH", ""), help="a file of prices, CSV or Parquet")
    add("--columns", nargs="+", default=[], help="of the file, those that hold prices")
    add("--asset-column", default="", help="of the file, the one that names the asset of a row")
    add("--num-assets", type=int, default=1, help="of a simulation")
    add("--num-steps", type=int, default=default("TRADING_NUM_STEPS", "16"), help="decisions")
    add("--window", type=int, default=4, help="prices that are shown")
    add("--cost", type=float, default=default("TRADING_COST", "0.001"), help="of an order's worth")
    add("--text-style", default="compact", help="compact or rules")
    options, server_options = parse_package_arguments(parser, DEFAULT_PORT, argv)
    return functools.partial(TradingEnvironment, **options), server_options


if __name__ == "__main__":
    main()
