"""An SVG picture of a run for a README: the win-rate curve and the policy chart."""

from __future__ import annotations

from pathlib import Path

from ludus.proto.errors import ConfigError
from ludus.proto.runs import PolicyChart
from ludus.services.numbers import format_fixed, format_percent
from ludus.services.report.curves import EXPECTED_RETURN, WIN_RATE, learning_curve
from ludus.services.report.drawing import Drawing, text
from ludus.services.report.line_chart import Frame
from ludus.services.report.markup import Markup, element, join
from ludus.services.report.page import style_sheet, write_atomically
from ludus.services.report.policy_grid import (
    ROW_LABELS,
    count_agreements,
    draw_policy,
    draw_reference,
    split_panels,
)
from ludus.services.report.run_files import RunFiles, load_run_files

MARGIN = 26.0
TITLE = 34.0
CAPTION = 24.0
TWIN_GAP = 18.0
CURVE = Frame(
    width=520, height=470, margin_left=46, margin_right=158, margin_top=12, margin_bottom=46
)


def write_figure(run_dir: Path, path: Path) -> Path:
    """Write a standalone SVG and return its path.

    Raises:
        NotFoundError: the folder contains no run.
        ConfigError: the run has no evaluation yet, or the file cannot be written.
    """
    return write_atomically(path, render_figure(load_run_files(run_dir)))


def render_figure(run: RunFiles) -> str:
    """Render the environment that has a policy chart, or the first one, as SVG."""
    chart = run.chart if run.chart is not None and run.chart.cells else None
    environment = chart.environment if chart is not None else next(iter(run.environments), "")
    measure = WIN_RATE
    curve = learning_curve(run, environment, measure, CURVE)
    if curve is None:  # the environment does not report wins
        measure = EXPECTED_RETURN
        curve = learning_curve(run, environment, measure, CURVE)
    if curve is None:
        raise ConfigError(
            f"run '{run.run_dir}' has no evaluation yet; train it first with `ludus train`"
        )
    parts = [_add_title(f"{measure.name} over episodes trained", curve)]
    if chart is not None:
        agreement = f"{count_agreements(chart)} of {len(chart.cells)}"
        title = f"Learned policy: {agreement} actions agree with {run.reference_name(environment)}"
        parts.append(_add_title(title, _twins(run, chart)))
    return _card(run, environment, parts)


def _twins(run: RunFiles, chart: PolicyChart) -> Drawing:
    """Draw the first panel of the policy chart next to the reference's, with a legend."""
    panel = split_panels(chart)[0]
    policy = draw_policy(chart, panel, f"this policy, {panel.name}")
    reference = draw_reference(
        chart, panel, f"{run.reference_name(chart.environment)}, {panel.name}"
    )
    caption = (
        f"Orange {chart.answers[0]}, blue {chart.answers[-1]}; paler if the policy is less "
        "certain; outlined if it differs from the reference."
    )
    x_reference = policy.width + TWIN_GAP
    return Drawing(
        x_reference + reference.width,
        policy.height + CAPTION,
        join(
            policy.move_to(0, 0),
            reference.move_to(x_reference, 0),
            text(ROW_LABELS, policy.height + CAPTION - 4, caption),
        ),
        policy.label,
    )


def _add_title(title: str, drawing: Drawing) -> Drawing:
    body = join(text(0, 16, title, class_="figure-title"), drawing.move_to(0, TITLE))
    return Drawing(drawing.width, drawing.height + TITLE, body, title)


def _card(run: RunFiles, environment: str, parts: list[Drawing]) -> str:
    """Draw the parts side by side on a sheet, so that the picture suits any background."""
    height = max(part.height for part in parts) + 2 * MARGIN
    groups: list[Markup] = []
    x = MARGIN
    for part in parts:
        groups.append(part.move_to(x, MARGIN))
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
        join(*groups),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {x:g} {height:g}",
        width=x,
        height=height,
    )
