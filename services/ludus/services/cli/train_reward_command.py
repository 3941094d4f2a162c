"""`ludus train-reward`: trains a reward model, in the trainer's process."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from ludus.proto.reward_models import (
    METRICS_FILE,
    PROGRESS_FILE,
    TRAINING_SUFFIX,
    Judgement,
    RewardModelEpoch,
    RewardModelMetrics,
    RewardModelProgress,
)
from ludus.proto.runs import CONFIG_FILE
from ludus.services.cli.console import progress_console, results_console, say
from ludus.services.cli.records_follower import RecordsFollower
from ludus.services.cli.train_command import Overrides, exit_unless_well, run_quietly
from ludus.services.cli.trainer_process import TrainerEnd, TrainerOutput, run_trainer
from ludus.services.numbers import format_duration, format_fixed, format_percent

if TYPE_CHECKING:
    from ludus.proto.config import RewardModelConfig

PLAIN_INTERVAL_S = 5.0
"""Least time between two lines of progress where there is no terminal."""
_PHASES = {"read": "reading", "train": "training", "judge": "judging", "save": "saving"}


def train_reward(
    config_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", show_default=False, help="Configuration: .toml, .yaml or .json."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="ID|FOLDER", help="Causal language model that it begins as."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|FOLDER",
            help="Comparisons: columns prompt, chosen, rejected; or query, sample0, ..., best.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the reward model is written.")
    ] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look at model and data, and write nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the training was stopped.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the reward model in the output folder.")
    ] = False,
) -> None:
    """Train a reward model on what people prefer.

    Writes a Hugging Face folder with metrics.json beside the weights; a run takes it as a reward:
    `rewards = [{kind = "model", path = "FOLDER"}]`. Ctrl-C writes a checkpoint; --resume continues
    from it. Every field of docs/reward-models.md may be given with --set.

    Example: `ludus train-reward --model Qwen/Qwen3-0.6B --data preferences.jsonl`
    """
    from ludus.proto.config import load_reward_model_config

    given = {"model": model, "data": data, "output": output}
    named = [f"{key}={value}" for key, value in given.items() if value is not None]
    config = load_reward_model_config(config_path or {}, [*named, *(overrides or ())])
    switches = {"--resume": resume, "--overwrite": overwrite, "--dry-run": dry_run}
    flags = [flag for flag, is_set in switches.items() if is_set]
    with tempfile.TemporaryDirectory(prefix="ludus-") as folder:
        resolved = Path(folder) / CONFIG_FILE
        resolved.write_text(config.model_dump_json(indent=2), encoding="utf-8")
        arguments = ["reward", "--config", str(resolved), *flags]
        end = run_quietly("checking", arguments) if dry_run else _train(config, arguments)
    if dry_run:
        exit_unless_well(end, config.output, "nothing was written")
        typer.echo(end.output.tail[-1])
        return
    exit_unless_well(end, config.output, "continue with the same command and --resume")
    _show_results(config)


def _train(config: RewardModelConfig, arguments: list[str]) -> TrainerEnd:
    console = progress_console()
    folder = config.output.with_name(config.output.name + TRAINING_SUFFIX)
    follower = RecordsFollower(folder / PROGRESS_FILE, RewardModelProgress, skip_old=True)
    with console.status("starting") as status:
        view = _View(console, status)

        def show(output: TrainerOutput) -> None:
            while output.warnings:
                say(console, f"warning: {output.warnings.popleft()}", style="yellow")
            for progress in follower.new():
                view.show(progress)

        end = run_trainer(
            arguments, on_tick=show, on_stopping=lambda: say(console, "stopping", style="yellow")
        )
    if end.exit_code == 0:
        view.show_missed(_metrics(config).epochs)
    return end


class _View:
    """A line for each epoch; between them a line that changes, or one every few seconds."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console, self._status = console, status
        self._shown_at_s = 0.0
        self._last_epoch = 0

    def show_missed(self, epochs: Sequence[RewardModelEpoch]) -> None:
        """Show the epochs that ended after the last look: their file is gone by now."""
        for epoch in epochs[self._last_epoch :]:
            say(self._console, _epoch_line(epoch, len(epochs)))

    def show(self, progress: RewardModelProgress) -> None:
        """Show where training stands."""
        if progress.finished is not None:
            self._last_epoch = progress.finished.epoch
            say(self._console, _epoch_line(progress.finished, progress.num_epochs))
            return
        line = _line(progress)
        self._status.update(line)
        is_due = time.monotonic() - self._shown_at_s >= PLAIN_INTERVAL_S
        if not self._console.is_terminal and is_due:
            self._shown_at_s = time.monotonic()
            say(self._console, line)


def _line(progress: RewardModelProgress) -> str:
    doing = _PHASES[progress.phase]
    if not progress.num_steps:
        return f"{doing} the data"
    loss = "" if progress.loss is None else f"  loss {format_fixed(progress.loss, 4)}"
    left = ""
    if progress.step:
        per_step_s = progress.elapsed_s / progress.step
        left = f"  {format_duration(per_step_s * (progress.num_steps - progress.step))} left"
    return f"{doing}  step {progress.step}/{progress.num_steps}{loss}{left}"


def _epoch_line(epoch: RewardModelEpoch, num_epochs: int) -> str:
    head = f"epoch {epoch.epoch}/{num_epochs}  loss {format_fixed(epoch.train_loss, 4)}"
    return head if epoch.test is None else f"{head}  held out: {_in_words(epoch.test)}"


def _in_words(test: Judgement) -> str:
    return (
        f"accuracy {format_percent(test.accuracy)}  MRR {format_fixed(test.mrr, 4)}"
        f"  loss {format_fixed(test.loss, 4)}"
    )


def _metrics(config: RewardModelConfig) -> RewardModelMetrics:
    return RewardModelMetrics.model_validate_json((config.output / METRICS_FILE).read_bytes())


def _show_results(config: RewardModelConfig) -> None:
    metrics = _metrics(config)
    console = results_console()
    if metrics.accuracy is not None and metrics.mrr is not None and metrics.loss is not None:
        guess = 1 / metrics.num_answers
        table = Table("on what was held out", "value", "by chance", box=None, pad_edge=False)
        rows: list[tuple[str, Any, Any]] = [
            ("accuracy", format_percent(metrics.accuracy), format_percent(guess)),
            (
                "MRR",
                format_fixed(metrics.mrr, 4),
                format_fixed(_mrr_by_chance(metrics.num_answers), 4),
            ),
            (
                "loss",
                format_fixed(metrics.loss, 4),
                format_fixed(_loss_by_chance(metrics.num_answers), 4),
            ),
        ]
        for row in rows:
            table.add_row(*row)
        console.print(table)
    say(
        console,
        f"{metrics.num_train:,} comparisons of {metrics.num_answers} answers, "
        f"{metrics.num_test:,} held out · {metrics.num_steps:,} steps in "
        f"{format_duration(metrics.elapsed_s)}"
        f" · epoch {metrics.kept_epoch} of {len(metrics.epochs)}",
    )
    say(console, f"reward model  {config.output}")
    term = f'rewards = [{{kind = "model", path = "{config.output}"}}]'
    say(console, f"as a reward   {term}", style="dim")


def _mrr_by_chance(num_answers: int) -> float:
    return sum(1 / rank for rank in range(1, num_answers + 1)) / num_answers


def _loss_by_chance(num_answers: int) -> float:

    return math.log(num_answers)
