"""The report page and the figure of a run, rendered from the templates in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ludus.proto.config import SftRun
from ludus.proto.errors import ConfigError
from ludus.proto.runs import REPORT_FILE, Transcript
from ludus.proto.wording import choose_wording
from ludus.services import display
from ludus.services.report import curves, fine_tuning, headline
from ludus.services.report.before_after import pair_samples
from ludus.services.report.configuration import remove_credentials
from ludus.services.report.files import render_template, write_atomically
from ludus.services.report.line_chart import Frame, LineChart, Scale, pad_range
from ludus.services.report.policy_grid import count_agreements, make_legend_colors, split_panels
from ludus.services.report.run_files import RunFiles, load_run_files
from ludus.services.report.step_trace import make_step_charts

NUM_TRANSCRIPTS = 3
"""Number of first transcripts, and of last transcripts, that the page shows per environment."""
_LEARNING_EXPLANATION = (
    "Evaluations on seeds that training never uses. Bands are 95% intervals; dashed lines are "
    "fixed policies on the same seeds."
)
_FIGURE_FRAME = Frame(
    width=520, height=470, margin_left=46, margin_right=158, margin_top=12, margin_bottom=46
)


def write_report(run_dir: Path, output: Path | None = None, step: int | None = None) -> Path:
    """Write the report to `output`, by default into the run folder; return its path.

    Args:
        step: training step whose trace is shown. Default: a typical one and the longest one.

    Raises:
        NotFoundError: the folder contains no run, or no trace of the step.
        ConfigError: the file cannot be written.
    """
    run = load_run_files(run_dir)
    return write_atomically(output or run_dir / REPORT_FILE, _render_page(run, step))


def write_figure(run_dir: Path, path: Path) -> Path:
    """Write the figure, a standalone SVG, and return its path.

    The figure shows the environment with the policy chart, or the first environment if there is no
    chart.

    Raises:
        NotFoundError: the folder contains no run.
        ConfigError: the run has no evaluation yet, or the file cannot be written.
    """
    return write_atomically(path, _render_figure(load_run_files(run_dir)))


def _render_page(run: RunFiles, step: int | None) -> str:
    summary = run.summary
    results = summary.results if summary else {}
    return _render(
        "page.html",
        run,
        notices=headline.list_notices(run),
        **_make_headline(run),
        legend_colors=make_legend_colors(),
        policies={name: display.list_policies(result) for name, result in results.items()},
        wordings={name: choose_wording(result.report.is_game) for name, result in results.items()},
        make_return_scale=make_return_scale,
        training_charts=curves.make_training_charts(run),
        environment_charts={
            name: curves.make_environment_charts(run, name) for name in run.environments
        },
        mean_window=curves.MEAN_WINDOW,
        step_charts=make_step_charts(run.traces, step),
        chosen_step=step,
        transcripts={
            name: transcripts
            for name in run.environments
            if (transcripts := _select_transcripts(run, name))
        },
        num_transcripts=NUM_TRANSCRIPTS,
        sample_pairs=pair_samples(run.samples),
        config_json=remove_credentials(run.config).model_dump_json(indent=2) if run.config else "",
    )


def _make_headline(run: RunFiles) -> dict[str, object]:
    """Return the variables of the page that depend on the kind of the run."""
    if isinstance(run.config, SftRun):
        sft_summary, curve = run.sft_summary, fine_tuning.make_validation_curve(run)
        return {
            "unit": "conversations",
            "lead": fine_tuning.describe_run(run.config),
            "environment_tiles": {"": fine_tuning.make_loss_tiles(run)},
            "run_tiles": fine_tuning.make_run_tiles(run),
            "run_facts": fine_tuning.list_run_facts(sft_summary) if sft_summary else [],
            "versions": sft_summary.versions if sft_summary else {},
            "learning_curves": {"": {"Validation loss": curve}} if curve else {},
            "learning_explanation": "Mean loss per token of conversations that are held out.",
        }
    summary = run.summary
    return {
        "unit": "episodes",
        "lead": headline.describe_run(run, run.config),
        "environment_tiles": headline.make_environment_tiles(run),
        "run_tiles": headline.make_run_tiles(run),
        "run_facts": headline.list_run_facts(summary) if summary else [],
        "versions": summary.versions if summary else {},
        "learning_curves": _make_learning_curves(run),
        "learning_explanation": _LEARNING_EXPLANATION,
    }


def _render_figure(run: RunFiles) -> str:
    environment = run.chart.environment if run.chart else next(iter(run.environments), "")
    # The first measure is the share of successes, or the return if they are unknown.
    curve = next(iter(_make_measure_charts(run, environment, _FIGURE_FRAME).values()), None)
    if curve is None:
        raise ConfigError(
            f"run '{run.run_dir}' has no evaluation yet; train it first with `ludus train`"
        )
    title = headline.describe_result(run, environment)
    return _render("figure.svg", run, curve=curve, title=title)


def _render(template: str, run: RunFiles, **context: object) -> str:
    chart = run.chart
    return render_template(
        template,
        run=run,
        panels=split_panels(chart) if chart else [],
        num_agreements=count_agreements(chart) if chart else 0,
        reference=run.find_reference_name(chart.environment) if chart else "",
        **context,
    )


def _make_learning_curves(run: RunFiles) -> dict[str, dict[str, LineChart]]:
    """Return the learning curves of each environment with evaluations, by measure."""
    return {
        name: charts
        for name in run.environments
        if (charts := _make_measure_charts(run, name, curves.CURVE_FRAME))
    }


def _make_measure_charts(run: RunFiles, environment: str, frame: Frame) -> dict[str, LineChart]:
    return {
        measure.name: chart
        for measure in curves.name_measures(choose_wording(run.is_game(environment)))
        if (chart := curves.make_learning_curve(run, environment, measure, frame)) is not None
    }


def make_return_scale(policies: Sequence[display.NamedResult]) -> Scale:
    """Return the scale on which the intervals of all policies' returns fit."""
    bounds = [bound for policy in policies for bound in policy.result.expected_return_ci95]
    return Scale(*pad_range(bounds), 4, 196)


def _select_transcripts(run: RunFiles, environment: str) -> list[Transcript]:
    """Return the first and the last `NUM_TRANSCRIPTS` transcripts of an environment."""
    transcripts = [
        transcript for transcript in run.transcripts if transcript.environment == environment
    ]
    return transcripts[:NUM_TRANSCRIPTS] + transcripts[NUM_TRANSCRIPTS:][-NUM_TRANSCRIPTS:]
