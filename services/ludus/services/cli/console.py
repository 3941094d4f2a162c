"""Output of the commands: results go to stdout, progress and messages go to stderr."""

from __future__ import annotations

import sys
from collections.abc import Collection

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, by shell convention (128 + SIGINT)."""
EXIT_FAILED = 1
"""Exit code after a failure for which there is no other exit code."""
PLAIN_WIDTH = 120
"""Line width, in characters, of output that does not go to a terminal."""


def get_stdout() -> Console:
    """Return a console on stdout."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def get_stderr() -> Console:
    """Return a console on stderr."""
    width = None if sys.stderr.isatty() else PLAIN_WIDTH
    return Console(stderr=True, width=width, highlight=False)


def print_line(console: Console, message: str, style: str | None = None) -> None:
    """Print a line as it is, without markup and without wrapping."""
    console.print(message, style=style, markup=False, soft_wrap=True)


def print_warning(console: Console, message: str) -> None:
    """Print a warning."""
    print_line(console, f"warning: {message}", style="yellow")


def make_table(*columns: str, number_columns: Collection[str] = (), title: str = "") -> Table:
    """Return an empty table in the style of this command line.

    Args:
        number_columns: names of the columns to align to the right.
    """
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        header_style="dim",
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column, justify="right" if column in number_columns else "left")
    return table
