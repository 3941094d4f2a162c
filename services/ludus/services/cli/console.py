"""Consoles of the command line: results go to stdout, progress and messages to stderr."""

from __future__ import annotations

import sys

from rich.console import Console

PLAIN_WIDTH = 120
"""Columns if the output is not a terminal, for example a file or a build log."""


def results_console() -> Console:
    """Return a console on stdout."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def progress_console() -> Console:
    """Return a console on stderr."""
    width = None if sys.stderr.isatty() else PLAIN_WIDTH
    return Console(stderr=True, width=width, highlight=False)


def print_line(console: Console, message: str, style: str | None = None) -> None:
    """Print a line literally, without markup and without wrapping."""
    console.print(message, style=style, markup=False, soft_wrap=True)
