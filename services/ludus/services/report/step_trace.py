"""The trace of a training step: when learner, weights and workers were busy, and who waited.

    trace.jsonl --StepTrace--> select_traces --> StepChart --> charts.svg

A call of a worker may begin before a step and end after it, so a chart also needs the calls of
later steps.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ludus.proto.errors import NotFoundError
from ludus.proto.runs import DeliverySpan, PlaySpan, StepTrace
from ludus.services.numbers import format_fixed
from ludus.services.report.line_chart import Scale, choose_ticks

MAX_WORKERS = 12
"""Maximum number of workers in a chart."""
_WIDTH, _MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP = 1100.0, 80.0, 12.0, 4.0
_ROW_DISTANCE, _ROW_HEIGHT, _AXIS_HEIGHT = 32.0, 24.0, 26.0
_NUM_TICKS = 8
_MIN_TEXT_WIDTH = 7.0
"""Minimum width of a bar with text, in pixels per character."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A period in a row of the chart."""

    x: float
    width: float
    css_class: str
    text: str
    """Text in the bar; empty if the bar is too narrow."""
    tooltip: str


@dataclass(frozen=True, slots=True)
class ChartRow:
    """A row of the chart: what the learner, the weights or a worker did in the step."""

    name: str
    y: float
    """Position of the upper edge."""
    height: float = _ROW_HEIGHT
    bars: Sequence[Bar] = ()
    polygon: str = ""
    """Number of groups that a worker plays over time, as the points of an area."""
    tooltip: str = ""
    """Text of the area."""


@dataclass(frozen=True)
class StepChart:
    """The content of the chart of a step, and the pixel positions of everything in it."""

    trace: StepTrace
    deliveries: Sequence[DeliverySpan]
    plays: Sequence[PlaySpan]
    """Calls of workers that overlap with the step."""

    @property
    def title(self) -> str:
        """Name and duration of the step."""
        return f"Step {self.trace.step:,}, {_format_seconds(self.trace.duration_s)}"

    @property
    def workers(self) -> list[int]:
        """Numbers of the workers in the chart."""
        return sorted({play.worker for play in self.plays})[:MAX_WORKERS]

    @property
    def width(self) -> float:
        """Width of the chart."""
        return _WIDTH

    @property
    def height(self) -> float:
        """Height of the chart."""
        return self.axis_y + _AXIS_HEIGHT

    @property
    def axis_y(self) -> float:
        """Position of the time axis."""
        return _MARGIN_TOP + _ROW_DISTANCE * (2 + len(self.workers))

    @cached_property
    def scale(self) -> Scale:
        """Scale from Unix time to pixels."""
        start_s, end_s = self.trace.start_s, max(self.trace.end_s, self.trace.start_s + 1e-3)
        return Scale(start_s, end_s, _MARGIN_LEFT, _WIDTH - _MARGIN_RIGHT)

    def make_ticks(self) -> list[tuple[float, str]]:
        """Return the pixel position and the text of each tick of the time axis."""
        offsets = choose_ticks(0.0, self.scale.high - self.scale.low, _NUM_TICKS)
        return [(self.scale(self.trace.start_s + offset), f"{offset:g} s") for offset in offsets]

    def make_rows(self) -> list[ChartRow]:
        """Return the rows of the chart, from top to bottom."""
        y_positions = (_MARGIN_TOP + _ROW_DISTANCE * index for index in itertools.count())
        rows = [
            ChartRow("learner", next(y_positions), bars=self._make_learner_bars()),
            ChartRow("weights", next(y_positions), bars=self._make_delivery_bars()),
        ]
        counts_by_worker = {worker: self._count(worker) for worker in self.workers}
        peaks = {
            worker: max(count for _, count in counts) for worker, counts in counts_by_worker.items()
        }
        for worker, counts in counts_by_worker.items():
            y, name = next(y_positions), f"worker {worker}"
            tooltip = f"{name}: up to {peaks[worker]} groups at a time"
            polygon = self._format_area(counts, y, max(*peaks.values(), 1))
            rows.append(ChartRow(name, y, polygon=polygon, tooltip=tooltip))
        return rows

    def _make_learner_bars(self) -> list[Bar]:
        trace = self.trace
        train_s = trace.start_s + trace.wait_s
        publish_s = train_s + trace.train_s
        return [
            self._make_bar(trace.start_s, train_s, "wait", "waits for groups"),
            self._make_bar(train_s, publish_s, "busy", "trains"),
            self._make_bar(publish_s, trace.end_s, "send", "publishes"),
        ]

    def _make_delivery_bars(self) -> list[Bar]:
        return [
            self._make_bar(
                delivery.start_s, delivery.end_s, "send", f"delivers version {delivery.version}"
            )
            for delivery in self.deliveries
        ]

    def _format_area(self, counts: Sequence[tuple[float, int]], y: float, peak: int) -> str:
        """Return the points of the area under the number of groups, for an SVG attribute."""
        x, bottom = self.scale, y + _ROW_HEIGHT
        points = [(x(counts[0][0]), bottom)]
        for (start_s, count), (end_s, _) in pairwise(counts):
            level = round(bottom - _ROW_HEIGHT * count / peak, 2)
            points += [(x(start_s), level), (x(end_s), level)]
        points.append((x(counts[-1][0]), bottom))
        return " ".join(f"{point_x},{point_y}" for point_x, point_y in points)

    def describe(self) -> Iterator[str]:
        """Yield sentences that say who waited for whom."""
        trace = self.trace
        duration_s = max(trace.duration_s, 1e-9)
        yield (
            f"The learner waited {_format_seconds(trace.wait_s)} for groups "
            f"({trace.wait_s / duration_s:.0%} of the step), trained for "
            f"{_format_seconds(trace.train_s)} and published weights for "
            f"{_format_seconds(trace.publish_s)}."
        )
        idle_s = {worker: self._measure_idle_s(worker) for worker in self.workers}
        if idle_s:
            worker = max(idle_s, key=lambda number: idle_s[number])
            name = "The worker" if len(idle_s) == 1 else f"Worker {worker} waited longest: it"
            yield (
                f"{name} had no group to play for {_format_seconds(idle_s[worker])} "
                f"({idle_s[worker] / duration_s:.0%})."
            )
        ended = [play for play in self.plays if trace.start_s < play.end_s <= trace.end_s]
        if ended:
            slowest = max(ended, key=lambda play: play.duration_s)
            num_groups = sum(play.num_groups for play in ended)
            median_s = statistics.median(play.duration_s for play in ended)
            noun = "group" if num_groups == 1 else "groups"
            num_refused = sum(play.num_refused for play in ended)
            refused = f", of which {num_refused:,} were replaced" if num_refused else ""
            yield (
                f"{num_groups:,} {noun} ended in the step{refused}. A call took "
                f"{_format_seconds(median_s)} in the median and at most "
                f"{_format_seconds(slowest.duration_s)} (worker {slowest.worker})."
            )
        num_hidden = len({play.worker for play in self.plays}) - len(self.workers)
        if num_hidden:
            yield f"The chart leaves out {num_hidden} more workers."

    def _make_bar(self, start_s: float, end_s: float, css_class: str, text: str) -> Bar:
        """Return the part of a period within the step."""
        trace, x = self.trace, self.scale
        start_x = x(min(max(start_s, trace.start_s), trace.end_s))
        width = round(x(max(min(end_s, trace.end_s), trace.start_s)) - start_x, 2)
        tooltip = f"{text}: {_format_seconds(end_s - start_s)}"
        is_wide = width >= len(text) * _MIN_TEXT_WIDTH
        return Bar(start_x, max(width, 0.0), css_class, text if is_wide else "", tooltip)

    def _count(self, worker: int) -> list[tuple[float, int]]:
        """Return the times at which the number of groups in play changes, and the new number."""
        start_s, end_s = self.trace.start_s, self.trace.end_s
        changes: Counter[float] = Counter({start_s: 0, end_s: 0})
        for play in self.plays:
            if play.worker == worker:
                changes[max(play.start_s, start_s)] += play.num_groups
                changes[min(play.end_s, end_s)] -= play.num_groups
        counts, count = [], 0
        for time_s in sorted(changes):
            count += changes[time_s]
            counts.append((time_s, count))
        return counts

    def _measure_idle_s(self, worker: int) -> float:
        """Return the time in which a worker played no group."""
        counts = pairwise(self._count(worker))
        return sum(end_s - start_s for (start_s, count), (end_s, _) in counts if count == 0)


def make_step_charts(traces: Sequence[StepTrace], step: int | None = None) -> list[StepChart]:
    """Return the chart of a step; by default, of the latest typical step and of the longest.

    A typical step takes about as long as the median of the second half of the run.

    Raises:
        NotFoundError: there is no trace of this step.
    """
    if step is not None:
        chosen = [trace for trace in traces if trace.step == step][-1:]
        if not chosen:
            steps = (
                f"it has steps {traces[0].step} to {traces[-1].step}" if traces else "it is empty"
            )
            raise NotFoundError(f"trace.jsonl has no step {step}; {steps}")
    elif not traces:
        return []
    else:
        later = traces[len(traces) // 2 :]
        median_s = statistics.median(trace.duration_s for trace in later)
        typical = min(reversed(later), key=lambda trace: abs(trace.duration_s - median_s))
        longest = max(traces, key=lambda trace: trace.duration_s)
        chosen = [typical] if longest is typical else [typical, longest]
    return [_make_chart(traces, trace) for trace in chosen]


def _make_chart(traces: Sequence[StepTrace], trace: StepTrace) -> StepChart:
    start_s, end_s = trace.start_s, trace.end_s
    return StepChart(
        trace,
        [
            delivery
            for other in traces
            for delivery in other.deliveries
            if delivery.start_s < end_s and delivery.end_s > start_s
        ],
        [
            play
            for other in traces
            for play in other.plays
            if play.start_s < end_s and play.end_s > start_s
        ],
    )


def _format_seconds(seconds: float) -> str:
    return f"{format_fixed(seconds, 1 if seconds >= 1 else 3)} s"
