"""The top of the report: description of the run, notices, and key figures."""

from __future__ import annotations

from ludus.proto.config import (
    EnvironmentConfig,
    NetworkEnvironmentConfig,
    NetworkRun,
    RunConfig,
)
from ludus.proto.metrics import EvalMetric
from ludus.proto.runs import NETWORK, EnvironmentResult, EvalReport, MetricsRow, Summary
from ludus.services.numbers import (
    format_duration,
    format_fixed,
    format_fixed_interval,
    format_percent,
    format_percent_interval,
)
from ludus.services.report.markup import Markup, element, join
from ludus.services.report.run_files import RunFiles
from ludus.services.results import readable_policy_name


def render_header(run: RunFiles) -> Markup:
    """Render the name and a one-line description of the run."""
    return element(
        "header",
        element("p", "Ludus run report", class_="kicker"),
        element("h1", run.name),
        element("p", _lead(run), class_="lead"),
    )


def render_notices(run: RunFiles) -> Markup | None:
    """Render notices about missing files or an unfinished run; None if there are none."""
    texts = list(run.notices)
    if run.summary is not None and not run.summary.finished:
        texts.insert(0, f"The run was stopped before its last step: {_progress(run)}.")
    elif run.summary is None:
        texts.insert(0, f"The run is not finished: {_progress(run)}.")
    if not run.metrics:
        texts.append("No metrics were recorded, so there are no curves.")
    if not texts:
        return None
    return element("ul", *(element("li", text) for text in texts), class_="notices", role="status")


def render_key_figures(run: RunFiles) -> Markup | None:
    """Render the key figures as tiles; None before the first evaluation."""
    parts = [part for name in run.environments for part in _environment_tiles(run, name)]
    if not parts:
        return None
    if len(run.environments) == 1:
        return element("dl", join(*parts), *_run_tiles(run), class_="tiles")
    return join(*parts, element("dl", *_run_tiles(run), class_="tiles"))


def _environment_tiles(run: RunFiles, name: str) -> list[Markup]:
    """Render the tiles of one environment, with its name if there are several."""
    rows = run.eval_rows(name)
    if run.summary is not None:
        tiles = _result_tiles(run, name, run.summary.results[name])
    elif rows:
        tiles = _latest_tiles(rows[-1])
    else:
        return []
    if len(run.environments) == 1:
        return tiles
    return [element("h2", name, class_="group"), element("dl", *tiles, class_="tiles")]


def _lead(run: RunFiles) -> str:
    config = run.config
    if config is None:
        return run.summary.environment if run.summary is not None else str(run.run_dir)
    if isinstance(config, NetworkRun):
        return (
            f"{_describe_environments(config)} · network, classic PPO · at most "
            f"{config.training.num_steps} steps · {config.ppo.num_environments} parallel "
            f"environments · seed {config.seed}"
        )
    # The summary has the engine that ran: transformers replaces vLLM if it is not installed.
    generator = run.summary.generator if run.summary is not None else config.generator.kind
    return (
        f"{_describe_environments(config)} · {config.training.num_steps} steps · "
        f"{generator} engine · seed {config.seed}"
    )


def _describe_environments(config: RunConfig) -> str:
    return " and ".join(map(_describe_environment, config.environments.values()))


def _describe_environment(environment: EnvironmentConfig | NetworkEnvironmentConfig) -> str:
    if environment.kind == "remote":
        return environment.address
    options = ", ".join(f"{name} = {value}" for name, value in environment.options.items())
    return f"{environment.package} ({options})" if options else environment.package


def _progress(run: RunFiles) -> str:
    if run.config is None:
        return f"step {run.num_steps_done}"
    return f"step {run.num_steps_done} of {run.config.training.num_steps}"


def _result_tiles(run: RunFiles, environment: str, result: EnvironmentResult) -> list[Markup]:
    start, policy = result.start, result.report.policy
    initial_wins = [f"{format_percent(start.win_rate)} before training"] if start else []
    initial_return = [f"{format_fixed(start.expected_return, 3)} before training"] if start else []
    has_wins = policy.win_rate is not None
    tiles = []
    if has_wins:
        interval = f"{format_percent_interval(policy.win_rate_ci95)} (95%)"
        tiles.append(
            _tile("Win rate", format_percent(policy.win_rate), [interval, *initial_wins], main=True)
        )
    tiles.append(
        _tile(
            "Expected return",
            format_fixed(policy.expected_return, 3),
            [f"{format_fixed_interval(policy.expected_return_ci95)} (95%)", *initial_return],
            main=not has_wins,
        )
    )
    if result.report.gap_closed is not None:
        tiles.append(_gap_tile(run, environment, result.report, result.report.gap_closed))
    return tiles


def _gap_tile(run: RunFiles, environment: str, report: EvalReport, gap: float) -> Markup:
    interval = report.gap_closed_ci95
    notes = [f"{format_percent_interval(interval)} (95%)"] if interval else []
    config = run.environment_config(environment)
    low = config.random_policy if config is not None else None
    return _tile(
        "Gap closed",
        format_percent(gap),
        [
            *notes,
            f"from {readable_policy_name(low or 'random')} to {run.reference_name(environment)}",
        ],
    )


def _latest_tiles(row: MetricsRow) -> list[Markup]:
    values = row.values
    note = f"at step {row.step}, the latest evaluation"
    tiles = []
    if EvalMetric.WIN_RATE in values:
        tiles.append(
            _tile("Win rate", format_percent(values[EvalMetric.WIN_RATE]), [note], main=True)
        )
    if EvalMetric.RETURN_MEAN in values:
        mean, is_first = format_fixed(values[EvalMetric.RETURN_MEAN], 3), not tiles
        tiles.append(_tile("Expected return", mean, [note] * is_first, main=is_first))
    if EvalMetric.GAP_CLOSED in values:
        tiles.append(_tile("Gap closed", format_percent(values[EvalMetric.GAP_CLOSED]), []))
    return tiles


def _run_tiles(run: RunFiles) -> list[Markup]:
    """Render the tiles of the whole run."""
    summary = run.summary
    if summary is None:
        last = run.metrics[-1]
        num_games = max(row.num_games_trained for row in run.metrics)
        return [
            _tile("Episodes trained", f"{num_games:,}", []),
            _tile("Training time", format_duration(last.elapsed_s), []),
        ]
    total_time = f"{format_duration(summary.wall_seconds_total)} in total"
    return [
        _tile(
            "Episodes trained",
            f"{summary.games_trained:,}",
            [f"{summary.games_played:,} played", _describe_void(summary)],
        ),
        _tile(
            "Training time",
            format_duration(summary.wall_seconds_training),
            [total_time, _describe_processes(summary)],
        ),
    ]


def _tile(title: str, figure: str, notes: list[str], *, main: bool = False) -> Markup:
    return element(
        "div",
        element("dt", title),
        element("dd", figure, class_="figure"),
        *(element("dd", note, class_="note") for note in notes),
        class_="tile main" if main else "tile",
    )


def _describe_void(summary: Summary) -> str:
    text = f"{summary.episodes_lost:,} lost"
    return f"{text}, {summary.episodes_failed:,} failed" if summary.episodes_failed else text


def _describe_processes(summary: Summary) -> str:
    if summary.generator == NETWORK:
        return "in one process"
    workers, ranks = summary.num_rollout_workers, summary.num_learner_ranks
    return f"{workers} rollout worker{'s'[: workers > 1]}, {ranks} learner rank{'s'[: ranks > 1]}"
