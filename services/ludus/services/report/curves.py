"""Charts of a run: learning curves, and training metrics over the number of episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ludus.proto.metrics import REWARD_TERM_PREFIX, EvalMetric, TrainMetric, combine_metric
from ludus.proto.runs import MetricsRow, PolicyResult
from ludus.services.numbers import (
    format_compact,
    format_fixed,
    format_fixed_interval,
    format_percent,
    format_percent_interval,
)
from ludus.services.report.line_chart import Frame, Level, LineChart, Mark, Point
from ludus.services.report.run_files import RunFiles
from ludus.services.results import readable_policy_name

MEAN_WINDOW = 10
"""Number of training steps over which the small charts average."""

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
"""A value and its interval; None if the environment does not report them."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity of an evaluation: its metrics, and its text format."""

    name: str
    metric: EvalMetric
    low: EvalMetric
    high: EvalMetric
    read_result: Callable[[PolicyResult], Reading]
    format: Callable[[float], str]
    format_tick: Callable[[float], str]
    format_interval: Callable[[tuple[float, float]], str]

    def read_row(self, row: MetricsRow) -> Reading:
        """Return the value and its interval in a row of metrics."""
        low, high = row.values.get(self.low), row.values.get(self.high)
        interval = None if low is None or high is None else (low, high)
        return row.values.get(self.metric), interval


WIN_RATE = Measure(
    name="Win rate",
    metric=EvalMetric.WIN_RATE,
    low=EvalMetric.WIN_RATE_CI95_LOW,
    high=EvalMetric.WIN_RATE_CI95_HIGH,
    read_result=lambda result: (result.win_rate, result.win_rate_ci95),
    format=format_percent,
    format_tick=lambda share: format_percent(share, 0),
    format_interval=format_percent_interval,
)
EXPECTED_RETURN = Measure(
    name="Expected return",
    metric=EvalMetric.RETURN_MEAN,
    low=EvalMetric.RETURN_CI95_LOW,
    high=EvalMetric.RETURN_CI95_HIGH,
    read_result=lambda result: (result.expected_return, result.expected_return_ci95),
    format=lambda value: format_fixed(value, 3),
    format_tick=lambda value: format_fixed(value, 2),
    format_interval=format_fixed_interval,
)


@dataclass(frozen=True, slots=True)
class _TrainingCurve:
    metric: TrainMetric | str
    """Metric, or the name of a reward term."""
    name: str
    unit: str
    per: TrainMetric | None = None
    """Metric by which the value is divided."""
    needs: TrainMetric | None = None
    """Metric that is 0 in every step if the curve does not apply."""

    def value(self, steps: Sequence[Mapping[str, float]]) -> float | None:
        """Combine the metric values of several steps; None if there are none."""
        value = combine_metric(self.metric, steps)
        if value is None or self.per is None:
            return value
        divisor = combine_metric(self.per, steps)
        return value / divisor if divisor else None


def _share(metric: TrainMetric, name: str) -> _TrainingCurve:
    return _TrainingCurve(metric, name, "share of episodes", TrainMetric.NUM_EPISODES)


_REWARD = _TrainingCurve(TrainMetric.REWARD_MEAN, "Reward", "mean per episode")
_ZERO_VARIANCE = _TrainingCurve(
    TrainMetric.ZERO_VARIANCE_GROUP_RATIO, "Zero-variance groups", "share of groups"
)
TRAINING_CURVES = (
    _REWARD,
    _TrainingCurve(TrainMetric.ENTROPY, "Entropy", "nats per token"),
    _TrainingCurve(TrainMetric.STALENESS_MEAN, "Staleness", "weight versions behind"),
    _TrainingCurve(TrainMetric.MISMATCH_KL, "Mismatch KL", "sampler to learner, nats"),
    _TrainingCurve(TrainMetric.TOKENS_PER_SECOND, "Generation", "tokens per second"),
    _TrainingCurve(TrainMetric.GRAD_NORM, "Gradient norm", "before clipping"),
    _ZERO_VARIANCE,
    _TrainingCurve(TrainMetric.EXPLAINED_VARIANCE, "Value head", "variance explained"),
    _TrainingCurve(TrainMetric.MFU, "MFU", "share of the device's peak"),
)
SHARED_CURVES = (
    _REWARD,
    _TrainingCurve(TrainMetric.WIN_RATE, "Wins", "share of episodes"),
    _ZERO_VARIANCE,
)
"""Curves of the run that are repeated per environment if there are several environments."""
ENVIRONMENT_CURVES = (
    _share(TrainMetric.NUM_EPISODES_INVALID, "Invalid answers"),
    _share(TrainMetric.NUM_EPISODES_TRUNCATED, "Truncated"),
    _TrainingCurve(TrainMetric.NUM_TURNS_MEAN, "Turns", "mean per episode"),
    _TrainingCurve(
        TrainMetric.NUM_TOOL_CALLS,
        "Tool calls",
        "mean per episode",
        per=TrainMetric.NUM_EPISODES,
        needs=TrainMetric.NUM_TOOL_CALLS,
    ),
    _TrainingCurve(
        TrainMetric.NUM_TOOL_CALLS_FAILED,
        "Failed tool calls",
        "share of calls",
        per=TrainMetric.NUM_TOOL_CALLS,
    ),
)
"""Curves of every environment."""
_ENVIRONMENT_RETURN = REWARD_TERM_PREFIX + "environment"


@dataclass(frozen=True, slots=True)
class SmallChart:
    """A training metric over the number of episodes."""

    name: str
    unit: str
    latest: str
    """Latest mean."""
    chart: LineChart


def learning_curve(
    run: RunFiles, environment: str, measure: Measure, frame: Frame
) -> LineChart | None:
    """Return the curve of an evaluation measure with its baselines; None without data."""
    points = _eval_points(run, environment, measure)
    if not points:
        return None
    return LineChart(
        frame,
        f"{measure.name} over episodes trained",
        points,
        levels=_levels(run, environment, measure),
        marks=_marks(run),
        format_y=measure.format,
        format_y_tick=measure.format_tick,
        final_label="this policy",
        x_title="episodes trained",
        x_high=max((row.num_games_trained for row in run.metrics), default=0),
    )


def training_curves(run: RunFiles) -> list[SmallChart]:
    """Return a chart of each training metric that the run recorded."""
    return _small_charts(run.rows("train"), TRAINING_CURVES, _marks(run))


def environment_curves(run: RunFiles, environment: str) -> list[SmallChart]:
    """Return a chart of each training metric of one environment."""
    rows = run.rows("environment", environment)
    shared = SHARED_CURVES if len(run.environments) > 1 else ()
    return _small_charts(rows, (*shared, *ENVIRONMENT_CURVES, *_term_curves(rows)), _marks(run))


def _term_curves(rows: list[MetricsRow]) -> list[_TrainingCurve]:
    """Return a curve per reward term; none if the environment's return is the only term."""
    terms = dict.fromkeys(
        name for row in rows for name in row.values if name.startswith(REWARD_TERM_PREFIX)
    )
    if list(terms) == [_ENVIRONMENT_RETURN]:
        return []
    return [
        _TrainingCurve(name, name.removeprefix(REWARD_TERM_PREFIX), "reward term, unweighted")
        for name in terms
    ]


def _marks(run: RunFiles) -> list[Mark]:
    """Return a mark for each environment that the curriculum opened."""
    return [
        Mark(float(games), f"after {games:,} episodes: the curriculum opens {environment}")
        for games, environment in run.unlocks
    ]


def _small_charts(
    rows: list[MetricsRow], curves: Sequence[_TrainingCurve], marks: list[Mark]
) -> list[SmallChart]:
    charts = []
    for curve in curves:
        if curve.needs is not None and not any(row.values.get(curve.needs) for row in rows):
            continue
        measured = [
            (row, value) for row in rows if (value := curve.value([row.values])) is not None
        ]
        if measured:
            means = _moving_means(curve, [row for row, _ in measured])
            chart = LineChart(
                SMALL_FRAME,
                f"{curve.name} over episodes trained",
                points=[Point(row.num_games_trained, mean) for row, mean in means],
                raw_points=[Point(row.num_games_trained, value) for row, value in measured],
                marks=marks,
            )
            latest = format_compact(means[-1][1])
            charts.append(SmallChart(curve.name, curve.unit, latest, chart))
    return charts


def _moving_means(curve: _TrainingCurve, rows: list[MetricsRow]) -> list[tuple[MetricsRow, float]]:
    """Combine each row with the rows before it, up to `MEAN_WINDOW` rows."""
    windows = [
        (row, [past.values for past in rows[max(0, end - MEAN_WINDOW) : end]])
        for end, row in enumerate(rows, start=1)
    ]
    return [(row, mean) for row, window in windows if (mean := curve.value(window)) is not None]


def _levels(run: RunFiles, environment: str, measure: Measure) -> list[Level]:
    """Return the baselines from the summary, or from the latest evaluation."""
    config = run.environment_config(environment)
    goal = config.optimal_policy if config is not None else None
    if run.summary is not None:
        results = run.summary.results[environment].report.baselines
        readings = {name: measure.read_result(result) for name, result in results.items()}
    else:
        rows = run.rows("baseline", environment)
        readings = {row.policy or "": measure.read_row(row) for row in rows}
    return [
        Level(readable_policy_name(name), value, is_goal=name == goal)
        for name, (value, _) in readings.items()
        if value is not None
    ]


def _eval_points(run: RunFiles, environment: str, measure: Measure) -> list[Point]:
    """Return a point per evaluation; the summary, on more episodes, replaces the last point."""
    summary = run.summary
    readings = {
        row.num_games_trained: measure.read_row(row) for row in run.rows("eval", environment)
    }
    if summary is not None:
        policy = summary.results[environment].report.policy
        readings[summary.games_trained] = measure.read_result(policy)
    points = []
    for num_games, (value, interval) in sorted(readings.items()):
        if value is not None:
            spread = f" ({measure.format_interval(interval)})" if interval else ""
            hover = f"after {num_games:,} episodes: {measure.format(value)}{spread}"
            points.append(Point(float(num_games), value, interval, hover))
    return points
