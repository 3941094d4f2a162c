"""One picture of a run for a README: the win-rate curve and the learned policy chart."""

from __future__ import annotations

from pathlib import Path

from ludus.proto.errors import ConfigError
from ludus.proto.runs import PolicyChart
from ludus.services.numbers import format_fixed, format_percent
from ludus.services.report.curves import EXPECTED_RETURN, WIN_RATE, learning_curve
from ludus.services.report.drawing import Drawing, text
from ludus.services.report.line_chart import Frame
from ludus.services.report.markup import Markup, element, join
from ludus.services.report.page import style_sheet, write_whole
from ludus.services.report.policy_grid import (
    ROW_LABELS,
    draw_policy,
    draw_reference,
    num_agreeing,
    panels,
)
from ludus.services.report.run_files import RunFiles, load_run_files

MARGIN = 26.0
TITLE = 34.0
CAPTION = 24.0
TWIN_GAP = 18.0
CURVE = Frame(width=520, height=470, left=46, right=158, top=12, bottom=46)


def write_figure(run_dir: Path, path: Path) -> Path:
    """The path of a standalone SVG.

    Raises:
        NotFoundError: the folder holds no run.
        ConfigError: the run has no evaluation yet, or the file cannot be written.
    """
    return write_whole(path, render_figure(load_run_files(run_dir)))


def render_figure(run: RunFiles) -> str:
    """The SVG as text; of several environments it shows the one that has a chart, or the first."""
    chart = run.chart if run.chart is not None and run.chart.cells else None
    environment = chart.environment if chart is not None else next(iter(run.environments), "")
    measure = WIN_RATE
    curve = learning_curve(run, environment, measure, CURVE)
    if curve is None:  # the environment does not say what a win is
        measure = EXPECTED_RETURN
        curve = learning_curve(run, environment, measure, CURVE)
    if curve is None:
        raise ConfigError(
            f"expected a run with at least one evaluation, got '{run.run_dir}' without; "
            "train it first with `ludus train`"
        )
    parts = [_titled(f"{measure.name} over games trained", curve)]
    if chart is not None:
        agreement = f"{num_agreeing(chart)} of {len(chart.cells)}"
        title = f"What it learned: {agreement} answers as {run.reference_name(environment)}"
        parts.append(_titled(title, _twins(run, chart)))
    return _card(run, environment, parts)


def _twins(run: RunFiles, chart: PolicyChart) -> Drawing:
    """The first panel of the policy chart beside the reference's, and how to read them."""
    panel = panels(chart)[0]
    policy = draw_policy(chart, panel, f"this policy, {panel.name}")
    reference = draw_reference(
        chart, panel, f"{run.reference_name(chart.environment)}, {panel.name}"
    )
    caption = (
        f"Orange {chart.answers[0]}, blue {chart.answers[-1]}; paler where the policy is less "
        "sure; outlined where the two differ."
    )
    at = policy.width + TWIN_GAP
    return Drawing(
        at + reference.width,
        policy.height + CAPTION,
        join(
            policy.placed(0, 0),
            reference.placed(at, 0),
            text(ROW_LABELS, policy.height + CAPTION - 4, caption),
        ),
        policy.label,
    )


def _titled(title: str, drawing: Drawing) -> Drawing:
    body = join(text(0, 16, title, class_="figure-title"), drawing.placed(0, TITLE))
    return Drawing(drawing.width, drawing.height + TITLE, body, title)


def _card(run: RunFiles, environment: str, parts: list[Drawing]) -> str:
    """The parts side by side on a sheet of their own, so that any page's colour will do."""
    height = max(part.height for part in parts) + 2 * MARGIN
    placed: list[Markup] = []
    x = MARGIN
    for part in parts:
        placed.append(part.placed(x, MARGIN))
        x += part.width + MARGIN
    sheet = element("rect", x=0.5, y=0.5, width=x - 1, height=height - 1, rx=14, class_="paper")
    title = run.name
    if run.summary is not None:
        policy = run.summary.results[environment].report.policy
        if policy.win_rate is not None:
            title += f", {format_percent(policy.win_rate)} wins"
        else:
            title += f", return {format_fixed(policy.expected_return, 3)}"
    return element(
        "svg",
        element("title", title),
        element("style", style_sheet("style.css")),
        sheet,
        join(*placed),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {x:g} {height:g}",
        width=x,
        height=height,
    )
