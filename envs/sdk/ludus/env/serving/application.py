"""The server program of an environment package: `python -m math_env.server.app --limit 100`.

    flags > --options JSON > environment variables > defaults --EnvironmentOptions--> environment

A package's `server/app.py` binds `main` and `__getattr__` to those of a `ServerApplication`.

Secrets come from environment variables only, because every user of a machine can read the
arguments of its processes.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from starlette.types import ASGIApp

from ludus.env.environment import AnyEnvironment, Builder
from ludus.env.options import EnvironmentOptions, Option, list_options, make_variable_name
from ludus.env.security.session_ids import SESSION_KEY_VARIABLE
from ludus.env.serving.server import build_openenv_app, exit_after_user_error, run_server
from ludus.env.sessions.options import DEFAULT_PORT, Flag, ServerOptions, list_flags
from ludus.env.types import JsonObject
from ludus.proto.documents import DocumentError, parse_json
from ludus.proto.errors import ConfigError

_MAX_SESSIONS_VARIABLE = "MAX_CONCURRENT_ENVS"
"""Environment variable that OpenEnv's images set; `--max-sessions` takes precedence."""
_EPILOG = (
    f"If {SESSION_KEY_VARIABLE} or a key file is set, clients can open sessions with ids that a"
    " gateway with the same key has signed. POD_UID identifies the server in these ids."
)


class ServerApplication:
    """The command line and the ASGI application of an environment package.

    Args:
        build: the environment's class, or a function that returns an environment.
        options_type: model of the options that `build` takes.
    """

    def __init__(
        self,
        build: Builder,
        options_type: type[EnvironmentOptions] = EnvironmentOptions,
        default_port: int = DEFAULT_PORT,
    ) -> None:
        self._build_environment = build
        self._options_type = options_type
        self._options = list_options(options_type)
        self._json_variable = make_variable_name(options_type, "options")
        self._default_port = default_port

    def main(self, argv: Sequence[str] | None = None) -> NoReturn:
        """Serve until a signal, then exit with 0. On bad input, exit with 2 and one message."""
        with exit_after_user_error():
            factory, server_options = self._parse(argv)
        run_server(factory, server_options, self._default_port)

    def module_attribute(self, name: str) -> ASGIApp:
        """Return the ASGI application for the name "app"; for a module's `__getattr__`.

        OpenEnv's images run `uvicorn server.app:app`. The application is built on first use only.
        """
        if name != "app":
            raise AttributeError(f"the server module has no attribute {name!r}")
        return build_openenv_app(*self._parse([]))

    def _parse(
        self, argv: Sequence[str] | None
    ) -> tuple[Callable[[], AnyEnvironment], dict[str, Any]]:
        values = vars(self._build_parser().parse_args(argv))
        server_options = {
            name: values.pop(name) for name in ServerOptions.model_fields if name in values
        }
        if _MAX_SESSIONS_VARIABLE in os.environ:
            server_options.setdefault("max_sessions", os.environ[_MAX_SESSIONS_VARIABLE])
        json_options = parse_json_options(values.pop("options", "{}"))
        options = self._options_type.parse(
            {**self._read_variables(os.environ), **json_options, **values}, is_text=True
        )
        option_values = options.model_dump(mode="json", exclude_unset=True)
        return functools.partial(self._build_environment, **option_values), server_options

    def _build_parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            argument_default=argparse.SUPPRESS,
            description="Serve the environment over HTTP, WebSocket, MCP and gRPC.",
        )
        for option in self._options:
            name = option.name.replace("_", "-")
            parser.add_argument(f"--{name}", **_make_option_keywords(option))
        if self._options:
            parser.add_argument(
                "--options",
                help=f"All options as one JSON object. Variable: {self._json_variable}.",
            )
        add_server_arguments(parser, self._default_port)
        return parser

    def _read_variables(self, variables: Mapping[str, str]) -> JsonObject:
        json_options = parse_json_options(variables.get(self._json_variable, "{}"))
        options = [option for option in self._options if option.variable in variables]
        return {**json_options, **{option.name: variables[option.variable] for option in options}}


def _make_option_keywords(option: Option) -> dict[str, Any]:
    """Return keyword arguments for `add_argument`. The options' model parses the values."""
    sentences = [option.help, f"Variable: {option.variable}."]
    if option.default:
        sentences.insert(1, f"Default: {option.default}.")
    keywords: dict[str, Any] = {"help": " ".join(sentences).replace("%", "%%")}
    if option.is_switch:
        return {**keywords, "action": argparse.BooleanOptionalAction}
    return {**keywords, "nargs": "+"} if option.is_list else keywords


def parse_json_options(options_json: str) -> JsonObject:
    """Parse the value of `--options`.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    message = f"--options must be a JSON object, got {options_json!r:.80}"
    try:
        options = parse_json(options_json)
    except DocumentError as error:
        raise ConfigError(f"{message}: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(message)
    return options


def add_server_arguments(parser: argparse.ArgumentParser, default_port: int) -> None:
    """Add a flag for each option of a server. Flags that are not given set no attribute."""
    groups: dict[str, Any] = {}
    for flag in list_flags(default_port):
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        default = flag.shown_default
        groups[flag.group].add_argument(
            flag.name,
            dest=flag.field_name,
            default=argparse.SUPPRESS,
            help=f"{flag.help} Default: {default}" if default else flag.help,
            **_make_flag_keywords(flag),
        )
    parser.epilog = _EPILOG


def _make_flag_keywords(flag: Flag) -> dict[str, Any]:
    """Return keyword arguments for `add_argument`. The model checks types and bounds."""
    if flag.is_switch:
        return {"action": "store_const", "const": not flag.default}
    if flag.is_repeated:
        return {"action": "append"}
    return {"choices": get_args(flag.annotation)} if get_origin(flag.annotation) is Literal else {}
