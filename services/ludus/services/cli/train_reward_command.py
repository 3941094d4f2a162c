"""`ludus train-reward`: trains a reward model in a child process."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.status import Status

from ludus.proto.paths import expand_home
from ludus.proto.reward_models import (
    METRICS_FILE,
    PROGRESS_FILE,
    RewardModelEpoch,
    RewardModelMetrics,
    RewardModelProgress,
)
from ludus.services.cli.console import get_stderr, get_stdout, make_table, print_line, write_text
from ludus.services.cli.options import ConfigPath, Overrides
from ludus.services.cli.records_follower import RecordsFollower
from ludus.services.cli.train_command import exit_on_failure, run_quietly
from ludus.services.numbers import format_duration, format_fixed, format_percent

if TYPE_CHECKING:
    from ludus.proto.config import RewardModelRun

PLAIN_INTERVAL_S = 5.0
"""Minimum time between two lines of progress if there is no terminal, in seconds."""
_PHASE_NAMES = {"read": "reading", "train": "training", "judge": "evaluating", "save": "saving"}


def train_reward(
    config_path: ConfigPath = None,
    model: Annotated[
        str | None, typer.Option(metavar="ID|FOLDER", help="Causal language model to start from.")
    ] = None,
    data_path: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE|FOLDER",
            help="Data with columns (prompt, chosen, rejected) or (query, sample0, ..., best).",
            callback=expand_home,
        ),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FOLDER", help="Folder for the reward model.", callback=expand_home
        ),
    ] = None,
    overrides: Overrides = None,
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the model and the data, and write nothing.")
    ] = False,
    resumes: Annotated[
        bool, typer.Option("--resume", help="Resume from the latest checkpoint.")
    ] = False,
    overwrites: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an existing reward model, or the checkpoint of a stopped run.",
        ),
    ] = False,
) -> None:
    """Train a reward model on human preferences.

    Writes a model folder in Hugging Face format, and metrics.json. A run uses it as a reward with
    `rewards = [{kind = "model", path = "FOLDER"}]`. Ctrl-C stops with a checkpoint, from which
    --resume continues. --set overrides any field described in docs/reward-models.md.

    Example: `ludus train-reward --model Qwen/Qwen3-0.6B --data preferences.jsonl`
    """
    from ludus.proto.config import load_reward_model_config

    fields = {"model": model, "data": data_path, "output": output_dir}
    assignments = [f"{key}={value}" for key, value in fields.items() if value is not None]
    config = load_reward_model_config(config_path or {}, [*assignments, *(overrides or ())])
    settings = {"--resume": resumes, "--overwrite": overwrites}
    flags = [flag for flag, is_set in settings.items() if is_set]
    if is_dry_run:
        end = run_quietly("checking", ["check", *flags], config)
        exit_on_failure(end, config.folder, "nothing was written")
        write_text(end.output.last_lines[-1])
        return
    view = _ProgressView(config)
    end = run_quietly("starting", ["train", *flags], config, view.refresh)
    exit_on_failure(end, config.folder, "continue with the same command and --resume")
    view.finish()
    _print_results(config)


class _ProgressView:
    """A view of the training of a reward model: a line per epoch, and a status line."""

    def __init__(self, config: RewardModelRun) -> None:
        self._config = config
        path = config.folder / PROGRESS_FILE
        self._follower = RecordsFollower(path, RewardModelProgress, skips_old_file=True)
        self._console = get_stderr()
        self._shown_at_s = 0.0
        self._last_epoch = 0

    def refresh(self, status: Status) -> None:
        """Show the progress since the last call."""
        for progress in self._follower.read_new():
            if progress.finished is not None:
                self._last_epoch = progress.finished.epoch
                print_line(self._console, _format_epoch(progress.finished, progress.num_epochs))
                continue
            line = _format_progress(progress)
            status.update(line)
            is_due = time.monotonic() - self._shown_at_s >= PLAIN_INTERVAL_S
            if not self._console.is_terminal and is_due:
                self._shown_at_s = time.monotonic()
                print_line(self._console, line)

    def finish(self) -> None:
        """Show the epochs that ended after the last refresh, whose progress file was deleted."""
        epochs = _read_metrics(self._config).epochs
        for epoch in epochs[self._last_epoch :]:
            print_line(self._console, _format_epoch(epoch, len(epochs)))


def _format_progress(progress: RewardModelProgress) -> str:
    phase = _PHASE_NAMES[progress.phase]
    if not progress.num_steps:
        return f"{phase} the data"
    loss_text = "" if progress.loss is None else f"  loss {format_fixed(progress.loss, 4)}"
    remaining_text = ""
    if progress.step:
        remaining_s = progress.elapsed_s / progress.step * (progress.num_steps - progress.step)
        remaining_text = f"  {format_duration(remaining_s)} left"
    return f"{phase}  step {progress.step}/{progress.num_steps}{loss_text}{remaining_text}"


def _format_epoch(epoch: RewardModelEpoch, num_epochs: int) -> str:
    line = f"epoch {epoch.epoch}/{num_epochs}  loss {format_fixed(epoch.train_loss, 4)}"
    scores = epoch.test
    if scores is None:
        return line
    return (
        f"{line}  held out: accuracy {format_percent(scores.accuracy)}"
        f"  MRR {format_fixed(scores.mrr, 4)}  loss {format_fixed(scores.loss, 4)}"
    )


def _read_metrics(config: RewardModelRun) -> RewardModelMetrics:
    return RewardModelMetrics.model_validate_json((config.output / METRICS_FILE).read_bytes())


def _print_results(config: RewardModelRun) -> None:
    metrics = _read_metrics(config)
    console = get_stdout()
    if metrics.accuracy is not None and metrics.mrr is not None and metrics.loss is not None:
        num_answers = metrics.num_answers
        mrr_by_chance = sum(1 / rank for rank in range(1, num_answers + 1)) / num_answers
        table = make_table("held-out comparisons", "value", "by chance")
        table.add_row("accuracy", format_percent(metrics.accuracy), format_percent(1 / num_answers))
        table.add_row("MRR", format_fixed(metrics.mrr, 4), format_fixed(mrr_by_chance, 4))
        table.add_row("loss", format_fixed(metrics.loss, 4), format_fixed(math.log(num_answers), 4))
        console.print(table)
    print_line(
        console,
        f"{metrics.num_train:,} comparisons of {metrics.num_answers} answers, "
        f"{metrics.num_test:,} held out · {metrics.num_steps:,} steps in "
        f"{format_duration(metrics.elapsed_s)}"
        f" · epoch {metrics.kept_epoch} of {len(metrics.epochs)}",
    )
    print_line(console, f"reward model  {config.output}")
    reward_config = f'rewards = [{{kind = "model", path = "{config.output}"}}]'
    print_line(console, f"as a reward   {reward_config}", style="dim")
