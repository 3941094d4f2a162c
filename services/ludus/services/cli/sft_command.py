"""`ludus sft`: fine-tunes a language model on conversations, in a child process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludus.proto.errors import NotFoundError
from ludus.proto.runs import CONFIG_FILE, LOG_FILE, SUMMARY_FILE, Resume, SftSummary
from ludus.services.cli.console import (
    get_stdout,
    make_table,
    print_line,
    write_json,
)
from ludus.services.cli.options import ConfigPath, Overrides
from ludus.services.cli.run_end import describe_size
from ludus.services.cli.train_command import (
    READY_TEXT,
    OverwriteFlag,
    PrintsConfig,
    ResumeOption,
    advise_next_command,
    check_json_option,
    exit_on_failure,
    make_trainer_flags,
    run_quietly,
    run_training,
)
from ludus.services.numbers import format_duration, format_fixed


def fine_tune(
    config_path: ConfigPath = None,
    overrides: Overrides = None,
    is_dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the model and every conversation, then print the size of the data.",
        ),
    ] = False,
    prints_json: PrintsConfig = False,
    resume: ResumeOption = Resume.NEVER,
    overwrites: OverwriteFlag = False,
) -> None:
    """Fine-tune a language model on conversations.

    The loss is the cross-entropy of the assistant's messages. Everything is written to runs/NAME/,
    and the model to runs/NAME/model, which a later run can use as its `model.path`. Ctrl-C stops
    with a checkpoint, from which --resume continues.

    Example: `ludus sft --set model.path=Qwen/Qwen3-0.6B --set data.path=chats.jsonl`
    """
    from ludus.proto.config import load_sft_config

    config = load_sft_config(config_path, overrides or ())
    flags = make_trainer_flags(resume, overwrites=overwrites)
    check_json_option(is_dry_run=is_dry_run, prints_json=prints_json)
    run_dir = Path(config.output_dir) / config.name
    if is_dry_run:
        end = run_quietly("checking", ["check", *flags], config)
        exit_on_failure(end, run_dir, "nothing was written")
        if prints_json:
            write_json(config.model_dump_json(indent=2))
        else:
            print_line(get_stdout(), end.output.last_lines[-1])
            print_line(get_stdout(), f"ready  {READY_TEXT}")
        return
    end = run_training(config, run_dir, flags)
    exit_on_failure(end, run_dir, advise_next_command(run_dir, "sft"))
    _print_summary(run_dir)


def _print_summary(run_dir: Path) -> None:
    """Print the results of a run, write its report, and print the next commands."""
    from ludus.services.report import write_report

    summary_path = run_dir / SUMMARY_FILE
    if not summary_path.is_file():
        raise NotFoundError(f"the trainer did not write '{summary_path}'; see {LOG_FILE}")
    summary = SftSummary.model_validate_json(summary_path.read_bytes())
    report_path = write_report(run_dir)
    console = get_stdout()
    if summary.num_validation:
        table = make_table("validation", "loss per token", "step")
        table.add_row("before training", _format_loss(summary.start_loss), "0")
        table.add_row("last", _format_loss(summary.validation_loss), f"{summary.num_steps:,}")
        table.add_row("kept", _format_loss(summary.kept_loss), f"{summary.model_step:,}")
        console.print(table)
    end = ", stopped early" if summary.has_stopped_early else ""
    print_line(
        console,
        f"{summary.num_train:,} conversations, {summary.num_validation:,} held out"
        f" · {summary.num_steps:,} steps{end} · {summary.num_tokens_trained:,} tokens in"
        f" {format_duration(summary.wall_seconds_training)} of training",
    )
    print_line(console, f"report      {report_path}")
    print_line(console, f"model       {summary.model_folder}")
    title, text = describe_size(run_dir)
    print_line(console, f"{title:<11} {text}")
    print_line(console, f'use it      model = {{kind = "pretrained", path = "{run_dir}"}}', "dim")
    train_more = f"ludus sft {run_dir / CONFIG_FILE} --resume --set training.num_epochs=N"
    print_line(console, f"export      ludus export {run_dir} {summary.name}-model", "dim")
    print_line(console, f"train more  {train_more}", "dim")


def _format_loss(loss: float | None) -> str:
    return "" if loss is None else format_fixed(loss, 4)
