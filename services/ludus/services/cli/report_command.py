"""`ludus report`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from ludus.services.cli.console import results_console, say

RunDir = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, for example runs/demo.")
]


def report(
    run_dir: RunDir,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where to write the page; RUN_DIR/report.html if not set."
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write one SVG picture for a README to this file instead."
        ),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open what was written in the browser.")
    ] = False,
) -> None:
    """Write the report of a run: one HTML page that needs nothing else.

    It works on runs that are still going or were stopped, too.

    Example: `ludus report runs/demo --open`
    """
    from ludus.services.report import write_figure, write_report

    path = write_figure(run_dir, figure) if figure else write_report(run_dir, output)
    say(results_console(), str(path))
    if open_page:
        webbrowser.open(path.resolve().as_uri())
