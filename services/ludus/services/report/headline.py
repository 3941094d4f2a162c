"""The top of the report: what the run was, what is missing, and the numbers that matter."""

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


def header(run: RunFiles) -> Markup:
    """Name of the run and what it was."""
    return element(
        "header",
        element("p", "Ludus run report", class_="kicker"),
        element("h1", run.name),
        element("p", _lead(run), class_="lead"),
    )


def notices(run: RunFiles) -> Markup | None:
    """What is missing or unfinished; None when all is there."""
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


def headline(run: RunFiles) -> Markup | None:
    """The numbers that matter, large; None before the first evaluation."""
    parts = [part for name in run.environments for part in _of_environment(run, name)]
    if not parts:
        return None
    if len(run.environments) == 1:
        return element("dl", join(*parts), *_of_run(run), class_="tiles")
    return join(*parts, element("dl", *_of_run(run), class_="tiles"))


def _of_environment(run: RunFiles, name: str) -> list[Markup]:
    """The tiles of one environment; with several, under its name."""
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
        num = config.ppo.num_environments
        return (
            f"{_environments_of(config)} · a network, by classic PPO · {config.training.num_steps} "
            f"steps at most · {num} environments side by side · seed {config.seed}"
        )
    # What really ran: the generator falls back where vLLM is not installed.
    generator = run.summary.generator if run.summary is not None else config.generator.kind
    return (
        f"{_environments_of(config)} · {config.training.num_steps} steps · "
        f"{generator} generator · seed {config.seed}"
    )


def _environments_of(config: RunConfig) -> str:
    return " and ".join(_described(one) for one in config.environments.values())


def _described(environment: EnvironmentConfig | NetworkEnvironmentConfig) -> str:
    if environment.kind == "remote":
        return environment.address
    options = ", ".join(f"{name} = {value}" for name, value in environment.options.items())
    return f"{environment.package} ({options})" if options else environment.package


def _progress(run: RunFiles) -> str:
    wanted = run.config.training.num_steps if run.config is not None else None
    of_all = f" of {wanted}" if wanted is not None else ""
    return f"step {run.num_steps_done}{of_all}"


def _result_tiles(run: RunFiles, environment: str, result: EnvironmentResult) -> list[Markup]:
    start, policy = result.start, result.report.policy
    before = [f"{format_percent(start.win_rate)} before training"] if start else []
    return_before = [f"{format_fixed(start.expected_return, 3)} before training"] if start else []
    has_wins = policy.win_rate is not None
    tiles = []
    if has_wins:
        interval = f"{format_percent_interval(policy.win_rate_ci95)} (95%)"
        tiles.append(
            _tile("Win rate", format_percent(policy.win_rate), [interval, *before], main=True)
        )
    tiles.append(
        _tile(
            "Expected return",
            format_fixed(policy.expected_return, 3),
            [f"{format_fixed_interval(policy.expected_return_ci95)} (95%)", *return_before],
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


def _of_run(run: RunFiles) -> list[Markup]:
    """The tiles of the whole run."""
    summary = run.summary
    if summary is None:
        last = run.metrics[-1]
        num_games = max(row.num_games_trained for row in run.metrics)
        return [
            _tile("Games trained", f"{num_games:,}", []),
            _tile("Training time", format_duration(last.elapsed_s), []),
        ]
    in_all = f"{format_duration(summary.wall_seconds_total)} in all"
    return [
        _tile(
            "Games trained",
            f"{summary.games_trained:,}",
            [f"{summary.games_played:,} played", _void(summary)],
        ),
        _tile(
            "Training time",
            format_duration(summary.wall_seconds_training),
            [in_all, _workers(summary)],
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


def _void(summary: Summary) -> str:
    lost = f"{summary.episodes_lost:,} lost"
    return f"{lost}, {summary.episodes_failed:,} failed" if summary.episodes_failed else lost


def _workers(summary: Summary) -> str:
    if summary.generator == NETWORK:
        return "in one process"
    workers, ranks = summary.num_rollout_workers, summary.num_learner_ranks
    return f"{workers} rollout worker{'s'[: workers > 1]}, {ranks} learner rank{'s'[: ranks > 1]}"
