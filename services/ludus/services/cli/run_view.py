"""The view of a run on a cluster, which shows progress like the view of a local run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import typer
from pydantic import ValidationError
from rich.console import Console

from ludus.env.text.terminal import format_notice
from ludus.proto.config import validate_run_json
from ludus.proto.errors import LudusError, UserError
from ludus.proto.runs import LOG_ROW_PREFIX, MetricsRow
from ludus.services.cli.console import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    get_stderr,
    print_line,
    print_warning,
)
from ludus.services.cli.progress import RunProgress, show_progress
from ludus.services.cli.train_command import show_results
from ludus.services.cli.trainer_process import TrainerOutput
from ludus.services.runs.cluster import RunsCluster, read_run_config_json
from ludus.services.runs.follow import RunUpdate, follow_run
from ludus.services.runs.platform import Release
from ludus.services.runs.state import ClusterRunState, RunPhase
from ludus.services.runs.volume import fetch

_WAITING_REASONS = {
    RunPhase.SUBMITTED: "waiting for KubeRay",
    RunPhase.QUEUED: "queued",
    RunPhase.SUSPENDED: "suspended",
    RunPhase.STARTING: "waiting for pods",
    RunPhase.RETRYING: "retrying after a failure",
    RunPhase.DELETING: "being deleted",
}


def parse_row(line: str) -> MetricsRow | None:
    """Parse a metrics row from a line of the driver's log; return None if the line has none."""
    if not line.startswith(LOG_ROW_PREFIX):
        return None
    try:
        return MetricsRow.model_validate_json(line.removeprefix(LOG_ROW_PREFIX))
    except ValidationError:
        return None  # the line was truncated when the pod exited


async def read_num_steps(cluster: RunsCluster, run: str) -> int:
    """Return the number of steps of a run; 0 if its ConfigMap no longer exists."""
    config_map = await cluster.find_config_map(run)
    if config_map is None:
        return 0
    return validate_run_json(read_run_config_json(config_map)).training.num_steps


async def watch(
    cluster: RunsCluster, run: str, *, timeout_s: float | None = None
) -> tuple[ClusterRunState, TrainerOutput]:
    """Show a run until it ends, and return its final state and output.

    Raises:
        TimeoutError: the run has not ended within `timeout_s` seconds.
        NotFoundError: the run was deleted.
    """
    output, shown_warnings = TrainerOutput(), set[str]()
    with show_progress(get_stderr()) as view:
        progress = RunProgress(await read_num_steps(cluster, run))
        async with asyncio.timeout(timeout_s), aclosing(follow_run(cluster, run)) as updates:
            async for update in updates:
                _apply_update(update, progress, output)
                warnings = dict.fromkeys((*output.warnings, *update.troubles))
                for warning in (text for text in warnings if text not in shown_warnings):
                    view.warn(warning)
                shown_warnings.update(warnings)
                output.warnings.clear()
                view.refresh(progress)
        view.finish(progress)
    return update.state, output


def _apply_update(update: RunUpdate, progress: RunProgress, output: TrainerOutput) -> None:
    for line in update.lines:
        row = parse_row(line)
        if row is None:
            output.add_line(line)
        else:
            progress.update([row])
    state = update.state
    progress.waiting_reason = _WAITING_REASONS.get(state.phase, "")
    if state.phase is RunPhase.RETRYING:
        failed_text = f"{state.num_attempts_failed} of {state.num_attempts_allowed} attempts failed"
        progress.waiting_reason += f" ({failed_text})"
    progress.is_stopping = state.phase is RunPhase.STOPPING


async def show_end(
    cluster: RunsCluster,
    release: Release | None,
    state: ClusterRunState,
    output: TrainerOutput,
    folder: Path,
) -> None:
    """Fetch and show the results of a run that succeeded; otherwise explain its end and exit.

    Args:
        release: release of the run; None leaves the results on the cluster.
        folder: local folder for the results.
    """
    console = get_stderr()
    if state.phase is RunPhase.STOPPED:
        print_line(console, f"stopped with a checkpoint; continue with: ludus resume {state.name}")
        raise typer.Exit(EXIT_INTERRUPTED)
    if state.phase is not RunPhase.SUCCEEDED:
        raise typer.Exit(explain_failure(console, state, output))
    if release is not None:
        await fetch_results(cluster, release, state.name, folder)


async def fetch_results(cluster: RunsCluster, release: Release, run: str, folder: Path) -> None:
    """Fetch and print the results; if that fails, print a warning and how to retry."""
    try:
        await fetch(cluster, release, run, folder)
    except LudusError as error:
        print_warning(get_stderr(), f"the results are still on the cluster: {error}")
        print_line(get_stderr(), f"fetch them with: ludus fetch {run}")
    else:
        show_fetched_run(folder, run)


def show_fetched_run(folder: Path, run: str) -> None:
    """Print the results in a fetched run folder, and write the report."""
    show_results(folder, {"train more": f"ludus resume {run} --set training.num_steps={{more}}"})


def explain_failure(console: Console, state: ClusterRunState, output: TrainerOutput) -> int:
    """Print why a run failed, and return the exit code of the command."""
    if state.phase is RunPhase.REFUSED:
        print_line(console, format_notice("error", f"KubeRay refused the RayJob: {state.reason}"))
        return UserError.exit_code
    errors = output.errors or _find_errors(state.message)
    for error in errors[-1:]:
        print_line(console, format_notice("error", error))
    if not errors:
        for line in state.message.splitlines()[-10:] or output.last_lines:
            print_line(console, f"  {line}")
    num_attempts, reason = state.num_attempts_failed, state.reason or "no reason was reported"
    attempts_text = f" after {num_attempts} attempts" if num_attempts > 1 else ""
    hint = f"see: ludus logs {state.name}"
    print_line(console, f"run '{state.name}' failed{attempts_text}: {reason}; {hint}")
    return UserError.exit_code if state.exit_code == UserError.exit_code else EXIT_FAILED


def _find_errors(message: str) -> Sequence[str]:
    output = TrainerOutput()
    for line in message.splitlines():
        output.add_line(line)
    return output.errors
