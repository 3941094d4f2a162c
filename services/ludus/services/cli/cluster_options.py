"""Options shared by all commands for runs on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ludus.proto.errors import ConfigError

Run = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the run; `ludus list` prints all.")
]
Context = Annotated[
    str, typer.Option(help="Kubeconfig context to use.", show_default="current context")
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", help="Namespace of the run.", show_default="namespace of the context"
    ),
]
ReleaseName = Annotated[
    str | None,
    typer.Option(
        "--release", help="Helm release of Ludus.", show_default="the only one in the namespace"
    ),
]
Environments = Annotated[
    list[str] | None,
    typer.Option(
        "--environment",
        metavar="NAME=SERVED",
        help="Map an environment of the run to the name it has in the release, if they differ. "
        "Repeatable.",
    ),
]
Queue = Annotated[
    str | None,
    typer.Option(help="Kueue LocalQueue for the run.", show_default="queue of the release"),
]
Ignored = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="CHECK",
        help="Skip a check: operator, rules, queue, secrets, volumes, nodes, quota or admission. "
        "Repeatable.",
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Return once the run is submitted; do not follow it.")
]
Output = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Folder for the results.", show_default="runs/NAME"),
]


def run_coroutine(work: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine of a command to its end."""
    asyncio.run(work)


def parse_pairs(options: Sequence[str], flag: str) -> dict[str, str]:
    """Parse `NAME=VALUE` options.

    Raises:
        ConfigError: an option has another form.
    """
    values = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator or not name or not value:
            raise ConfigError(f"{flag} must be NAME=SERVED, got '{option}'")
        values[name] = value
    return values
