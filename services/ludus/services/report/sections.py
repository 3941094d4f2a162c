"""The sections of the report, each a function from a run's files to markup."""

from __future__ import annotations

from ludus.proto.config import RunConfig
from ludus.proto.metrics import EvalMetric
from ludus.proto.runs import MetricsRow, PolicyChart, PolicyResult, Summary
from ludus.services.numbers import (
    compact,
    duration,
    fixed,
    fixed_interval,
    percent,
    percent_interval,
)
from ludus.services.report.curves import (
    EXPECTED_RETURN,
    MEAN_WINDOW,
    WIN_RATE,
    learning_curve,
    training_curves,
)
from ludus.services.report.drawing import Drawing, hover, line
from ludus.services.report.markup import Markup, element, join
from ludus.services.report.policy_grid import (
    Panel,
    draw_legend,
    draw_policy,
    draw_reference,
    num_agreeing,
    panels,
)
from ludus.services.report.run_files import RunFiles
from ludus.services.report.scales import Scale, padded_range
from ludus.services.results import NamedResult, compared_policies, readable

POLICY_COLUMNS = ("Policy", "Games", "Wins", "95% interval", "Draws", "Return", "95% interval", "")
NUMBER_COLUMNS = frozenset({"Games", "Wins", "Draws", "Return"})


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


def learning(run: RunFiles) -> Markup | None:
    """Win rate and return over games trained; None before the first evaluation."""
    figures = [
        element("figure", element("h3", measure.name), curve.inline())
        for measure in (WIN_RATE, EXPECTED_RETURN)
        if (curve := learning_curve(run, measure)) is not None
    ]
    if not figures:
        return None
    explanation = (
        "Evaluations on deals that training never sees. Bands are 95% intervals; dashed lines "
        "are fixed policies on the same deals."
    )
    return _section("Learning", explanation, element("div", *figures, class_="pair"))


def learned_policy(run: RunFiles) -> Markup | None:
    """The policy chart beside the best answers known; None where the run has none."""
    chart = run.chart
    if chart is None or not chart.cells:
        return None
    explanation = (
        "The likeliest answer in every situation, and how sure the policy is of it, beside "
        f"the {run.reference_name}. Outlined cells differ from it."
    )
    drawn = [_panel(chart, panel, run.reference_name) for panel in panels(chart)]
    content = element("div", *drawn, class_="grids")
    return _section("What it learned", explanation, content, _legend(chart, run.reference_name))


def policies(run: RunFiles) -> Markup | None:
    """The table of policies; None before the summary is there."""
    if run.summary is None:
        return None
    results = compared_policies(run.summary)
    ends = [end for named in results for end in named.result.expected_return_ci95]
    scale = Scale(*padded_range(ends), 4, 196)
    heads = [
        element("th", name, class_="number" if name in NUMBER_COLUMNS else None)
        for name in POLICY_COLUMNS
    ]
    table = element(
        "table",
        element("thead", element("tr", *heads)),
        element("tbody", *(_policy_row(named, scale) for named in results)),
    )
    explanation = (
        f"Judged at temperature {run.summary.eval_temperature:g}. Fixed policies play the same "
        "deals as the trained one."
    )
    return _section("Policies", explanation, element("div", table, class_="scroll"))


def training(run: RunFiles) -> Markup | None:
    """What training looked like inside, as small charts; None without training steps."""
    figures = [
        element(
            "figure",
            element(
                "figcaption",
                element("strong", title),
                element("span", unit, class_="unit"),
                element("span", latest, class_="latest"),
            ),
            drawing.inline(),
        )
        for title, unit, latest, drawing in training_curves(run)
    ]
    if not figures:
        return None
    explanation = (
        f"Over games trained: every step faintly, the mean of {MEAN_WINDOW} steps in full. "
        "The number on the right is the latest mean."
    )
    return _section("Training", explanation, element("div", *figures, class_="small"))


def details(run: RunFiles) -> Markup | None:
    """Counters, package versions and the resolved configuration."""
    parts = []
    if run.summary is not None:
        parts.append(_facts(_run_facts(run.summary)))
        parts.append(_disclosure("Package versions", _facts(sorted(run.summary.versions.items()))))
    if run.config is not None:
        config = element("pre", run.config.model_dump_json(indent=2))
        parts.append(_disclosure("Configuration, resolved", config))
    return _section("Run", None, *parts) if parts else None


def _lead(run: RunFiles) -> str:
    config = run.config
    if run.summary is not None:
        return (
            f"{run.summary.environment} · {run.summary.num_steps} steps · "
            f"{run.summary.generator} generator · seed {run.summary.seed}"
        )
    if config is None:
        return str(run.run_dir)
    return (
        f"{_environment_of(config)} · {config.training.num_steps} steps · "
        f"{config.generator.kind} generator · seed {config.seed}"
    )


def _environment_of(config: RunConfig) -> str:
    environment = config.environment
    return environment.package if environment.kind == "local" else environment.address


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
                f"{duration(summary.wall_seconds_total)} with start and evaluations",
                _workers(summary),
            ],
        )
    )
    return tiles


def _gap_tile(run: RunFiles, summary: Summary, gap: float) -> Markup:
    interval = summary.gap_closed_ci95
    notes = [f"{percent_interval(interval)} (95%)"] if interval else []
    low = run.config.eval.random_policy if run.config is not None else None
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


def _panel(chart: PolicyChart, panel: Panel, reference_name: str) -> Markup:
    return element(
        "div",
        element("h3", panel.name),
        element(
            "div",
            draw_policy(chart, panel, "this policy").inline(),
            draw_reference(chart, panel, reference_name).inline(),
            class_="twins",
        ),
        class_="panel",
    )


def _legend(chart: PolicyChart, reference_name: str) -> Markup:
    return element(
        "div",
        draw_legend(chart).inline(),
        element("strong", f"{num_agreeing(chart)} of {len(chart.cells)}"),
        f" situations are answered as the {reference_name} answers them.",
        class_="legend",
    )


def _policy_row(named: NamedResult, scale: Scale) -> Markup:
    result = named.result
    return element(
        "tr",
        element("td", named.name),
        element("td", f"{result.num_games:,}", class_="number"),
        element("td", percent(result.win_rate), class_="number"),
        element("td", percent_interval(result.win_rate_ci95), class_="interval"),
        element("td", percent(result.draw_rate), class_="number"),
        element("td", fixed(result.expected_return, 3), class_="number"),
        element("td", fixed_interval(result.expected_return_ci95), class_="interval"),
        element("td", _whisker(result, scale).inline(), class_="forest"),
        class_="trained" if named.is_trained else None,
    )


def _whisker(result: PolicyResult, scale: Scale) -> Drawing:
    """The return and its interval as a dot on a line."""
    label = f"{fixed(result.expected_return, 3)} ({fixed_interval(result.expected_return_ci95)})"
    low, high = result.expected_return_ci95
    body = hover(
        label,
        line(scale.start, 9, scale.end, 9, "grid"),
        line(scale(low), 9, scale(high), 9, "whisker"),
        element("circle", cx=scale(result.expected_return), cy=9, r=4, class_="mean"),
    )
    return Drawing(200, 18, body, f"Return {label}")


def _run_facts(summary: Summary) -> list[tuple[str, str]]:
    return [
        ("Generator", summary.generator),
        ("Rollout workers", str(summary.num_rollout_workers)),
        ("Learner ranks", str(summary.num_learner_ranks)),
        ("Weight syncs", f"{summary.weight_syncs:,}"),
        ("Canary failures", f"{summary.canary_failures:,}"),
        ("Largest canary error", f"{compact(summary.canary_max_error)} nats"),
        ("Largest staleness", f"{summary.max_staleness_seen} versions"),
        ("Environment restarts", f"{summary.environment_restarts:,}"),
        ("Invalid answers", percent(summary.invalid_rate, 2)),
        ("Episodes lost", f"{summary.episodes_lost:,}"),
    ]


def _workers(summary: Summary) -> str:
    ranks = summary.num_learner_ranks
    return f"{summary.num_rollout_workers} rollout + {ranks} learner processes"


def _facts(pairs: list[tuple[str, str]]) -> Markup:
    entries = [element("div", element("dt", name), element("dd", value)) for name, value in pairs]
    return element("dl", *entries, class_="facts")


def _disclosure(title: str, content: Markup) -> Markup:
    return element("details", element("summary", title), content)


def _section(title: str, explanation: str | None, *content: Markup) -> Markup:
    explained = element("p", explanation, class_="explain") if explanation else None
    return element("section", element("h2", title), explained, join(*content))
