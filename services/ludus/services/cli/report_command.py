"""`ludus report`: the HTML report or a picture of a run."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from ludus.services.cli.console import print_line, results_console

RunDir = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, for example runs/demo.")
]


def report(
    run_dir: RunDir,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the page.", show_default="RUN_DIR/report.html"),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for an SVG picture, written instead of the page."),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the written file in the browser.")
    ] = False,
) -> None:
    """Write the report of a run: one self-contained HTML page.

    The run may be finished, stopped, or still running.

    Example: `ludus report runs/demo --open`
    """
    from ludus.services.report import write_figure, write_report

    path = write_figure(run_dir, figure) if figure else write_report(run_dir, output)
    print_line(results_console(), str(path))
    if open_page:
        webbrowser.open(path.resolve().as_uri())
