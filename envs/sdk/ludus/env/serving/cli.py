"""The server's command line: from arguments and environment variables to `ServerOptions`.

Secrets come from environment variables only: arguments are shown to every user of a machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from ludus.env.security.variables import SESSION_KEY_VARIABLE
from ludus.env.serving.options import (
    Flag,
    ServerOptions,
    command_defaults,
    flags,
)

_EPILOG = (
    f"{SESSION_KEY_VARIABLE}, where it is set, lets clients open sessions under ids that a"
    " gateway with the same key signed; POD_UID names the server in them."
)


def add_server_arguments(parser: argparse.ArgumentParser, default_port: int) -> None:
    """Add a flag for each option of a server. Only what is given appears in the namespace."""
    groups: dict[str, Any] = {}
    for flag in flags(default_port):
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        default = flag.shown_default
        groups[flag.group].add_argument(
            flag.name,
            dest=flag.field,
            default=argparse.SUPPRESS,
            help=f"{flag.help} Default: {default}" if default else flag.help,
            **_reading(flag),
        )
    parser.epilog = _EPILOG


def server_parser(default_port: int) -> argparse.ArgumentParser:
    """What reads the arguments of a server and no others."""
    parser = argparse.ArgumentParser(
        description="Serves an environment over HTTP, WebSocket and gRPC."
    )
    add_server_arguments(parser, default_port)
    return parser


def make_server_options(given: Mapping[str, Any], default_port: int) -> ServerOptions:
    """The options that a namespace of `add_server_arguments` stands for.

    Raises:
        ConfigError: they cannot work together.
    """
    settings = command_defaults(default_port)
    settings["session_key"] = os.environ.get(SESSION_KEY_VARIABLE)
    settings |= {name: given[name] for name in ServerOptions.model_fields if name in given}
    return ServerOptions(**settings)


def _reading(flag: Flag) -> dict[str, Any]:
    """How argparse reads the flag; types and bounds are the model's."""
    if flag.is_switch:
        return {"action": "store_const", "const": not flag.default}
    if flag.is_repeated:
        return {"action": "append"}
    return {"choices": get_args(flag.annotation)} if get_origin(flag.annotation) is Literal else {}
