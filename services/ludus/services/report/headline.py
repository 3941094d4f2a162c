"""The top of the report: what the run was, what is missing, and the numbers that matter."""

from __future__ import annotations

from ludus.proto.config import RunConfig
from ludus.proto.metrics import EvalMetric
from ludus.proto.runs import MetricsRow, Summary
from ludus.services.numbers import duration, fixed, fixed_interval, percent, percent_interval
from ludus.services.report.markup import Markup, element
from ludus.services.report.run_files import RunFiles
from ludus.services.results import readable


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
    if run.summary is not None:
        tiles = _summary_tiles(run, run.summary)
    elif run.eval_rows:
        tiles = _latest_tiles(run.eval_rows[-1])
    else:
        return None
    return element("dl", *tiles, class_="tiles")


def _lead(run: RunFiles) -> str:
    config = run.config
    if config is None:
        return run.summary.environment if run.summary is not None else str(run.run_dir)
    # What really ran: the generator falls back where vLLM is not installed.
    generator = run.summary.generator if run.summary is not None else config.generator.kind
    return (
        f"{_environment_of(config)} · {config.training.num_steps} steps · "
        f"{generator} generator · seed {config.seed}"
    )


def _environment_of(config: RunConfig) -> str:
    environment = config.environment
    if environment.kind == "remote":
        return environment.address
    options = ", ".join(f"{name} = {value}" for name, value in environment.options.items())
    return f"{environment.package} ({options})" if options else environment.package


def _progress(run: RunFiles) -> str:
    wanted = run.config.training.num_steps if run.config is not None else None
    of_all = f" of {wanted}" if wanted is not None else ""
    return f"step {run.num_steps_done}{of_all}"


def _summary_tiles(run: RunFiles, summary: Summary) -> list[Markup]:
    start = summary.start
    before = [f"{percent(start.win_rate)} before training"] if start else []
    return_before = [f"{fixed(start.expected_return, 3)} before training"] if start else []
    tiles = [
        _tile(
            "Win rate",
            percent(summary.win_rate),
            [f"{percent_interval(summary.win_rate_ci95)} (95%)", *before],
            main=True,
        ),
        _tile(
            "Expected return",
            fixed(summary.expected_return, 3),
            [f"{fixed_interval(summary.expected_return_ci95)} (95%)", *return_before],
        ),
    ]
    if summary.gap_closed is not None:
        tiles.append(_gap_tile(run, summary, summary.gap_closed))
    tiles.append(
        _tile(
            "Games trained",
            f"{summary.games_trained:,}",
            [f"{summary.games_played:,} played", f"{summary.episodes_lost:,} lost"],
        )
    )
    tiles.append(
        _tile(
            "Training time",
            duration(summary.wall_seconds_training),
            [
                f"{duration(summary.wall_seconds_total)} in all",
                _workers(summary),
            ],
        )
    )
    return tiles


def _gap_tile(run: RunFiles, summary: Summary, gap: float) -> Markup:
    interval = summary.gap_closed_ci95
    notes = [f"{percent_interval(interval)} (95%)"] if interval else []
    low = run.config.environment.random_policy if run.config is not None else None
    return _tile(
        "Gap closed",
        percent(gap),
        [*notes, f"from {readable(low or 'random')} to {run.reference_name}"],
    )


def _latest_tiles(row: MetricsRow) -> list[Markup]:
    values = row.values
    tiles = []
    if EvalMetric.WIN_RATE in values:
        note = f"at step {row.step}, the latest evaluation"
        tiles.append(_tile("Win rate", percent(values[EvalMetric.WIN_RATE]), [note], main=True))
    if EvalMetric.RETURN_MEAN in values:
        tiles.append(_tile("Expected return", fixed(values[EvalMetric.RETURN_MEAN], 3), []))
    tiles.append(_tile("Games trained", f"{row.num_games_trained:,}", []))
    tiles.append(_tile("Training time", duration(row.elapsed_s), []))
    return tiles


def _tile(title: str, figure: str, notes: list[str], *, main: bool = False) -> Markup:
    return element(
        "div",
        element("dt", title),
        element("dd", figure, class_="figure"),
        *(element("dd", note, class_="note") for note in notes),
        class_="tile main" if main else "tile",
    )


def _workers(summary: Summary) -> str:
    workers, ranks = summary.num_rollout_workers, summary.num_learner_ranks
    return f"{workers} rollout worker{'s'[: workers > 1]}, {ranks} learner rank{'s'[: ranks > 1]}"
