"""Where the command line writes: results to stdout, progress and messages to stderr."""

from __future__ import annotations

import sys

from rich.console import Console

PLAIN_WIDTH = 120
"""Columns where nobody says how wide the output is: a file, a pipe, a build log."""


def results_console() -> Console:
    """A console on stdout."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def progress_console() -> Console:
    """A console on stderr."""
    width = None if sys.stderr.isatty() else PLAIN_WIDTH
    return Console(stderr=True, width=width, highlight=False)


def say(console: Console, message: str, style: str | None = None) -> None:
    """Print a line as it stands: names in it are never taken for markup, nor wrapped."""
    console.print(message, style=style, markup=False, soft_wrap=True)
