"""The page that compares several runs: results, curves over one another, configurations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ludus.proto.config import SftRun
from ludus.proto.errors import ConfigError
from ludus.proto.wording import Wording, choose_wording
from ludus.services.display import describe_environment
from ludus.services.numbers import NO_VALUE, format_compact, format_duration, format_fixed
from ludus.services.report import curves, fine_tuning
from ludus.services.report.configuration import remove_credentials
from ludus.services.report.curves import Measure, TrainingCurve
from ludus.services.report.files import render_template, write_atomically
from ludus.services.report.headline import list_notices
from ludus.services.report.line_chart import Level, Line, LineChart, Mark, Point
from ludus.services.report.run_files import RunFiles, load_run_files

MAX_NUM_RUNS = 8
"""Number of colors that a reader can tell apart."""
COMPARISON_FILE = "comparison.html"
_IGNORED_FIELDS = ("name", "output_dir")
_NUM_LABEL_CHARS = 6
"""Number of characters at each end of a long name that a chart's label shows."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run with its name and its color on the page."""

    name: str
    css_class: str
    files: RunFiles

    def name_line(self, line: Line) -> Line:
        """Return a line with the name, shortened for charts, and the color of the run."""
        is_long = len(self.name) > 2 * _NUM_LABEL_CHARS + 1
        # Names of one experiment often differ only at their ends.
        ends = self.name[:_NUM_LABEL_CHARS], self.name[-_NUM_LABEL_CHARS:]
        label = "…".join(ends) if is_long else self.name
        return replace(line, name=label, css_class=self.css_class)


@dataclass(frozen=True, slots=True)
class ResultRow:
    """Latest results of a run in one environment, as text."""

    run: ComparedRun
    environment: str
    cells: Sequence[str]


@dataclass(frozen=True, slots=True)
class Difference:
    """A field whose values differ, with its value in each run as text."""

    field: str
    values: Sequence[str]


def write_comparison(run_dirs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page to `output`, by default into the working directory; return its path.

    Raises:
        NotFoundError: a folder contains no run.
        ConfigError: there are too many runs, or the runs are not of one kind, or the file cannot be
            written.
    """
    if len(run_dirs) > MAX_NUM_RUNS:
        raise ConfigError(
            f"a comparison has at most {MAX_NUM_RUNS} runs, got {len(run_dirs)}; leave out some"
        )
    runs = _name_runs([load_run_files(run_dir) for run_dir in run_dirs])
    fine_tuning_runs = [run.name for run in runs if isinstance(run.files.config, SftRun)]
    if 0 < len(fine_tuning_runs) < len(runs):
        raise ConfigError(
            f"{', '.join(fine_tuning_runs)} fine-tuned a model and the other runs trained a policy;"
            " compare runs of one kind"
        )
    is_fine_tuning = bool(fine_tuning_runs)
    unit = "conversations" if is_fine_tuning else "episodes"
    page = render_template(
        "comparison.html",
        runs=runs,
        unit=unit,
        notices=[f"{run.name}: {notice}" for run in runs for notice in list_notices(run.files)],
        environments=[] if is_fine_tuning else _list_environments(runs),
        result_titles=_list_result_titles(runs, is_fine_tuning),
        result_rows=list(_list_result_rows(runs, is_fine_tuning)),
        learning_charts=(
            _make_validation_charts(runs) if is_fine_tuning else _make_learning_charts(runs)
        ),
        training_charts=list(_make_mean_charts(runs, is_fine_tuning, unit)),
        differences=list(_list_differences(runs)),
        num_configs=sum(run.files.config is not None for run in runs),
        mean_window=curves.MEAN_WINDOW,
    )
    return write_atomically(output or Path(COMPARISON_FILE), page)


def _name_runs(all_files: Sequence[RunFiles]) -> list[ComparedRun]:
    """Return the runs, named by their folders; by the paths if several folders have one name."""
    names = [files.run_dir.resolve().name for files in all_files]
    if len(set(names)) < len(names):
        names = [str(files.run_dir) for files in all_files]
    return [
        ComparedRun(name, f"run-{index}", files)
        for index, (name, files) in enumerate(zip(names, all_files, strict=True))
    ]


def _list_environments(runs: Sequence[ComparedRun]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.files.environments))


def _choose_wording(runs: Sequence[ComparedRun], environments: Sequence[str]) -> Wording:
    """Return the words for the outcomes of the runs in some environments."""
    return choose_wording(
        *(
            run.files.is_game(name)
            for run in runs
            for name in environments
            if name in run.files.environments
        )
    )


def _list_result_titles(runs: Sequence[ComparedRun], is_fine_tuning: bool) -> list[str]:
    success = _choose_wording(runs, _list_environments(runs)).success.capitalize()
    results = ["Validation loss"] if is_fine_tuning else [success, "95% interval", "Return"]
    last_interval = [] if is_fine_tuning else ["95% interval"]
    unit = "Conversations" if is_fine_tuning else "Episodes"
    return [*results, *last_interval, "Steps", unit, "Training time"]


def _list_result_rows(runs: Sequence[ComparedRun], is_fine_tuning: bool) -> Iterator[ResultRow]:
    for run in runs:
        files = run.files
        progress = (
            f"{files.num_steps_done:,}",
            f"{max((row.num_games_trained for row in files.metrics), default=0):,}",
            format_duration(max((row.elapsed_s for row in files.metrics), default=0.0)),
        )
        if is_fine_tuning:
            yield ResultRow(run, "", (_format_loss(files), *progress))
            continue
        if not files.environments:
            yield ResultRow(run, "", (NO_VALUE, "", NO_VALUE, "", *progress))
        for environment in files.environments:
            cells = [
                cell
                for measure in curves.MEASURES
                for cell in _format_latest_result(files, environment, measure)
            ]
            yield ResultRow(run, environment, (*cells, *progress))


def _format_loss(files: RunFiles) -> str:
    """Return the validation loss of the kept model, or the latest during the run."""
    if files.sft_summary is not None and files.sft_summary.kept_loss is not None:
        return format_fixed(files.sft_summary.kept_loss, 4)
    points = fine_tuning.make_validation_points(files)
    return format_fixed(points[-1].y, 4) if points else NO_VALUE


def _format_latest_result(files: RunFiles, environment: str, measure: Measure) -> tuple[str, str]:
    points = curves.make_eval_points(files, environment, measure)
    if not points:
        return NO_VALUE, ""
    interval = points[-1].interval
    return measure.format(points[-1].y), measure.format_interval(interval) if interval else ""


def _make_validation_charts(runs: Sequence[ComparedRun]) -> dict[str, dict[str, LineChart]]:
    points = [fine_tuning.make_validation_points(run.files) for run in runs]
    lines = _name_lines(runs, points)
    return {"": {"Validation loss": fine_tuning.make_validation_chart(lines)}} if lines else {}


def _make_learning_charts(runs: Sequence[ComparedRun]) -> dict[str, dict[str, LineChart]]:
    """Return the learning curves by environment and measure."""
    charts: dict[str, dict[str, LineChart]] = {}
    for environment in _list_environments(runs):
        members = [run for run in runs if environment in run.files.environments]
        for measure in curves.name_measures(_choose_wording(members, [environment])):
            points = [curves.make_eval_points(run.files, environment, measure) for run in members]
            lines = _name_lines(members, points)
            if lines:
                levels = _make_shared_levels(members, environment, measure)
                chart = curves.make_measure_chart(measure, curves.CURVE_FRAME, lines, levels)
                charts.setdefault(environment, {})[measure.name] = chart
    return charts


def _make_shared_levels(
    runs: Sequence[ComparedRun], environment: str, measure: Measure
) -> Sequence[Level]:
    """Return the levels of the fixed policies; none if the runs differ in the environment."""
    configs = [run.files.find_environment_config(environment) for run in runs]
    descriptions = {describe_environment(config) for config in configs if config is not None}
    if len(descriptions) > 1:
        return ()
    all_levels = (curves.make_levels(run.files, environment, measure) for run in runs)
    return next((levels for levels in all_levels if levels), ())


def _name_lines(runs: Sequence[ComparedRun], points: Sequence[Sequence[Point]]) -> list[Line]:
    pairs = zip(runs, points, strict=True)
    return [run.name_line(Line(run_points)) for run, run_points in pairs if run_points]


def _make_mean_charts(
    runs: Sequence[ComparedRun], is_fine_tuning: bool, unit: str
) -> Iterator[curves.SmallChart]:
    curve_types = curves.FINE_TUNING_CURVES if is_fine_tuning else curves.TRAINING_CURVES
    for curve in curve_types:
        run_lines = [
            (run, line) for run in runs if (line := _make_mean_line(run, curve)) is not None
        ]
        if not run_lines:
            continue
        marks = [
            Mark(float(num_games), f"{run.name} was resumed after step {step:,}")
            for run, _ in run_lines
            for step, num_games in run.files.resumes
        ]
        title = f"{curve.name} over {unit} trained"
        chart = LineChart(curves.SMALL_FRAME, title, [line for _, line in run_lines], marks=marks)
        legend = [
            curves.LegendEntry(run.name, run.css_class, format_compact(line.points[-1].y))
            for run, line in run_lines
        ]
        yield curves.SmallChart(curve.name, curve.unit, chart, legend=legend)


def _make_mean_line(run: ComparedRun, curve: TrainingCurve) -> Line | None:
    """Return the moving means of a metric, without the values of single steps."""
    line = curves.make_training_line(run.files.select_rows("train"), curve)
    return None if line is None else replace(line, raw_points=(), css_class=run.css_class)


def _list_differences(runs: Sequence[ComparedRun]) -> Iterator[Difference]:
    """Yield the fields that are not equal in all runs with a configuration."""
    all_fields = [_list_fields(run) for run in runs]
    for field in dict.fromkeys(field for fields in all_fields for field in fields):
        known_values = {fields.get(field, NO_VALUE) for fields in all_fields if fields}
        if field not in _IGNORED_FIELDS and len(known_values) > 1:
            yield Difference(field, [fields.get(field, NO_VALUE) for fields in all_fields])


def _list_fields(run: ComparedRun) -> dict[str, str]:
    """Return each field of a run's configuration with its value as text; {} if it is unknown."""
    config = run.files.config
    if config is None:
        return {}
    return dict(_flatten("", remove_credentials(config).model_dump(mode="json")))


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, member in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else key, member)
    else:
        yield prefix, _format_value(value)


def _format_value(value: Any) -> str:
    """Return a value as text. A text that looks like a number or a list is quoted."""
    json_text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        return json_text
    try:
        json.loads(value)
    except ValueError:
        return value
    return json_text
