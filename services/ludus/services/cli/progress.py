"""Progress of a run, from its metrics rows, as a live panel on a terminal or as plain lines."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ludus.proto.metrics import EvalMetric, TrainMetric, combine_metric
from ludus.proto.runs import MetricsRow, Phase
from ludus.services.cli.console import print_line, print_warning
from ludus.services.numbers import (
    format_compact,
    format_duration,
    format_fixed,
    format_percent,
    format_percent_interval,
)

PACE_WINDOW = 20
"""Number of recent training steps from which the remaining time is estimated."""
MEAN_WINDOW = 10
"""Number of recent training steps over which reward and rates are averaged."""
PLAIN_INTERVAL_S = 5.0
"""Minimum seconds between two plain lines."""
BAR_WIDTH = 36

PHASE_NAMES = {
    Phase.START_ENVIRONMENT: "starting the environment",
    Phase.PREPARE_MODEL: "preparing the model",
    Phase.START_WORKERS: "starting workers",
    Phase.EVALUATE: "evaluating",
    Phase.TRAIN: "training",
    Phase.SAVE_CHECKPOINT: "saving a checkpoint",
    Phase.DONE: "done",
}


class RunProgress:
    """Progress of a run, updated with each metrics row."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.step = 0
        self.num_games_trained = 0
        self.phase: Phase | None = None
        self.is_stopping = False
        self.waiting_reason = ""
        """Reason why a run on a cluster is waiting; empty while it makes progress."""
        self._num_void: dict[int, dict[str, int]] = {}
        """Void episodes by step. After a restart of the learner, a step's row arrives again."""
        self._evals: dict[str, dict[str, float]] = {}
        """Latest evaluation of each environment."""
        self._num_open = 0
        """Number of environments that the curriculum has opened; 0 without a curriculum."""
        self._newest_open = ""
        self._recent: deque[dict[str, float]] = deque(maxlen=MEAN_WINDOW)
        self._pace: deque[tuple[int, float]] = deque(maxlen=PACE_WINDOW + 1)

    def update(self, rows: Iterable[MetricsRow]) -> None:
        """Apply new rows."""
        for row in rows:
            match row.kind:
                case "phase":
                    self.phase = row.phase
                    self.num_steps = row.num_steps or self.num_steps
                case "eval":
                    self._record_position(row)
                    self._evals[row.environment or ""] = row.values
                case "train":
                    self._record_position(row)
                    self._record_step(row)
                    self._record_curriculum(row)
                case "event" if TrainMetric.NUM_UNLOCKS in row.values:
                    self._newest_open = row.environment or ""

    @property
    def phase_name(self) -> str:
        """Readable name of the current phase."""
        if self.is_stopping:
            return "stopping, writing a checkpoint"
        if self.waiting_reason:
            return self.waiting_reason
        return "starting" if self.phase is None else PHASE_NAMES[self.phase]

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the last training step; None while unknown."""
        if len(self._pace) < 2:
            return None
        (first_step, first_s), (last_step, last_s) = self._pace[0], self._pace[-1]
        if last_step <= first_step:
            return None
        return (self.num_steps - last_step) * (last_s - first_s) / (last_step - first_step)

    def facts(self) -> dict[str, str]:
        """Return the available facts as text, in display order."""
        facts = self._eval_facts() | {
            "reward": self._recent_mean(
                TrainMetric.REWARD_MEAN, lambda mean: format_fixed(mean, 3)
            ),
            "episodes": f"{self.num_games_trained:,}" if self.num_games_trained else None,
            "open environments": self._open_environments(),
            "episodes/s": self._recent_mean(TrainMetric.EPISODES_PER_SECOND),
            "tokens/s": self._recent_mean(TrainMetric.TOKENS_PER_SECOND),
            "staleness": self._recent_mean(TrainMetric.STALENESS_MEAN),
            "zero-variance groups": self._recent_mean(
                TrainMetric.ZERO_VARIANCE_GROUP_RATIO, lambda share: format_percent(share, 0)
            ),
            "canary error": self._recent_mean(TrainMetric.CANARY_ERROR),
            "lost episodes": self._total_void(TrainMetric.NUM_EPISODES_LOST),
            "failed episodes": self._total_void(TrainMetric.NUM_EPISODES_FAILED),
        }
        return {name: text for name, text in facts.items() if text is not None}

    def line(self) -> str:
        """Format the progress as one line, for logs."""
        parts = [f"step {self.step}/{self.num_steps}", self.phase_name]
        parts += [f"{name} {text}" for name, text in self.facts().items()]
        if self.seconds_left is not None and self.step < self.num_steps:
            parts.append(f"{format_duration(self.seconds_left)} left")
        return " · ".join(parts)

    def _record_step(self, row: MetricsRow) -> None:
        self._recent.append(row.values)
        self._pace.append((row.step, row.elapsed_s))
        self._num_void[row.step] = {
            metric: int(row.values.get(metric, 0))
            for metric in (TrainMetric.NUM_EPISODES_LOST, TrainMetric.NUM_EPISODES_FAILED)
        }

    def _record_curriculum(self, row: MetricsRow) -> None:
        num_open = int(row.values.get(TrainMetric.NUM_ENVIRONMENTS_OPEN, 0))
        if num_open < self._num_open:
            # After a restart of the learner, the curriculum has closed the environment again.
            self._newest_open = ""
        self._num_open = num_open

    def _open_environments(self) -> str | None:
        if not self._num_open:
            return None
        return f"{self._num_open}, newest {self._newest_open}" if self._newest_open else "1"

    def _total_void(self, metric: TrainMetric) -> str | None:
        total = sum(counts[metric] for counts in self._num_void.values())
        return f"{total:,}" if total else None

    def _record_position(self, row: MetricsRow) -> None:
        # The latest row, not the largest step: a restarted learner repeats some steps.
        self.step, self.num_games_trained = row.step, row.num_games_trained

    def _recent_mean(
        self, metric: TrainMetric, format_mean: Callable[[float], str] = format_compact
    ) -> str | None:
        mean = combine_metric(metric, self._recent)
        return None if mean is None else format_mean(mean)

    def _eval_facts(self) -> dict[str, str | None]:
        """Return the wins of each environment; also the return if it is alone or has no wins."""
        facts: dict[str, str | None] = {}
        for environment, values in self._evals.items():
            suffix = f" in {environment}" if len(self._evals) > 1 else ""
            facts[f"wins{suffix}"] = _wins(values)
            if not suffix or EvalMetric.WIN_RATE not in values:
                mean = values.get(EvalMetric.RETURN_MEAN)
                facts[f"return{suffix}"] = None if mean is None else format_fixed(mean, 3)
        return facts


def _wins(values: Mapping[str, float]) -> str | None:
    if EvalMetric.WIN_RATE not in values:
        return None
    text = format_percent(values[EvalMetric.WIN_RATE])
    if EvalMetric.WIN_RATE_CI95_LOW in values and EvalMetric.WIN_RATE_CI95_HIGH in values:
        interval = values[EvalMetric.WIN_RATE_CI95_LOW], values[EvalMetric.WIN_RATE_CI95_HIGH]
        text += f" ({format_percent_interval(interval)})"
    return text


# Views.


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
        print_warning(self._console, message)

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
