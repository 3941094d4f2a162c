"""`python -m prompts_env.server.app --options '{"path": "data.jsonl"}' --port 8006`: the server.

Environment variables, each of which an option overrides:

    PROMPTS_OPTIONS       --options         {}, those of `PromptsEnvironment`, as JSON
    MAX_CONCURRENT_ENVS   --max-sessions    256
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import orjson

from ludus.env.serving.cli import parse_package_arguments
from ludus.env.serving.server import openenv_app, run_server
from ludus.proto.errors import ConfigError, did_you_mean

from .. import DEFAULT_PORT
from .prompts_environment import PromptsEnvironment

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    Factory = functools.partial[PromptsEnvironment]


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
        description="Serves the rows of a data set over HTTP, WebSocket, MCP and gRPC.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--options",
        default=os.environ.get("PROMPTS_OPTIONS", "{}"),
        help="those of the environment, as an object of JSON; path is needed",
    )
    own, server_options = parse_package_arguments(parser, DEFAULT_PORT, argv)
    return functools.partial(PromptsEnvironment, **_options(own["options"])), server_options


def _options(text: str) -> dict[str, Any]:
    try:
        options = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--options expected an object of JSON, {error.msg}: {text!r}") from None
    if not isinstance(options, dict) or "path" not in options:
        raise ConfigError(
            f"--options expected an object of JSON with path, got {text!r}; for example "
            '\'{"path": "data.jsonl"}\', also in PROMPTS_OPTIONS'
        )
    known = list(inspect.signature(PromptsEnvironment).parameters)
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known) or f"expected one of {', '.join(known)}"
            raise ConfigError(f"--options: unknown option '{name}'; {hint}")
    return options


if __name__ == "__main__":
    main()
