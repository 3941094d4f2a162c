"""`ludus env serve`: the options are those of `python -m ludus.env`."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, get_args

import typer

from ludus.env.sessions.options import Flag, flags
from ludus.services.cli.options import Options, Target, parse_options


def serve(target: Target, options: Options = None, **server_options: Any) -> None:
    """Serve an environment over HTTP, WebSocket and gRPC until Ctrl-C.

    Example: `ludus env serve openspiel_env --option game=blackjack --port 8004`

    Example: `ludus env serve gymnasium:CartPole-v1 --isolation pool --record episodes/`
    """
    from ludus.env.serving.server import run_server
    from ludus.env.targets.targets import environment_factory

    factory = environment_factory(target, parse_options(options or ()))
    given_options = {name: value for name, value in server_options.items() if value is not None}
    if "check_determinism" in given_options:  # the flag is --no-determinism-check
        given_options["check_determinism"] = False
    run_server(factory, given_options)


def _parameter(flag: Flag) -> inspect.Parameter:
    """Build the parameter from which Typer makes an option."""
    bounds = {type(bound).__name__.lower(): bound for bound in flag.info.metadata}
    option = typer.Option(
        flag.name,
        help=flag.help,
        show_default=flag.shown_default or False,
        rich_help_panel=None if flag.group == "server" else flag.group[0].upper() + flag.group[1:],
        min=getattr(bounds.get("ge"), "ge", None),
        max=getattr(bounds.get("le"), "le", None),
    )
    return inspect.Parameter(
        flag.field,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_annotation(flag) | None, option],
    )


def _annotation(flag: Flag) -> Any:
    return list[get_args(flag.annotation)[0]] if flag.is_repeated else flag.annotation  # type: ignore[misc]


_signature = inspect.signature(serve, eval_str=True)
serve.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[
        *(_signature.parameters[name] for name in ("target", "options")),
        *map(_parameter, flags()),
    ]
)
