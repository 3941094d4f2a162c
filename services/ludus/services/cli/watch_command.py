"""`ludus watch`: the policy's episodes, printed while the run trains."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ludus.proto.errors import NotFoundError
from ludus.proto.run_lock import is_in_use
from ludus.proto.runs import METRICS_FILE, TRANSCRIPTS_FILE, Transcript, TranscriptTurn
from ludus.services.cli.console import print_line, progress_console, results_console
from ludus.services.cli.records_follower import RecordsFollower
from ludus.services.transcripts import describe_consequence, describe_episode, describe_outcome

POLL_S = 0.5
_RUNS = Path("runs")


def watch(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder of a run, or its name in runs/.")
    ],
    last: Annotated[
        int, typer.Option(min=0, help="Number of existing episodes to show first.")
    ] = 3,
    environment: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Show episodes of this environment only. Default: all."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the lines of transcripts.jsonl.")
    ] = False,
) -> None:
    """Show the prompts and responses of training episodes until the run ends.

    A run records metrics.transcripts_per_step episodes per step. For a finished run, the last
    episodes are shown.

    Example: `ludus watch demo`

    Example: `ludus watch runs/demo --last 100 --json | jq .turns[0].answer`
    """
    run_dir = _find_run_folder(run)
    follower = RecordsFollower(run_dir / TRANSCRIPTS_FILE, Transcript)
    console = results_console()
    is_running = is_in_use(run_dir)
    transcripts = _select(environment, follower.read_new())
    _show(console, transcripts[len(transcripts) - min(last, len(transcripts)) :], as_json=as_json)
    while is_running:
        time.sleep(POLL_S)
        # Checked before the file is read, so that the run's last episodes are shown, too.
        is_running = is_in_use(run_dir)
        _show(console, _select(environment, follower.read_new()), as_json=as_json)
    if follower.num_unreadable:
        print_line(
            progress_console(),
            f"warning: {follower.num_unreadable} lines of {TRANSCRIPTS_FILE} "
            "cannot be read; another version of Ludus may have written them",
            "yellow",
        )


def _find_run_folder(run: str) -> Path:
    for folder in (Path(run), _RUNS / run):
        if (folder / METRICS_FILE).exists():
            return folder
    raise NotFoundError(f"there is no run '{run}'; name the folder of a run, or a run in '{_RUNS}'")


def _select(environment: str | None, transcripts: list[Transcript]) -> list[Transcript]:
    return [
        transcript for transcript in transcripts if environment in (None, transcript.environment)
    ]


def _show(console: Console, transcripts: Iterable[Transcript], *, as_json: bool) -> None:
    for transcript in transcripts:
        if as_json:
            typer.echo(transcript.model_dump_json())
        else:
            show_transcript(console, transcript)


def show_transcript(console: Console, transcript: Transcript) -> None:
    """Print an episode, with prompts dimmed and responses in bold."""
    console.rule(Text(describe_episode(transcript), style="bold"), align="left", style="dim")
    for turn in transcript.turns:
        _show_turn(console, turn)
    if transcript.num_turns_left_out:
        print_line(console, f"  ... and {transcript.num_turns_left_out} more turns", "dim")
    if transcript.failure:
        _show_message(console, "failure", transcript.failure, "red")
    print_line(console, f"  {describe_outcome(transcript)}\n", "dim")


def _show_turn(console: Console, turn: TranscriptTurn) -> None:
    for message in turn.shown:
        _show_message(console, message.role, message.text, "dim")
    _show_message(console, "policy", turn.answer, "bold")
    consequence = describe_consequence(turn)
    if consequence:
        print_line(console, f"  -> {consequence}", "cyan")


def _show_message(console: Console, role: str, text: str, style: str) -> None:
    console.print(Text(f"  {role}", style="dim italic"))
    # A model's output must not control the terminal.
    printable = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    console.print(Padding(Text(printable or "(empty)", style=style), (0, 0, 0, 4)))
