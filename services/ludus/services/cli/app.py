"""The `ludus` command, which has subcommands and turns errors into messages.

This module must not import torch, ray, vllm or a game library, so that `ludus --help` is fast.
Commands import what they need when they run, and the trainer is a separate process.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from ludus.env.text.terminal import format_notice
from ludus.proto.errors import LudusError, UserError
from ludus.services.cli import (
    env_commands,
    eval_command,
    export_command,
    gateway_command,
    init_command,
    model_commands,
    run_folder_commands,
    run_list_commands,
    runs_commands,
    sft_command,
    submit_command,
    train_command,
    train_reward_command,
)
from ludus.services.cli.console import EXIT_INTERRUPTED

app = typer.Typer(
    name="ludus",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        sys.stdout.write(f"ludus {version('ludus-services')}\n")
        raise typer.Exit


@app.callback()
def declare_options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train language-model agents with reinforcement learning in any environment."""


app.add_typer(env_commands.app, name="env")
app.add_typer(model_commands.app, name="model")
app.add_typer(run_list_commands.app, name="runs")
app.command("init")(init_command.init)
app.command("train", cls=train_command.TrainCommand)(train_command.train)
app.command("train-reward")(train_reward_command.train_reward)
app.command("sft", cls=train_command.TrainCommand)(sft_command.fine_tune)
app.command("eval")(eval_command.evaluate)
app.command("export")(export_command.export)
app.command("watch")(run_folder_commands.watch)
app.command("scale")(run_folder_commands.scale)
app.command("report")(run_folder_commands.report)
app.command("gateway")(gateway_command.run_gateway)
app.command("submit")(submit_command.submit)
app.command("list")(runs_commands.list_runs)
app.command("status")(runs_commands.show_status)
app.command("logs")(runs_commands.show_logs)
app.command("stop")(runs_commands.stop)
app.command("resume")(submit_command.resume)
app.command("fetch")(runs_commands.fetch)


def main() -> None:
    """Run the command; the exit code is 2 after a user's mistake and 130 after Ctrl-C."""
    try:
        app(prog_name="ludus")
    except LudusError as error:
        sys.stderr.write(f"{format_notice('error', error)}\n")
        sys.exit(error.exit_code if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
