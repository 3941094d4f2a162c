"""`ludus env serve`, which has the same options as `python -m ludus.env`."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, get_args

import typer

from ludus.env.sessions.options import Flag, list_flags
from ludus.services.cli.options import Options, Target, parse_options


def serve(target: Target, options: Options = None, **server_options: Any) -> None:
    """Serve an environment over HTTP, WebSocket and gRPC until Ctrl-C.

    Example: `ludus env serve openspiel_env --option game=blackjack --port 8004`

    Example: `ludus env serve gymnasium:CartPole-v1 --isolation pool --record episodes/`
    """
    from ludus.env.serving.server import run_server
    from ludus.env.targets.targets import environment_factory

    factory = environment_factory(target, parse_options(options or ()))
    given_options = {name: option for name, option in server_options.items() if option is not None}
    # The flag is --no-determinism-check, so a user who gives it disables the check.
    if "check_determinism" in given_options:
        given_options["check_determinism"] = False
    run_server(factory, given_options)


def _make_parameter(flag: Flag) -> inspect.Parameter:
    """Make a function parameter, from which Typer makes a command-line option."""
    bounds = {type(bound).__name__.lower(): bound for bound in flag.field_info.metadata}
    option = typer.Option(
        flag.name,
        help=flag.help,
        show_default=flag.shown_default or False,
        rich_help_panel=None if flag.group == "server" else flag.group[0].upper() + flag.group[1:],
        min=getattr(bounds.get("ge"), "ge", None),
        max=getattr(bounds.get("le"), "le", None),
    )
    return inspect.Parameter(
        flag.field_name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_make_annotation(flag) | None, option],
    )


def _make_annotation(flag: Flag) -> Any:
    return list[get_args(flag.annotation)[0]] if flag.is_repeated else flag.annotation  # type: ignore[misc]


_serve_signature = inspect.signature(serve, eval_str=True)
serve.__signature__ = _serve_signature.replace(  # type: ignore[attr-defined]
    parameters=[
        *(_serve_signature.parameters[name] for name in ("target", "options")),
        *map(_make_parameter, list_flags()),
    ]
)
