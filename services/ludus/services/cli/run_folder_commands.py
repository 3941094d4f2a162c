"""`ludus report` and `watch`: commands for a run on this machine."""

from __future__ import annotations

import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ludus.env.text.terminal import clean_for_terminal
from ludus.proto.errors import ConfigError
from ludus.proto.paths import expand_home
from ludus.proto.run_lock import is_in_use
from ludus.proto.runs import (
    TRANSCRIPTS_FILE,
    Transcript,
    TranscriptTurn,
)
from ludus.services.cli.console import (
    get_stderr,
    get_stdout,
    print_line,
    print_warning,
    write_json,
)
from ludus.services.cli.options import Run
from ludus.services.cli.records_follower import RecordsFollower
from ludus.services.cli.run_names import find_run_folder
from ludus.services.display import describe_consequence, describe_episode, describe_outcome

POLL_INTERVAL_S = 0.5


StepOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Training step that the report shows in detail: who waited for whom.",
        show_default="a typical one and the longest",
    ),
]


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folders of runs, or their names in runs/."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Output file of the report.",
            show_default="RUN/report.html, or comparison.html for several runs",
            callback=expand_home,
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write only the learning curves, as SVG, to this file.",
            callback=expand_home,
        ),
    ] = None,
    step: StepOption = None,
    opens_file: Annotated[
        bool, typer.Option("--open", help="Open the written file in the browser.")
    ] = False,
) -> None:
    """Write the report of a run, or compare several runs: one self-contained HTML page.

    A comparison shows the results, the curves of all runs over one another, and the differences of
    their configurations. Runs may be finished, stopped, or still running.

    Example: `ludus report demo --open`

    Example: `ludus report demo demo2 --output comparison.html`
    """
    from ludus.services.report import write_comparison, write_figure, write_report

    run_dirs = _find_different_folders(runs)
    if len(run_dirs) > 1 and (figure or step is not None):
        option = "--figure" if figure else "--step"
        raise ConfigError(f"{option} shows one run, got {len(run_dirs)}; name one run")
    if figure:
        path = write_figure(run_dirs[0], figure)
    elif len(run_dirs) > 1:
        path = write_comparison(run_dirs, output)
    else:
        path = write_report(run_dirs[0], output, step)
    print_line(get_stdout(), str(path))
    if opens_file:
        webbrowser.open(path.resolve().as_uri())


def _find_different_folders(runs: Sequence[str]) -> list[Path]:
    """Return the folders of runs, each folder once."""
    folders: dict[Path, Path] = {}
    for folder in map(find_run_folder, runs):
        folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def watch(
    run: Run,
    num_existing: Annotated[
        int, typer.Option("--last", min=0, help="Number of existing episodes to show first.")
    ] = 3,
    environment: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Show episodes of this environment only. Default: all."),
    ] = None,
    prints_json: Annotated[
        bool, typer.Option("--json", help="Print the lines of transcripts.jsonl.")
    ] = False,
) -> None:
    """Show the prompts and responses of training episodes until the run ends.

    A run records metrics.transcripts_per_step episodes per step. For a finished run, the last
    episodes are shown.

    Example: `ludus watch demo`

    Example: `ludus watch runs/demo --last 100 --json | jq .turns[0].answer`
    """
    run_dir = find_run_folder(run)
    follower = RecordsFollower(run_dir / TRANSCRIPTS_FILE, Transcript)

    def read_new_transcripts() -> list[Transcript]:
        return [
            transcript
            for transcript in follower.read_new()
            if environment in (None, transcript.environment)
        ]

    is_running = is_in_use(run_dir)
    transcripts = read_new_transcripts()
    _show_transcripts(transcripts[max(0, len(transcripts) - num_existing) :], prints_json)
    while is_running:
        time.sleep(POLL_INTERVAL_S)
        # Checked before the file is read, so that no episode at the end of the run is missed.
        is_running = is_in_use(run_dir)
        _show_transcripts(read_new_transcripts(), prints_json)
    if follower.num_unreadable:
        print_warning(
            get_stderr(),
            f"{follower.num_unreadable} lines of {TRANSCRIPTS_FILE} cannot be read; another "
            "version of Ludus may have written them",
        )


def _show_transcripts(transcripts: Sequence[Transcript], prints_json: bool) -> None:
    for transcript in transcripts:
        if prints_json:
            write_json(transcript.model_dump_json())
        else:
            show_transcript(get_stdout(), transcript)


def show_transcript(console: Console, transcript: Transcript) -> None:
    """Print an episode, with prompts dimmed and responses in bold."""
    console.rule(
        Text(clean_for_terminal(describe_episode(transcript)), style="bold"),
        align="left",
        style="dim",
    )
    for turn in transcript.turns:
        _show_turn(console, turn)
    if transcript.num_turns_left_out:
        print_line(console, f"  ... and {transcript.num_turns_left_out} more turns", "dim")
    for message in transcript.unanswered:
        _show_message(console, message.role, message.text, "dim")
    if transcript.failure:
        _show_message(console, "failure", transcript.failure, "red")
    print_line(console, f"  {clean_for_terminal(describe_outcome(transcript))}\n", "dim")


def _show_turn(console: Console, turn: TranscriptTurn) -> None:
    for message in turn.shown:
        _show_message(console, message.role, message.text, "dim")
    _show_message(console, "policy", turn.answer, "bold")
    consequence = describe_consequence(turn)
    if consequence:
        print_line(console, f"  -> {clean_for_terminal(consequence)}", "cyan")


def _show_message(console: Console, role: str, text: str, style: str) -> None:
    console.print(Text(f"  {clean_for_terminal(role)}", style="dim italic"))
    cleaned_text = clean_for_terminal(text, keep_newlines=True)
    console.print(Padding(Text(cleaned_text or "(empty)", style=style), (0, 0, 0, 4)))
