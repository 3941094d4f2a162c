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
    chat_command,
    env_commands,
    eval_command,
    export_command,
    gateway_command,
    init_command,
    model_commands,
    run_folder_commands,
    run_list_commands,
    runs_commands,
    scale_command,
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


_TRAINING = "Training and results, on this machine"
_CLUSTER = "Runs on a cluster (need a Kubernetes context)"
_PARTS = "Environments, models and gateways"

app.command("init", rich_help_panel=_TRAINING)(init_command.init)
app.command("train", cls=train_command.TrainCommand, rich_help_panel=_TRAINING)(train_command.train)
app.command("sft", cls=train_command.TrainCommand, rich_help_panel=_TRAINING)(sft_command.fine_tune)
app.command("train-reward", rich_help_panel=_TRAINING)(train_reward_command.train_reward)
app.add_typer(run_list_commands.app, name="runs", rich_help_panel=_TRAINING)
app.command("watch", rich_help_panel=_TRAINING)(run_folder_commands.watch)
app.command("report", rich_help_panel=_TRAINING)(run_folder_commands.report)
app.command("eval", rich_help_panel=_TRAINING)(eval_command.evaluate)
app.command("chat", rich_help_panel=_TRAINING)(chat_command.chat)
app.command("export", rich_help_panel=_TRAINING)(export_command.export)
app.command("scale", rich_help_panel=_TRAINING)(scale_command.scale)
app.command("submit", rich_help_panel=_CLUSTER)(submit_command.submit)
app.command("list", rich_help_panel=_CLUSTER)(runs_commands.list_runs)
app.command("status", rich_help_panel=_CLUSTER)(runs_commands.show_status)
app.command("logs", rich_help_panel=_CLUSTER)(runs_commands.show_logs)
app.command("stop", rich_help_panel=_CLUSTER)(runs_commands.stop)
app.command("resume", rich_help_panel=_CLUSTER)(submit_command.resume)
app.command("fetch", rich_help_panel=_CLUSTER)(runs_commands.fetch)
app.add_typer(env_commands.app, name="env", rich_help_panel=_PARTS)
app.add_typer(model_commands.app, name="model", rich_help_panel=_PARTS)
app.command("gateway", rich_help_panel=_PARTS)(gateway_command.run_gateway)


def main() -> None:
    """Run the command; the exit code is 2 after a user's mistake and 130 after Ctrl-C."""
    try:
        app(prog_name="ludus")
    except LudusError as error:
        sys.stderr.write(f"{format_notice('error', error)}\n")
        sys.exit(error.exit_code if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
