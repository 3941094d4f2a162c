"""The progress of a run, shown as a live panel on a terminal, otherwise as plain lines."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ludus.env.text.terminal import format_notice
from ludus.proto.metrics import EvalMetric, TrainMetric, combine_metric
from ludus.proto.runs import MetricsRow, Phase
from ludus.proto.wording import choose_wording
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
"""Minimum time between two plain lines, in seconds."""
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
    """The progress of a run, updated with each metrics row.

    Args:
        step: number of steps trained so far; None if the first row tells it.
        unit: name of what a batch consists of.
    """

    def __init__(self, num_steps: int, step: int | None = 0, unit: str = "episodes") -> None:
        self.num_steps = num_steps
        self._unit = unit
        self.step = step
        self.num_games_trained = 0
        self.phase: Phase | None = None
        self.is_stopping = False
        self.waiting_reason = ""
        """Reason why a run on a cluster is waiting; empty while it makes progress."""
        self._void_counts: dict[int, dict[str, int]] = {}
        """Numbers of void episodes, by step: a restarted learner reports some steps again."""
        self._eval_rows: dict[str, MetricsRow] = {}
        """The latest evaluation of each environment."""
        self._validation_loss: float | None = None
        self._num_open_environments = 0
        """Number of environments that the curriculum has opened; 0 if there is no curriculum."""
        self._newest_environment = ""
        self._recent_values: deque[dict[str, float]] = deque(maxlen=MEAN_WINDOW)
        self._recent_times: deque[tuple[int, float]] = deque(maxlen=PACE_WINDOW + 1)

    def update(self, rows: Iterable[MetricsRow]) -> None:
        """Apply new rows."""
        for row in rows:
            if row.kind in ("eval", "train"):
                # The step may decrease, because a restarted learner repeats some steps.
                self.step, self.num_games_trained = row.step, row.num_games_trained
            match row.kind:
                case "phase":
                    # A run that resumes enters its first phases at the step of its checkpoint.
                    self.step, self.phase = row.step, row.phase
                    self.num_steps = row.num_steps or self.num_steps
                case "eval":
                    self._eval_rows[row.environment or ""] = row
                case "train":
                    self._record_step(row)
                case "event" if TrainMetric.VALIDATION_LOSS in row.values:
                    self._validation_loss = row.values[TrainMetric.VALIDATION_LOSS]
                case "event" if TrainMetric.NUM_UNLOCKS in row.values:
                    self._newest_environment = row.environment or ""

    @property
    def step_text(self) -> str:
        """Number of trained steps and of all steps; '' if the former is unknown."""
        return "" if self.step is None else f"step {self.step}/{self.num_steps}"

    @property
    def phase_name(self) -> str:
        """Readable name of the current phase."""
        if self.is_stopping:
            return "stopping, writing a checkpoint"
        if self.waiting_reason:
            return self.waiting_reason
        return "starting" if self.phase is None else PHASE_NAMES[self.phase]

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds until the last training step; None while unknown."""
        if not self._recent_times:
            return None
        (first_step, first_s), (last_step, last_s) = self._recent_times[0], self._recent_times[-1]
        if last_step <= first_step:
            return None
        return (self.num_steps - last_step) * (last_s - first_s) / (last_step - first_step)

    def list_facts(self) -> dict[str, str]:
        """Return the available facts as text, in display order."""
        facts = self._list_eval_facts() | {
            "reward": self._format_mean(
                TrainMetric.REWARD_MEAN, lambda mean: format_fixed(mean, 3)
            ),
            "loss": self._format_loss(),
            "validation loss": _format_loss(self._validation_loss),
            self._unit: f"{self.num_games_trained:,}" if self.num_games_trained else None,
            "open environments": self._format_open_environments(),
            "episodes/s": self._format_mean(TrainMetric.EPISODES_PER_SECOND),
            "tokens/s": self._format_mean(TrainMetric.TOKENS_PER_SECOND),
            "staleness": self._format_mean(TrainMetric.STALENESS_MEAN),
            "zero-variance groups": self._format_mean(
                TrainMetric.ZERO_VARIANCE_GROUP_RATIO, lambda share: format_percent(share, 0)
            ),
            "replaced groups": self._format_replaced_groups(),
            "canary error": self._format_mean(TrainMetric.CANARY_ERROR),
            "lost episodes": self._format_total_void(TrainMetric.NUM_EPISODES_LOST),
            "failed episodes": self._format_total_void(TrainMetric.NUM_EPISODES_FAILED),
        }
        return {name: text for name, text in facts.items() if text is not None}

    def format_line(self) -> str:
        """Format the progress as one line, for logs."""
        phrases = [self.step_text] if self.step_text else []
        phrases.append(self.phase_name)
        phrases += [f"{name} {text}" for name, text in self.list_facts().items()]
        if self.remaining_s is not None and (self.step or 0) < self.num_steps:
            phrases.append(f"{format_duration(self.remaining_s)} left")
        return " · ".join(phrases)

    def _record_step(self, row: MetricsRow) -> None:
        self._recent_values.append(row.values)
        self._recent_times.append((row.step, row.elapsed_s))
        self._void_counts[row.step] = {
            metric: int(row.values.get(metric, 0))
            for metric in (TrainMetric.NUM_EPISODES_LOST, TrainMetric.NUM_EPISODES_FAILED)
        }
        num_open = int(row.values.get(TrainMetric.NUM_ENVIRONMENTS_OPEN, 0))
        if num_open < self._num_open_environments:
            # The learner was restarted, and the newest environment is closed again.
            self._newest_environment = ""
        self._num_open_environments = num_open

    def _format_open_environments(self) -> str | None:
        if not self._num_open_environments:
            return None
        if not self._newest_environment:
            return "1"
        return f"{self._num_open_environments}, newest {self._newest_environment}"

    def _format_replaced_groups(self) -> str | None:
        """Format the replaced groups per step; None if no group was replaced."""
        num_steps, rows = len(self._recent_values), self._recent_values
        num_replaced = combine_metric(TrainMetric.NUM_GROUPS_REPLACED, rows)
        if not num_replaced:
            return None
        num_limited = sum(row.get(TrainMetric.NUM_GROUPS_KEPT, 0) > 0 for row in rows)
        limit_text = f", at the limit in {num_limited} of {num_steps} steps" if num_limited else ""
        return f"{format_compact(num_replaced / num_steps)} per step{limit_text}"

    def _format_total_void(self, metric: TrainMetric) -> str | None:
        num_void = sum(counts[metric] for counts in self._void_counts.values())
        return f"{num_void:,}" if num_void else None

    def _format_loss(self) -> str | None:
        """Format the mean loss of a run without rewards, in which the loss measures progress."""
        has_rewards = any(TrainMetric.REWARD_MEAN in values for values in self._recent_values)
        loss = None if has_rewards else combine_metric(TrainMetric.LOSS, self._recent_values)
        return _format_loss(loss)

    def _format_mean(
        self, metric: TrainMetric, format_mean: Callable[[float], str] = format_compact
    ) -> str | None:
        mean = combine_metric(metric, self._recent_values)
        return None if mean is None else format_mean(mean)

    def _list_eval_facts(self) -> dict[str, str | None]:
        """Return the latest evaluation results of each environment as facts."""
        facts: dict[str, str | None] = {}
        is_single = len(self._eval_rows) == 1
        for environment, row in self._eval_rows.items():
            suffix = "" if is_single else f" in {environment}"
            facts[f"{choose_wording(row.is_game).success}{suffix}"] = _format_successes(row)
            if is_single or EvalMetric.WIN_RATE not in row.values:
                facts[f"return{suffix}"] = _format_return(row)
        return facts


def _format_loss(loss: float | None) -> str | None:
    return None if loss is None else format_fixed(loss, 4)


def _format_return(row: MetricsRow) -> str | None:
    mean = row.values.get(EvalMetric.RETURN_MEAN)
    return None if mean is None else f"{format_fixed(mean, 3)} at step {row.step}"


def _format_successes(row: MetricsRow) -> str | None:
    values = row.values
    if EvalMetric.WIN_RATE not in values:
        return None
    share_text = format_percent(values[EvalMetric.WIN_RATE])
    if EvalMetric.WIN_RATE_CI95_LOW in values and EvalMetric.WIN_RATE_CI95_HIGH in values:
        interval = values[EvalMetric.WIN_RATE_CI95_LOW], values[EvalMetric.WIN_RATE_CI95_HIGH]
        share_text += f" ({format_percent_interval(interval)})"
    # Other values of the progress are those of the latest training steps.
    return f"{share_text} at step {row.step}"


# Views of the progress.


@contextlib.contextmanager
def show_progress(console: Console) -> Iterator[PlainView | TerminalView]:
    """Show progress in a context: yield a live panel on a terminal, otherwise a plain view."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        yield TerminalView(console, live)


class PlainView:
    """A view that prints a line every few seconds and when the run first enters a phase.

    It does not print a line at every change of phase, because a run may change its phase several
    times per second.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed_at_s = -PLAIN_INTERVAL_S
        self._printed_phases: set[str] = set()
        """Names of the phases that have been printed."""
        self._last_line = ""

    def refresh(self, progress: RunProgress) -> None:
        """Print a line if the interval has passed or the phase is new."""
        is_due = time.monotonic() - self._printed_at_s >= PLAIN_INTERVAL_S
        if is_due or progress.phase_name not in self._printed_phases:
            self._print(progress)

    def warn(self, message: str) -> None:
        """Print the warning."""
        print_line(self._console, format_notice("warning", message))

    def finish(self, progress: RunProgress) -> None:
        """Print the last line if it has not been printed."""
        self._print(progress)

    def _print(self, progress: RunProgress) -> None:
        line = progress.format_line()
        if line != self._last_line:
            print_line(self._console, line)
            self._printed_at_s = time.monotonic()
            self._printed_phases.add(progress.phase_name)
            self._last_line = line


class TerminalView:
    """A view that redraws a panel on the same lines of the terminal."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live
        self._spinner = Spinner("dots")
        self._started_at_s = time.monotonic()

    def refresh(self, progress: RunProgress) -> None:
        """Redraw the panel."""
        self._update_spinner(progress)
        self._live.update(Group(self._spinner, _make_bar(progress), _make_facts_grid(progress)))

    def warn(self, message: str) -> None:
        """Print the warning above the panel."""
        print_warning(self._console, message)

    def finish(self, progress: RunProgress) -> None:
        """Do nothing: the panel disappears, and the caller prints the results."""

    def _update_spinner(self, progress: RunProgress) -> None:
        elapsed_text = format_duration(time.monotonic() - self._started_at_s)
        phase = progress.phase_name, "yellow" if progress.is_stopping else "bold"
        self._spinner.update(text=Text.assemble(phase, (f"  {elapsed_text}", "dim")))


def _make_bar(progress: RunProgress) -> Table:
    remaining_s = progress.remaining_s
    remaining_text = "" if remaining_s is None else f"{format_duration(remaining_s)} left"
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        Text(progress.step_text),
        ProgressBar(total=progress.num_steps, completed=progress.step or 0, width=BAR_WIDTH),
        Text(remaining_text, style="cyan"),
    )
    return grid


def _make_facts_grid(progress: RunProgress) -> Table:
    """Lay out the facts in a grid, with names above values and five facts per row."""
    grid = Table.grid(padding=(0, 3))
    facts = list(progress.list_facts().items())
    for first_index in range(0, len(facts), 5):
        row_facts = facts[first_index : first_index + 5]
        grid.add_row(*(Text(name, style="dim") for name, _ in row_facts))
        grid.add_row(*(Text(fact_text) for _, fact_text in row_facts))
    return grid
