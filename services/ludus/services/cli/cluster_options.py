"""Options that all commands about runs in a cluster share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ludus.proto.errors import ConfigError

Run = Annotated[str, typer.Argument(metavar="NAME", help="Name of the run; see: ludus list.")]
Context = Annotated[str, typer.Option(help="Context of the kubeconfig.", show_default="current")]
Namespace = Annotated[
    str, typer.Option("--namespace", "-n", help="Namespace.", show_default="the context's")
]
ReleaseName = Annotated[
    str | None, typer.Option("--release", help="Helm release.", show_default="the only one")
]
Environments = Annotated[
    list[str] | None,
    typer.Option(
        "--environment",
        metavar="NAME=SERVED",
        help="The release's environment for one of the run's, where names differ; may be repeated.",
    ),
]
Queue = Annotated[str | None, typer.Option(help="Kueue's queue.", show_default="the release's")]
Ignored = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="CHECK",
        help="Leave out a check: operator, rules, queue, secrets, volumes, nodes, quota or "
        "admission; may be repeated.",
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Do not follow the run: return when it is submitted.")
]
Output = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Where results go.", show_default="runs/NAME"),
]


def in_event_loop(work: Coroutine[Any, Any, None]) -> None:
    """Do the work of a command."""
    asyncio.run(work)


def pairs(options: Sequence[str], flag: str) -> dict[str, str]:
    """What `NAME=VALUE` options say.

    Raises:
        ConfigError: one has another form.
    """
    found = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator or not name or not value:
            raise ConfigError(f"{flag} expected NAME=SERVED, got '{option}'")
        found[name] = value
    return found
