"""Sections of the report; each function renders a section from the files of a run."""

from __future__ import annotations

import itertools

from ludus.proto.runs import (
    TRANSCRIPTS_FILE,
    EnvironmentResult,
    PolicyChart,
    PolicyResult,
    Summary,
)
from ludus.services.numbers import (
    format_compact,
    format_fixed,
    format_fixed_interval,
    format_percent,
    format_percent_interval,
)
from ludus.services.report.curves import (
    EXPECTED_RETURN,
    MEAN_WINDOW,
    WIN_RATE,
    SmallChart,
    environment_curves,
    learning_curve,
    training_curves,
)
from ludus.services.report.drawing import Drawing, hover, line
from ludus.services.report.episodes import NUM_SHOWN, render_episodes
from ludus.services.report.markup import Markup, element, join
from ludus.services.report.policy_grid import (
    Panel,
    count_agreements,
    draw_legend,
    draw_policy,
    draw_reference,
    split_panels,
)
from ludus.services.report.run_files import RunFiles
from ludus.services.report.scales import Scale, padded_range
from ludus.services.results import NamedResult, compare_policies

POLICY_COLUMNS = (
    "Policy",
    "Episodes",
    "Wins",
    "95% interval",
    "Draws",
    "Return",
    "95% interval",
    "",
)
NUMBER_COLUMNS = frozenset({"Episodes", "Wins", "Draws", "Return"})


def render_learning(run: RunFiles) -> Markup | None:
    """Render win rate and return over episodes; None before the first evaluation."""
    pairs = []
    for environment in run.environments:
        figures = [
            element("figure", element("h3", measure.name), curve.inline())
            for measure in (WIN_RATE, EXPECTED_RETURN)
            if (curve := learning_curve(run, environment, measure)) is not None
        ]
        if figures:
            pair = element("div", *figures, class_="pair")
            pairs.append(_part(run, environment, pair))
    if not pairs:
        return None
    explanation = (
        "Evaluations on seeds that training never uses. Bands are 95% intervals; dashed lines "
        "are fixed policies on the same seeds."
    )
    return _section("Learning", explanation + _unlocks(run), *pairs)


def render_learned_policy(run: RunFiles) -> Markup | None:
    """Render the policy chart next to the reference; None if the run has no chart."""
    chart = run.chart
    if chart is None or not chart.cells:
        return None
    reference_name = run.reference_name(chart.environment)
    scope = f" of {chart.environment}" if len(run.environments) > 1 else ""
    explanation = (
        f"The most likely answer in every situation{scope} and its probability, next to "
        f"{reference_name}. Outlined cells differ from it."
    )
    drawings = [_panel(chart, panel, reference_name) for panel in split_panels(chart)]
    # The last panel is usually the shortest, so the legend is below it.
    *first, last = drawings
    column = element("div", last, _legend(chart, reference_name))
    return _section("Learned policy", explanation, element("div", *first, column, class_="grids"))


def render_policies(run: RunFiles) -> Markup | None:
    """Render the tables of policies; None without a summary."""
    if run.summary is None:
        return None
    tables = [
        _part(run, environment, element("div", _policy_table(result), class_="scroll"))
        for environment, result in run.summary.results.items()
    ]
    explanation = (
        f"Evaluated at temperature {run.summary.eval_temperature:g}. Fixed policies play the same "
        "seeds as the trained policy."
    )
    return _section("Policies", explanation, *tables)


def render_training(run: RunFiles) -> Markup | None:
    """Render small charts of the training metrics; None without training steps."""
    charts = training_curves(run)
    if not charts:
        return None
    by_environment = {name: environment_curves(run, name) for name in run.environments}
    if len(by_environment) == 1:
        parts = [_small([*charts, *itertools.chain(*by_environment.values())])]
    else:
        parts = [_small(charts)]
        parts += [
            _part(run, name, _small(curves)) for name, curves in by_environment.items() if curves
        ]
    explanation = (
        f"Over episodes trained. Faint lines show every step, full lines the mean of {MEAN_WINDOW} "
        "steps. The number on the right is the latest mean."
    )
    explanation += _unlocks(run)
    return _section("Training", explanation, *parts)


def render_transcripts(run: RunFiles) -> Markup | None:
    """Render the first and last episodes; None without transcripts."""
    parts = []
    for environment in run.environments:
        transcripts = [item for item in run.transcripts if item.environment == environment]
        if transcripts:
            parts.append(_part(run, environment, render_episodes(transcripts)))
    if not parts:
        return None
    explanation = (
        f"The first {NUM_SHOWN} and the last {NUM_SHOWN} recorded training episodes of each "
        f"environment. {TRANSCRIPTS_FILE} has all of them."
    )
    return _section("Transcripts", explanation, *parts)


def render_details(run: RunFiles) -> Markup | None:
    """Render counters, package versions and the resolved configuration."""
    parts = []
    if run.summary is not None:
        parts.append(_facts(_run_facts(run.summary)))
        parts.append(_disclosure("Package versions", _facts(sorted(run.summary.versions.items()))))
    if run.config is not None:
        config = element("pre", run.config.model_dump_json(indent=2))
        parts.append(_disclosure("Configuration, resolved", config))
    return _section("Run", None, *parts) if parts else None


def _unlocks(run: RunFiles) -> str:
    """Return a sentence about the environments that a curriculum opened, or ''."""
    if not run.unlocks:
        return ""
    unlock_texts = ", ".join(f"{name} after {games:,} episodes" for games, name in run.unlocks)
    return f" Dotted vertical lines: the curriculum opens {unlock_texts}."


def _part(run: RunFiles, environment: str, content: Markup) -> Markup:
    """Add the environment's name to its content if there are several environments."""
    if len(run.environments) == 1:
        return content
    return element("div", element("h3", environment, class_="environment"), content)


def _small(charts: list[SmallChart]) -> Markup:
    figures = [
        element(
            "figure",
            element(
                "figcaption",
                element("strong", chart.title),
                " ",
                element("span", chart.unit, class_="unit"),
                " ",
                element("span", chart.latest, class_="latest"),
            ),
            chart.drawing.inline(),
        )
        for chart in charts
    ]
    return element("div", *figures, class_="small")


def _policy_table(result: EnvironmentResult) -> Markup:
    results = compare_policies(result)
    ends = [end for named in results for end in named.result.expected_return_ci95]
    scale = Scale(*padded_range(ends), 4, 196)
    heads = [
        element("th", name, class_="number" if name in NUMBER_COLUMNS else None)
        for name in POLICY_COLUMNS
    ]
    return element(
        "table",
        element("thead", element("tr", *heads)),
        element("tbody", *(_policy_row(named, scale) for named in results)),
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
        element("strong", f"{count_agreements(chart)} of {len(chart.cells)}"),
        f" answers agree with {reference_name}.",
        class_="legend",
    )


def _policy_row(named: NamedResult, scale: Scale) -> Markup:
    result = named.result
    return element(
        "tr",
        element("td", named.name),
        element("td", f"{result.num_games:,}", class_="number"),
        element("td", format_percent(result.win_rate), class_="number"),
        element("td", format_percent_interval(result.win_rate_ci95), class_="interval"),
        element("td", format_percent(result.draw_rate), class_="number"),
        element("td", format_fixed(result.expected_return, 3), class_="number"),
        element("td", format_fixed_interval(result.expected_return_ci95), class_="interval"),
        element("td", _whisker(result, scale).inline(), class_="forest"),
        class_="trained" if named.is_trained else None,
    )


def _whisker(result: PolicyResult, scale: Scale) -> Drawing:
    """Draw the return and its interval as a dot on a line."""
    interval = format_fixed_interval(result.expected_return_ci95)
    label = f"{format_fixed(result.expected_return, 3)} ({interval})"
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
        ("Engine", summary.generator),
        ("Rollout workers", str(summary.num_rollout_workers)),
        ("Learner ranks", str(summary.num_learner_ranks)),
        ("Weight syncs", f"{summary.weight_syncs:,}"),
        ("Canary failures", f"{summary.canary_failures:,}"),
        ("Largest canary error", f"{format_compact(summary.canary_max_error)} nats"),
        ("Largest staleness in versions", str(summary.max_staleness_seen)),
        ("Environment restarts", f"{summary.environment_restarts:,}"),
        ("Learner restarts", f"{summary.learner_restarts:,}"),
        ("Groups lost with a learner", f"{summary.groups_rolled_back:,}"),
        ("Invalid answers", format_percent(summary.invalid_rate, 2)),
        ("Episodes lost", f"{summary.episodes_lost:,}"),
        ("Episodes failed", f"{summary.episodes_failed:,}"),
        *(("Environment", result.environment) for result in summary.results.values()),
    ]


def _facts(pairs: list[tuple[str, str]]) -> Markup:
    entries = [element("div", element("dt", name), element("dd", value)) for name, value in pairs]
    return element("dl", *entries, class_="facts")


def _disclosure(title: str, content: Markup) -> Markup:
    return element("details", element("summary", title), content)


def _section(title: str, explanation: str | None, *content: Markup) -> Markup:
    explained = element("p", explanation, class_="explain") if explanation else None
    return element("section", element("h2", title), explained, join(*content))
