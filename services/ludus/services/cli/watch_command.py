"""`ludus watch`: what the policy says, while its run goes on."""

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
from ludus.services.cli.console import progress_console, results_console, say
from ludus.services.cli.records_follower import RecordsFollower
from ludus.services.transcripts import describe_consequence, describe_episode, describe_outcome

_LOOK_EVERY_S = 0.5
_RUNS = Path("runs")


def watch(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder of a run, or its name in runs/.")
    ],
    last: Annotated[
        int, typer.Option(min=0, help="Episodes to begin with, of those that are there already.")
    ] = 3,
    environment: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only episodes of this environment.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print them as they stand in transcripts.jsonl.")
    ] = False,
) -> None:
    """Show what the policy says: episodes that are trained on, until the run ends.

    A run writes down metrics.transcripts_per_step episodes of each step. Of a run that is over
    the last ones are shown.

    Example: `ludus watch demo`

    Example: `ludus watch runs/demo --last 100 --json | jq .turns[0].answer`
    """
    run_dir = _folder_of(run)
    follower = RecordsFollower(run_dir / TRANSCRIPTS_FILE, Transcript)
    console = results_console()
    goes_on = is_in_use(run_dir)
    wanted = _of(environment, follower.new())
    _show(console, wanted[len(wanted) - min(last, len(wanted)) :], as_json=as_json)
    while goes_on:
        time.sleep(_LOOK_EVERY_S)
        # Asked before the file is read: what the run wrote last is shown, too.
        goes_on = is_in_use(run_dir)
        _show(console, _of(environment, follower.new()), as_json=as_json)
    if follower.num_unreadable:
        say(
            progress_console(),
            f"warning: {follower.num_unreadable} lines of {TRANSCRIPTS_FILE} "
            "cannot be read; another version of Ludus may have written them",
            "yellow",
        )


def _folder_of(run: str) -> Path:
    for folder in (Path(run), _RUNS / run):
        if (folder / METRICS_FILE).exists():
            return folder
    raise NotFoundError(
        f"expected the folder of a run, or the name of one in '{_RUNS}', got '{run}', and there is "
        "no run"
    )


def _of(environment: str | None, transcripts: list[Transcript]) -> list[Transcript]:
    return [one for one in transcripts if environment in (None, one.environment)]


def _show(console: Console, transcripts: Iterable[Transcript], *, as_json: bool) -> None:
    for one in transcripts:
        if as_json:
            typer.echo(one.model_dump_json())
        else:
            show_transcript(console, one)


def show_transcript(console: Console, transcript: Transcript) -> None:
    """Print an episode: what was shown faintly, what the policy said in full."""
    console.rule(Text(describe_episode(transcript), style="bold"), align="left", style="dim")
    for turn in transcript.turns:
        _show_turn(console, turn)
    if transcript.num_turns_left_out:
        say(console, f"  ... and {transcript.num_turns_left_out} turns more", "dim")
    if transcript.failure:
        _show_words(console, "failure", transcript.failure, "red")
    say(console, f"  {describe_outcome(transcript)}\n", "dim")


def _show_turn(console: Console, turn: TranscriptTurn) -> None:
    for said in turn.shown:
        _show_words(console, said.role, said.text, "dim")
    _show_words(console, "policy", turn.answer, "bold")
    came_of_it = describe_consequence(turn)
    if came_of_it:
        say(console, f"  -> {came_of_it}", "cyan")


def _show_words(console: Console, role: str, words: str, style: str) -> None:
    console.print(Text(f"  {role}", style="dim italic"))
    # What a model says must not steer the terminal.
    plain = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in words
    )
    console.print(Padding(Text(plain or "(nothing)", style=style), (0, 0, 0, 4)))
