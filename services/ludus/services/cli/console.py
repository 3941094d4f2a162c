"""Output of the commands: results go to stdout, progress and messages go to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ludus.env.text.terminal import (
    clean_for_terminal,
    clean_json_for_terminal,
    format_notice,
)

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, by shell convention (128 + SIGINT)."""
EXIT_FAILED = 1
"""Exit code after a failure for which there is no other exit code."""
PLAIN_WIDTH = 120
"""Line width, in characters, of output that does not go to a terminal."""


class CleanConsole(Console):
    """A console that shows hidden characters of all texts, also in tables and live views."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of a renderable. Only rich's own segments can control the cursor."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(clean_for_terminal(segment.text, keep_newlines=True), segment.style)


class CleanTable(Table):
    """A table whose texts are cleaned before the widths of its columns are computed."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row; a cell that may have hidden characters or markup must be a `Text`."""
        super().add_row(*map(_clean_cell, cells), **options)


def _clean_cell(cell: RenderableType | None) -> RenderableType | None:
    return Text(clean_for_terminal(cell.plain), cell.style) if isinstance(cell, Text) else cell


def get_stdout() -> Console:
    """Return a console on stdout."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    # Rich would otherwise print "openspiel:hearts:" as a heart.
    return CleanConsole(width=width, highlight=False, emoji=False)


def get_stderr() -> Console:
    """Return a console on stderr."""
    width = None if sys.stderr.isatty() else PLAIN_WIDTH
    return CleanConsole(stderr=True, width=width, highlight=False, emoji=False)


def print_line(console: Console, message: str, style: str | None = None) -> None:
    """Print a line without markup and without wrapping; hidden characters are escaped."""
    # Rich would remove some of the hidden characters before the console shows them.
    message = clean_for_terminal(message, keep_newlines=True)
    console.print(message, style=style, markup=False, soft_wrap=True)


def print_warning(console: Console, message: str) -> None:
    """Print a warning."""
    print_line(console, format_notice("warning", message), style="yellow")


def write_text(text: str) -> None:
    """Write a text of several lines to stdout, without wrapping; hidden characters are escaped."""
    typer.echo(clean_for_terminal(text.removesuffix("\n"), keep_newlines=True))


def write_json(json_text: str) -> None:
    """Write JSON to stdout, without wrapping; hidden characters become JSON's escapes."""
    typer.echo(clean_json_for_terminal(json_text))


@contextmanager
def show_activity(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what the command does or waits for.

    A terminal shows the latest text; other output gets a line for each new text.
    """
    if console.is_terminal:
        with console.status("") as status:
            yield lambda text: status.update(Text(text))
        return
    shown_texts: set[str] = set()

    def print_new(text: str) -> None:
        if text not in shown_texts:
            print_line(console, text)
            shown_texts.add(text)

    yield print_new


def make_table(*columns: str, number_columns: Collection[str] = (), title: str = "") -> Table:
    """Return an empty table in the style of this command line.

    Args:
        number_columns: names of the columns to align to the right.
    """
    table = CleanTable(
        title=Text(clean_for_terminal(title)) if title else None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        header_style="dim",
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column, justify="right" if column in number_columns else "left")
    return table
