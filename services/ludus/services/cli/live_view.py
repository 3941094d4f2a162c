"""Views of a run's progress: a live panel on a terminal, otherwise plain lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ludus.services.cli.console import print_line
from ludus.services.cli.progress import RunProgress
from ludus.services.numbers import format_duration

PLAIN_INTERVAL_S = 5.0
"""Minimum seconds between two plain lines."""
BAR_WIDTH = 36


@contextlib.contextmanager
def progress_view(console: Console) -> Iterator[PlainView | TerminalView]:
    """Yield a live panel if the console is a terminal, otherwise a view of plain lines."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    live = Live(console=console, refresh_per_second=8, transient=True)
    with live:
        yield TerminalView(console, live)


class PlainView:
    """A line every few seconds, and one when the run enters a phase for the first time.

    A run may switch between training, checkpoints and evaluations several times per second.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_at_s = -PLAIN_INTERVAL_S
        self._phase_names: set[str] = set()
        """Phases that have been printed."""
        self._line = ""

    def refresh(self, progress: RunProgress) -> None:
        """Print a line if the interval has passed or the phase is new."""
        is_due = time.monotonic() - self._shown_at_s >= PLAIN_INTERVAL_S
        if is_due or progress.phase_name not in self._phase_names:
            self._print(progress)

    def warn(self, message: str) -> None:
        """Print the warning."""
        print_line(self._console, f"warning: {message}")

    def finish(self, progress: RunProgress) -> None:
        """Print the last line if it has not been printed."""
        self._print(progress)

    def _print(self, progress: RunProgress) -> None:
        line = progress.line()
        if line != self._line:
            print_line(self._console, line)
            self._shown_at_s = time.monotonic()
            self._phase_names.add(progress.phase_name)
            self._line = line


class TerminalView:
    """A panel that is redrawn on the same lines."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live
        self._spinner = Spinner("dots")
        self._started_at_s = time.monotonic()

    def refresh(self, progress: RunProgress) -> None:
        """Redraw the panel."""
        self._live.update(Group(self._head(progress), self._bar(progress), _facts(progress)))

    def warn(self, message: str) -> None:
        """Print the warning above the panel."""
        print_line(self._console, f"warning: {message}", style="yellow")

    def finish(self, progress: RunProgress) -> None:
        """Do nothing: the panel disappears, and the caller prints the results."""

    def _head(self, progress: RunProgress) -> Spinner:
        elapsed = format_duration(time.monotonic() - self._started_at_s)
        style = "yellow" if progress.is_stopping else "bold"
        self._spinner.update(
            text=Text.assemble((progress.phase_name, style), (f"  {elapsed}", "dim"))
        )
        return self._spinner

    def _bar(self, progress: RunProgress) -> Table:
        remaining_s = progress.seconds_left
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(f"step {progress.step}/{progress.num_steps}"),
            ProgressBar(total=progress.num_steps, completed=progress.step, width=BAR_WIDTH),
            Text(
                "" if remaining_s is None else f"{format_duration(remaining_s)} left", style="cyan"
            ),
        )
        return row


def _facts(progress: RunProgress) -> Table:
    """Lay out the facts with names above values, five per row."""
    grid = Table.grid(padding=(0, 3))
    facts = list(progress.facts().items())
    for start in range(0, len(facts), 5):
        row = facts[start : start + 5]
        grid.add_row(*(Text(name, style="dim") for name, _ in row))
        grid.add_row(*(Text(value) for _, value in row))
    return grid
