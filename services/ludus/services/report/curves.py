"""The charts of a run: learning curves, and training metrics over the number of episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ludus.proto.config import SftRun
from ludus.proto.metrics import REWARD_TERM_PREFIX, EvalMetric, TrainMetric, combine_metric
from ludus.proto.runs import MetricsRow, PolicyResult
from ludus.proto.wording import Wording, choose_wording
from ludus.services.display import format_policy_name
from ludus.services.numbers import (
    format_compact,
    format_fixed,
    format_fixed_interval,
    format_percent,
    format_percent_interval,
)
from ludus.services.report.line_chart import Frame, Level, Line, LineChart, Mark, Point
from ludus.services.report.run_files import RunFiles

MEAN_WINDOW = 10
"""Number of training steps over which the small charts average their values."""

CURVE_FRAME = Frame(
    width=570, height=350, margin_left=54, margin_right=158, margin_top=14, margin_bottom=46
)
SMALL_FRAME = Frame(
    width=350,
    height=170,
    margin_left=52,
    margin_right=12,
    margin_top=10,
    margin_bottom=28,
    num_x_ticks=4,
    num_y_ticks=3,
)


Reading = tuple[float | None, tuple[float, float] | None]
"""A measured value and its interval; None if the environment does not report them."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity that evaluations measure: where to read it, and how to format it."""

    name: str
    metric: EvalMetric
    low_metric: EvalMetric
    high_metric: EvalMetric
    read_result: Callable[[PolicyResult], Reading]
    format: Callable[[float], str]
    format_tick: Callable[[float], str]
    format_interval: Callable[[tuple[float, float]], str]

    def read_row(self, row: MetricsRow) -> Reading:
        """Return the value and its interval from a row of metrics."""
        low, high = row.values.get(self.low_metric), row.values.get(self.high_metric)
        interval = None if low is None or high is None else (low, high)
        return row.values.get(self.metric), interval


_SUCCESS_RATE = Measure(
    name="Success rate",
    metric=EvalMetric.WIN_RATE,
    low_metric=EvalMetric.WIN_RATE_CI95_LOW,
    high_metric=EvalMetric.WIN_RATE_CI95_HIGH,
    read_result=lambda result: (result.win_rate, result.win_rate_ci95),
    format=format_percent,
    format_tick=lambda share: format_percent(share, 0),
    format_interval=format_percent_interval,
)
_EXPECTED_RETURN = Measure(
    name="Expected return",
    metric=EvalMetric.RETURN_MEAN,
    low_metric=EvalMetric.RETURN_CI95_LOW,
    high_metric=EvalMetric.RETURN_CI95_HIGH,
    read_result=lambda result: (result.expected_return, result.expected_return_ci95),
    format=lambda value: format_fixed(value, 3),
    format_tick=lambda value: format_fixed(value, 2),
    format_interval=format_fixed_interval,
)
MEASURES = (_SUCCESS_RATE, _EXPECTED_RETURN)


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """A training metric, or the ratio of two, and its name in charts."""

    metric: TrainMetric | str
    """Metric, or the name of a reward term."""
    name: str
    unit: str
    divisor_metric: TrainMetric | None = None
    """Metric by which `metric` is divided."""
    required_metric: TrainMetric | None = None
    """Metric without which the curve is not drawn: it must be nonzero in at least one step."""

    def combine_steps(self, steps: Sequence[Mapping[str, float]]) -> float | None:
        """Combine the values of several steps; return None if no step has the metric."""
        value = combine_metric(self.metric, steps)
        if value is None or self.divisor_metric is None:
            return value
        divisor = combine_metric(self.divisor_metric, steps)
        return value / divisor if divisor else None


def _make_share_curve(metric: TrainMetric, name: str) -> TrainingCurve:
    return TrainingCurve(metric, name, "share of episodes", TrainMetric.NUM_EPISODES)


def _make_group_curve(metric: TrainMetric, name: str) -> TrainingCurve:
    return TrainingCurve(metric, name, "share of groups", TrainMetric.NUM_GROUPS, metric)


_REWARD = TrainingCurve(TrainMetric.REWARD_MEAN, "Reward", "mean per episode")
_LEARNING_RATE = TrainingCurve(TrainMetric.LEARNING_RATE, "Learning rate", "of each step")
_ZERO_VARIANCE = TrainingCurve(
    TrainMetric.ZERO_VARIANCE_GROUP_RATIO, "Zero-variance groups", "share of groups"
)
TRAINING_CURVES = (
    _REWARD,
    TrainingCurve(TrainMetric.ENTROPY, "Entropy", "nats per token"),
    TrainingCurve(TrainMetric.STALENESS_MEAN, "Staleness", "weight versions behind"),
    TrainingCurve(TrainMetric.MISMATCH_KL, "Mismatch KL", "sampler to learner, nats"),
    TrainingCurve(TrainMetric.TOKENS_PER_SECOND, "Generation", "tokens per second"),
    TrainingCurve(TrainMetric.GRAD_NORM, "Gradient norm", "before clipping"),
    _LEARNING_RATE,
    _ZERO_VARIANCE,
    _make_group_curve(TrainMetric.NUM_GROUPS_REPLACED, "Replaced groups"),
    _make_group_curve(TrainMetric.NUM_GROUPS_KEPT, "Kept at the replacement limit"),
    TrainingCurve(TrainMetric.EXPLAINED_VARIANCE, "Value head", "variance explained"),
    TrainingCurve(TrainMetric.MFU, "MFU", "share of the device's peak"),
)
FINE_TUNING_CURVES = (
    TrainingCurve(TrainMetric.LOSS, "Loss", "nats per token"),
    TrainingCurve(TrainMetric.ENTROPY, "Entropy", "nats per token"),
    TrainingCurve(TrainMetric.GRAD_NORM, "Gradient norm", "before clipping"),
    _LEARNING_RATE,
    TrainingCurve(TrainMetric.TOKENS_PER_SECOND, "Training", "tokens per second"),
    TrainingCurve(TrainMetric.MFU, "MFU", "share of the device's peak"),
)
ENVIRONMENT_CURVES = (
    _make_share_curve(TrainMetric.NUM_EPISODES_INVALID, "Invalid answers"),
    _make_share_curve(TrainMetric.NUM_EPISODES_TRUNCATED, "Truncated"),
    TrainingCurve(TrainMetric.NUM_TURNS_MEAN, "Turns", "mean per episode"),
    TrainingCurve(
        TrainMetric.NUM_TOOL_CALLS,
        "Tool calls",
        "mean per episode",
        divisor_metric=TrainMetric.NUM_EPISODES,
        required_metric=TrainMetric.NUM_TOOL_CALLS,
    ),
    TrainingCurve(
        TrainMetric.NUM_TOOL_CALLS_FAILED,
        "Failed tool calls",
        "share of calls",
        divisor_metric=TrainMetric.NUM_TOOL_CALLS,
    ),
)
"""Curves that are drawn for each environment."""


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A line of a chart with its latest moving mean, as text."""

    name: str
    css_class: str
    latest: str


@dataclass(frozen=True, slots=True)
class SmallChart:
    """A training metric over the number of episodes."""

    name: str
    unit: str
    chart: LineChart
    latest: str = ""
    """Latest moving mean of the only line, as text."""
    legend: Sequence[LegendEntry] = ()
    """Entries of the lines, if there are several."""


def name_measures(wording: Wording) -> tuple[Measure, Measure]:
    """Return the measures, with the name of the success rate in this wording."""
    return replace(_SUCCESS_RATE, name=wording.success_rate.capitalize()), _EXPECTED_RETURN


def make_learning_curve(
    run: RunFiles, environment: str, measure: Measure, frame: Frame
) -> LineChart | None:
    """Make the chart of a measure and its baselines; return None without evaluations."""
    points = make_eval_points(run, environment, measure)
    if not points:
        return None
    return make_measure_chart(
        measure,
        frame,
        [Line(points, name="this policy")],
        make_levels(run, environment, measure),
        make_marks(run),
        x_high=max((row.num_games_trained for row in run.metrics), default=0),
    )


def make_measure_chart(
    measure: Measure,
    frame: Frame,
    lines: Sequence[Line],
    levels: Sequence[Level],
    marks: Sequence[Mark] = (),
    x_high: float = 0.0,
) -> LineChart:
    """Make the chart of a measure over the number of episodes."""
    return LineChart(
        frame,
        f"{measure.name} over episodes trained",
        lines,
        levels=levels,
        marks=marks,
        format_y=measure.format,
        format_y_tick=measure.format_tick,
        x_title="episodes trained",
        x_high=x_high,
    )


def make_training_charts(run: RunFiles) -> list[SmallChart]:
    """Make a chart of each training metric that the run recorded."""
    training_curves = FINE_TUNING_CURVES if isinstance(run.config, SftRun) else TRAINING_CURVES
    return _make_small_charts(run.select_rows("train"), training_curves, make_marks(run))


def make_environment_charts(run: RunFiles, environment: str) -> list[SmallChart]:
    """Make a chart of each training metric that one environment recorded."""
    rows = run.select_rows("environment", environment)
    shared_curves: tuple[TrainingCurve, ...] = ()
    if len(run.environments) > 1:
        success = choose_wording(run.is_game(environment)).success.capitalize()
        success_curve = TrainingCurve(TrainMetric.WIN_RATE, success, "share of episodes")
        shared_curves = (_REWARD, success_curve, _ZERO_VARIANCE)
    return _make_small_charts(
        rows, (*shared_curves, *ENVIRONMENT_CURVES, *_make_term_curves(rows)), make_marks(run)
    )


def _make_term_curves(rows: list[MetricsRow]) -> list[TrainingCurve]:
    """Return a curve per reward term; none if the environment's return is the only term."""
    terms = dict.fromkeys(
        name for row in rows for name in row.values if name.startswith(REWARD_TERM_PREFIX)
    )
    if list(terms) == [f"{REWARD_TERM_PREFIX}environment"]:
        return []
    return [
        TrainingCurve(name, name.removeprefix(REWARD_TERM_PREFIX), "reward term, unweighted")
        for name in terms
    ]


def make_marks(run: RunFiles) -> list[Mark]:
    """Return a mark for each resume, and for each environment that the curriculum opened."""
    resumes = [
        Mark(float(num_games), f"the run was resumed after step {step:,}")
        for step, num_games in run.resumes
    ]
    unlocks = [
        Mark(float(num_games), f"after {num_games:,} episodes: the curriculum opens {environment}")
        for num_games, environment in run.unlocks
    ]
    return resumes + unlocks


def _make_small_charts(
    rows: list[MetricsRow], curves: Sequence[TrainingCurve], marks: list[Mark]
) -> list[SmallChart]:
    charts = []
    unit = "conversations" if curves is FINE_TUNING_CURVES else "episodes"
    for curve in curves:
        line = make_training_line(rows, curve)
        if line is not None:
            title = f"{curve.name} over {unit} trained"
            chart = LineChart(SMALL_FRAME, title, [line], marks=marks)
            latest = format_compact(line.points[-1].y)
            charts.append(SmallChart(curve.name, curve.unit, chart, latest))
    return charts


def make_training_line(rows: list[MetricsRow], curve: TrainingCurve) -> Line | None:
    """Return the moving means and the values of a training metric; None if it is not measured."""
    required_metric = curve.required_metric
    if required_metric and not any(row.values.get(required_metric) for row in rows):
        return None
    values = [(row, curve.combine_steps([row.values])) for row in rows]
    measurements = [(row, value) for row, value in values if value is not None]
    if not measurements:
        return None
    means = _compute_moving_means(curve, [row for row, _ in measurements])
    return Line(
        [Point(row.num_games_trained, mean) for row, mean in means],
        [Point(row.num_games_trained, value) for row, value in measurements],
    )


def _compute_moving_means(
    curve: TrainingCurve, rows: list[MetricsRow]
) -> list[tuple[MetricsRow, float]]:
    """Return each row with the mean over the last `MEAN_WINDOW` rows that end with it."""
    means = []
    for end, row in enumerate(rows, start=1):
        window = rows[max(0, end - MEAN_WINDOW) : end]
        mean = curve.combine_steps([window_row.values for window_row in window])
        if mean is not None:
            means.append((row, mean))
    return means


def make_levels(run: RunFiles, environment: str, measure: Measure) -> list[Level]:
    """Return a level per baseline, from the summary or, during the run, from the metrics."""
    config = run.find_environment_config(environment)
    goal_policy = config.optimal_policy if config else None
    if run.summary is not None:
        results = run.summary.results[environment].report.baselines
        readings = {name: measure.read_result(result) for name, result in results.items()}
    else:
        baseline_rows = run.select_rows("baseline", environment)
        readings = {row.policy or "": measure.read_row(row) for row in baseline_rows}
    return [
        Level(format_policy_name(name), value, is_goal=name == goal_policy)
        for name, (value, _) in readings.items()
        if value is not None
    ]


def make_eval_points(run: RunFiles, environment: str, measure: Measure) -> list[Point]:
    """Return a point per evaluation; the final result in the summary replaces the last point."""
    summary, rows = run.summary, run.select_rows("eval", environment)
    readings = {row.num_games_trained: measure.read_row(row) for row in rows}
    if summary is not None:
        policy = summary.results[environment].report.policy
        readings[summary.games_trained] = measure.read_result(policy)
    points = []
    for num_games, (value, interval) in sorted(readings.items()):
        if value is not None:
            interval_text = f" ({measure.format_interval(interval)})" if interval else ""
            tooltip = f"after {num_games:,} episodes: {measure.format(value)}{interval_text}"
            points.append(Point(float(num_games), value, interval, tooltip))
    return points
