"""The parts of the report that only a fine-tuning run has."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.proto.config import SftRun
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import SftSummary
from ludus.services.numbers import format_duration, format_fixed
from ludus.services.report import curves
from ludus.services.report.headline import Tile
from ludus.services.report.line_chart import Line, LineChart, Mark, Point
from ludus.services.report.run_files import RunFiles


def describe_run(config: SftRun) -> str:
    """Return a one-line description of a run."""
    method = (
        "all parameters" if config.model.lora is None else f"LoRA, rank {config.model.lora.rank}"
    )
    return (
        f"fine-tuning of {config.model.path} · {config.data.path} · {method} · "
        f"{config.training.num_steps} steps · seed {config.seed}"
    )


def make_loss_tiles(run: RunFiles) -> list[Tile]:
    """Return the key figures of the validation; none before the first validation."""
    summary = run.sft_summary
    if summary is None or summary.validation_loss is None:
        points = make_validation_points(run)
        if not points:
            return []
        note = f"after {points[-1].x:,.0f} conversations"
        return [Tile("Validation loss", format_fixed(points[-1].y, 4), [note], is_main=True)]
    is_last = summary.best_loss is None or summary.model_step == summary.num_steps
    kept_loss = summary.validation_loss if is_last else summary.best_loss
    notes = [f"per token, of the model of step {summary.model_step:,}"]
    if summary.start_loss is not None:
        notes.append(f"{format_fixed(summary.start_loss, 4)} before training")
    if summary.has_stopped_early:
        notes.append(f"stopped early, after step {summary.num_steps:,}")
    return [Tile("Validation loss", format_fixed(kept_loss or 0.0, 4), notes, is_main=True)]


def make_run_tiles(run: RunFiles) -> list[Tile]:
    """Return the key figures of the whole run; none before the first metrics."""
    summary = run.sft_summary
    if summary is not None:
        conversations = f"{summary.num_train:,} different, {summary.num_validation:,} held out"
        total = f"{format_duration(summary.wall_seconds_total)} in total"
        return [
            Tile("Conversations", f"{summary.num_conversations_trained:,}", [conversations]),
            Tile("Training time", format_duration(summary.wall_seconds_training), [total]),
        ]
    if not run.metrics:
        return []
    num_conversations = max(row.num_games_trained for row in run.metrics)
    return [
        Tile("Conversations", f"{num_conversations:,}"),
        Tile("Training time", format_duration(run.metrics[-1].elapsed_s)),
    ]


def list_run_facts(summary: SftSummary) -> list[tuple[str, str]]:
    """Return the names and values of the summary's counters."""
    return [
        ("Model", summary.model_folder),
        ("Learner ranks", str(summary.num_learner_ranks)),
        ("Steps", f"{summary.num_steps:,}"),
        ("Trained tokens", f"{summary.num_tokens_trained:,}"),
        ("Conversations left out", f"{summary.num_dropped:,}"),
        ("Conversations cut off", f"{summary.num_truncated:,}"),
        ("Skipped updates", f"{summary.num_skipped_updates:,}"),
    ]


def make_validation_curve(run: RunFiles) -> LineChart | None:
    """Make the chart of the validation loss; return None without validations."""
    points = make_validation_points(run)
    if not points:
        return None
    return make_validation_chart(
        [Line(points, name="this model")],
        curves.make_marks(run),
        x_high=max((row.num_games_trained for row in run.metrics), default=0),
    )


def make_validation_chart(
    lines: Sequence[Line], marks: Sequence[Mark] = (), x_high: float = 0.0
) -> LineChart:
    """Make the chart of validation losses over the number of conversations."""
    return LineChart(
        curves.CURVE_FRAME,
        "Validation loss over conversations trained",
        lines,
        marks=marks,
        format_y=lambda value: format_fixed(value, 4),
        format_y_tick=lambda value: format_fixed(value, 2),
        x_title="conversations trained",
        x_high=x_high,
    )


def make_validation_points(run: RunFiles) -> list[Point]:
    """Return the validation losses of a fine-tuning run."""
    metric = TrainMetric.VALIDATION_LOSS
    return [
        Point(
            float(row.num_games_trained),
            row.values[metric],
            tooltip=f"after {row.num_games_trained:,} conversations: {row.values[metric]:.4f}",
        )
        for row in run.select_rows("event")
        if metric in row.values
    ]
