"""A run in a cluster on this terminal: the same progress as that of a run on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import typer
from pydantic import ValidationError
from rich.console import Console

from ludus.proto.errors import LudusError, UserError
from ludus.proto.runs import LOG_ROW_PREFIX, MetricsRow
from ludus.services.cli.console import progress_console, say
from ludus.services.cli.live_view import PlainView, TerminalView, progress_view
from ludus.services.cli.progress import RunProgress
from ludus.services.cli.train_command import show_results
from ludus.services.cli.trainer_process import TrainerOutput
from ludus.services.runs.cluster import RunsCluster, run_config_in
from ludus.services.runs.fetch import fetch
from ludus.services.runs.follow import RunUpdate, follow
from ludus.services.runs.platform import Release
from ludus.services.runs.state import RunPhase, RunState

INTERRUPTED = 130
FAILED = 1

_PLACES = {
    RunPhase.SUBMITTED: "waiting for KubeRay",
    RunPhase.QUEUED: "waiting in its queue",
    RunPhase.SUSPENDED: "suspended",
    RunPhase.STARTING: "waiting for pods",
    RunPhase.RETRYING: "trying again after a failure",
    RunPhase.ENDING: "being deleted",
}


def row_in_line(line: str) -> MetricsRow | None:
    """The row that a line of a driver's log holds; None where it is another line."""
    if not line.startswith(LOG_ROW_PREFIX):
        return None
    try:
        return MetricsRow.model_validate_json(line.removeprefix(LOG_ROW_PREFIX))
    except ValidationError:
        return None  # cut off in the middle, by the end of a pod


class RunShow:
    """Takes in what becomes of a run, and shows it."""

    def __init__(self, view: PlainView | TerminalView, num_steps: int) -> None:
        self.progress = RunProgress(num_steps)
        self.output = TrainerOutput()
        self._view = view
        self._told: set[str] = set()

    def take(self, update: RunUpdate) -> None:
        """Show an update."""
        rows = [row_in_line(line) for line in update.lines]
        self.progress.update(row for row in rows if row is not None)
        for line, row in zip(update.lines, rows, strict=True):
            if row is None:
                self.output.feed(line)
        while self.output.warnings:
            self._warn(self.output.warnings.popleft())
        for trouble in update.troubles:
            self._warn(trouble)
        state = update.state
        self.progress.place = _PLACES.get(state.phase, "")
        if state.phase is RunPhase.RETRYING:
            attempts = f"{state.attempts_failed} of {state.attempts_allowed} attempts failed"
            self.progress.place += f" ({attempts})"
        self.progress.is_stopping = state.phase is RunPhase.STOPPING
        self._view.refresh(self.progress)

    def finish(self) -> None:
        """Show what was not shown yet."""
        self._view.finish(self.progress)

    def _warn(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self._view.warn(message)


async def num_steps_of(cluster: RunsCluster, run: str) -> int:
    """How many steps a run shall take; 0 where nothing says it any more."""
    from ludus.proto.config import validate_run_json

    config_map = await cluster.config_map(run)
    if config_map is None:
        return 0
    return validate_run_json(run_config_in(config_map)).training.num_steps


async def watch(
    cluster: RunsCluster, run: str, *, within_s: float | None = None
) -> tuple[RunState, TrainerOutput]:
    """How a run ended, shown until then.

    Raises:
        TimeoutError: it has not ended in time.
        NotFoundError: somebody has deleted it.
    """
    with progress_view(progress_console()) as view:
        show = RunShow(view, await num_steps_of(cluster, run))
        async with asyncio.timeout(within_s), aclosing(follow(cluster, run)) as updates:
            async for update in updates:
                show.take(update)
        show.finish()
    return update.state, show.output


async def show_end(
    cluster: RunsCluster,
    release: Release | None,
    end: tuple[RunState, TrainerOutput],
    folder: Path | None,
) -> None:
    """Explain how a run ended, and exit with the code of that; bring its results if it is well.

    Args:
        folder: where the results go; None leaves them there.
    """
    state, output = end
    console = progress_console()
    if state.phase is RunPhase.STOPPED:
        say(console, f"stopped with a checkpoint; continue with: ludus resume {state.name}")
        raise typer.Exit(INTERRUPTED)
    if state.phase is not RunPhase.SUCCEEDED:
        raise typer.Exit(explain_failure(console, state, output))
    if release is not None and folder is not None:
        await bring(cluster, release, state.name, folder)


async def bring(cluster: RunsCluster, release: Release, run: str, folder: Path) -> None:
    """Fetch the results and show them; a run that went well stays well where that fails."""
    try:
        await fetch(cluster, release, run, folder)
    except LudusError as error:
        say(progress_console(), f"warning: the results stay in the cluster: {error}", "yellow")
        say(progress_console(), f"bring them with: ludus fetch {run}")
        return
    show_results(folder, {"train on": f"ludus resume {run} --set training.num_steps={{more}}"})


def explain_failure(console: Console, state: RunState, output: TrainerOutput) -> int:
    """Say why a run failed; the exit code."""
    if state.phase is RunPhase.REFUSED:
        say(console, f"error: KubeRay refuses the RayJob: {state.reason}")
        return UserError.exit_code
    errors = output.errors or _errors_in(state.message)
    for error in errors[-1:]:
        say(console, f"error: {error}")
    if not errors:
        for line in state.message.splitlines()[-10:] or output.tail:
            say(console, f"  {line}")
    attempts = f" after {state.attempts_failed} attempts" if state.attempts_failed > 1 else ""
    reason = state.reason or "it failed"
    say(console, f"run '{state.name}' ended{attempts}: {reason}; see: ludus logs {state.name}")
    return UserError.exit_code if state.exit_code == UserError.exit_code else FAILED


def _errors_in(message: str) -> Sequence[str]:
    output = TrainerOutput()
    for line in message.splitlines():
        output.feed(line)
    return output.errors
