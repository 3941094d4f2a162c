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
from ludus.services.report.drawing import Drawing
from ludus.services.report.line_chart import Frame, Level, LineChart, Mark, Point, draw
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


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity of an evaluation: its metrics, and its text format."""

    name: str
    value: EvalMetric
    low: EvalMetric
    high: EvalMetric
    read_result: Callable[[PolicyResult], tuple[float | None, tuple[float, float] | None]]
    """Returns the value and its interval; None if the environment does not report them."""
    format: Callable[[float], str]
    format_tick: Callable[[float], str]
    format_interval: Callable[[tuple[float, float]], str]


WIN_RATE = Measure(
    name="Win rate",
    value=EvalMetric.WIN_RATE,
    low=EvalMetric.WIN_RATE_CI95_LOW,
    high=EvalMetric.WIN_RATE_CI95_HIGH,
    read_result=lambda result: (result.win_rate, result.win_rate_ci95),
    format=format_percent,
    format_tick=lambda share: format_percent(share, 0),
    format_interval=format_percent_interval,
)
EXPECTED_RETURN = Measure(
    name="Expected return",
    value=EvalMetric.RETURN_MEAN,
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
    title: str
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


def _share(metric: TrainMetric, title: str) -> _TrainingCurve:
    return _TrainingCurve(metric, title, "share of episodes", TrainMetric.NUM_EPISODES)


TRAINING_CURVES = (
    _TrainingCurve(TrainMetric.REWARD_MEAN, "Reward", "mean per episode"),
    _TrainingCurve(TrainMetric.ENTROPY, "Entropy", "nats per token"),
    _TrainingCurve(TrainMetric.STALENESS_MEAN, "Staleness", "weight versions behind"),
    _TrainingCurve(TrainMetric.MISMATCH_KL, "Mismatch KL", "sampler to learner, nats"),
    _TrainingCurve(TrainMetric.TOKENS_PER_SECOND, "Generation", "tokens per second"),
    _TrainingCurve(TrainMetric.GRAD_NORM, "Gradient norm", "before clipping"),
    _TrainingCurve(
        TrainMetric.ZERO_VARIANCE_GROUP_RATIO, "Zero-variance groups", "share of groups"
    ),
    _TrainingCurve(TrainMetric.EXPLAINED_VARIANCE, "Value head", "variance explained"),
    _TrainingCurve(TrainMetric.MFU, "MFU", "share of the device's peak"),
)
SHARED_CURVES = (
    _TrainingCurve(TrainMetric.REWARD_MEAN, "Reward", "mean per episode"),
    _TrainingCurve(TrainMetric.WIN_RATE, "Wins", "share of episodes"),
    _TrainingCurve(
        TrainMetric.ZERO_VARIANCE_GROUP_RATIO, "Zero-variance groups", "share of groups"
    ),
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

    title: str
    unit: str
    latest: str
    drawing: Drawing


def learning_curve(
    run: RunFiles, environment: str, measure: Measure, frame: Frame = CURVE_FRAME
) -> Drawing | None:
    """Draw an evaluation measure with its 95 % band and the baselines; None without data."""
    points = _eval_points(run, environment, measure)
    if not points:
        return None
    chart = LineChart(
        label=f"{measure.name} over episodes trained",
        points=points,
        levels=_levels(run, environment, measure),
        marks=_marks(run),
        format_y=measure.format,
        format_tick=measure.format_tick,
        final_label="this policy",
        x_title="episodes trained",
        x_high=float(max(row.num_games_trained for row in run.metrics)) if run.metrics else None,
    )
    return draw(chart, frame)


def training_curves(run: RunFiles) -> list[SmallChart]:
    """Draw a chart of each training metric that the run recorded."""
    return _small_charts(run.train_rows, TRAINING_CURVES, _marks(run))


def environment_curves(run: RunFiles, environment: str) -> list[SmallChart]:
    """Draw a chart of each training metric of one environment."""
    rows = run.environment_rows(environment)
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
                label=f"{curve.title} over episodes trained",
                points=[Point(row.num_games_trained, mean) for row, mean in means],
                raw=[Point(row.num_games_trained, value) for row, value in measured],
                marks=marks,
            )
            latest = format_compact(means[-1][1])
            charts.append(SmallChart(curve.title, curve.unit, latest, draw(chart, SMALL_FRAME)))
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
        all_values = {name: measure.read_result(result)[0] for name, result in results.items()}
        values = {name: value for name, value in all_values.items() if value is not None}
    else:
        rows = run.baseline_rows(environment)
        values = {
            name: row.values[measure.value]
            for name, row in rows.items()
            if measure.value in row.values
        }
    return [
        Level(readable_policy_name(name), value, is_goal=name == goal)
        for name, value in values.items()
    ]


def _eval_points(run: RunFiles, environment: str, measure: Measure) -> list[Point]:
    """Return a point per evaluation; the summary, on more episodes, replaces the last point."""
    summary = run.summary
    points = [
        _row_point(row, measure)
        for row in run.eval_rows(environment)
        if measure.value in row.values
        and (summary is None or row.num_games_trained != summary.games_trained)
    ]
    if summary is not None:
        policy = summary.results[environment].report.policy
        value, interval = measure.read_result(policy)
        if value is not None:
            points.append(_point(summary.games_trained, value, interval, measure))
    return sorted(points, key=lambda point: point.x)


def _row_point(row: MetricsRow, measure: Measure) -> Point:
    values = row.values
    interval = None
    if measure.low in values and measure.high in values:
        interval = (values[measure.low], values[measure.high])
    return _point(row.num_games_trained, values[measure.value], interval, measure)


def _point(
    num_games: int, value: float, interval: tuple[float, float] | None, measure: Measure
) -> Point:
    spread = f" ({measure.format_interval(interval)})" if interval else ""
    hover = f"after {num_games:,} episodes: {measure.format(value)}{spread}"
    return Point(float(num_games), value, interval, hover)
