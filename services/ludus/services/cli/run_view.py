"""The view of a run on a cluster, which shows progress like the view of a local run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import typer
from pydantic import ValidationError

from ludus.env.text.terminal import format_notice
from ludus.proto.config import validate_run_json
from ludus.proto.errors import ConfigError, LudusError, UserError
from ludus.proto.runs import LOG_ROW_PREFIX, MetricsRow
from ludus.services.cli.console import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    get_stderr,
    print_line,
    show_activity,
)
from ludus.services.cli.progress import RunProgress, show_progress
from ludus.services.cli.train_command import show_results
from ludus.services.cli.trainer_process import TrainerOutput
from ludus.services.run_list import get_num_steps
from ludus.services.runs.cluster import RunsCluster, read_run_config_json
from ludus.services.runs.follow import RunUpdate, follow_run, read_update
from ludus.services.runs.platform import Release
from ludus.services.runs.results_folder import suggest_folder
from ludus.services.runs.state import ClusterRunState, RunPhase
from ludus.services.runs.volume import fetch, read_log

_WAITING_REASONS = {
    RunPhase.SUBMITTED: "waiting for KubeRay",
    RunPhase.QUEUED: "queued",
    RunPhase.SUSPENDED: "suspended",
    RunPhase.STARTING: "waiting for pods",
    RunPhase.RETRYING: "retrying after a failure",
    RunPhase.DELETING: "being deleted",
    RunPhase.STOPPED: "stopped",
    RunPhase.FAILED: "failed",
    RunPhase.REFUSED: "refused",
}


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run on a cluster."""

    state: ClusterRunState
    output: TrainerOutput
    step: int | None
    """Number of trained steps; None if it is unknown."""


def parse_row(line: str) -> MetricsRow | None:
    """Parse a metrics row from a line of the driver's log; return None if the line has none."""
    if not line.startswith(LOG_ROW_PREFIX):
        return None
    try:
        return MetricsRow.model_validate_json(line.removeprefix(LOG_ROW_PREFIX))
    except ValidationError:
        return None  # the line was truncated when the pod exited


async def read_num_steps(cluster: RunsCluster, run: str) -> int:
    """Return the number of steps of a run; 0 if no ConfigMap contains the number."""
    config_map = await cluster.find_config_map(run)
    if config_map is None:
        return 0
    return get_num_steps(validate_run_json(read_run_config_json(config_map))) or 0


async def read_progress(
    cluster: RunsCluster, run: str, lines: Sequence[str] | None = None
) -> RunProgress | None:
    """Return the progress of a run according to lines of its log; None if no line tells it.

    Args:
        lines: lines of the driver's log; None reads them from the pod of the head.
    """
    if lines is None:
        try:
            lines = (await read_update(cluster, run)).lines
        except LudusError:
            return None
    rows = [row for line in lines if (row := parse_row(line)) is not None]
    if not rows:
        return None
    progress = RunProgress(await read_num_steps(cluster, run))
    progress.update(rows)
    return progress


async def read_log_lines(
    cluster: RunsCluster, state: ClusterRunState, release_name: str | None
) -> list[str]:
    """Return the driver's log with its metrics rows, from the head or from the run folder.

    Raises:
        NotFoundError: there is no log, or no release that mounts the run folder.
        ClusterError: the log cannot be read.
    """
    lines = (await read_update(cluster, state.name)).lines if state.ray_cluster else []
    if lines:
        return lines
    # The head pod no longer exists, but the run folder contains its log.
    release = await cluster.find_run_release(state.name, release_name)
    with show_activity(get_stderr()) as report:
        return await read_log(cluster, release, state.name, report)


async def watch(
    cluster: RunsCluster, run: str, *, step: int | None = None, timeout_s: float | None = None
) -> RunEnd:
    """Show a run until it ends, and return its end.

    Args:
        step: number of trained steps, if it is known.

    Raises:
        TimeoutError: the run has not ended within `timeout_s` seconds.
        NotFoundError: the run was deleted.
    """
    output, shown_warnings = TrainerOutput(), set[str]()
    with show_progress(get_stderr()) as view:
        progress = RunProgress(await read_num_steps(cluster, run), step)
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
    return RunEnd(update.state, output, progress.step)


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
    cluster: RunsCluster, release: Release | None, end: RunEnd, folder: Path
) -> None:
    """Fetch and show the results of a run that succeeded; otherwise explain its end and exit.

    Args:
        release: release of the run; None leaves the results on the cluster.
        folder: local folder for the results.
    """
    console, state = get_stderr(), end.state
    if state.phase is RunPhase.STOPPED:
        print_line(console, describe_stop(cluster, end))
        raise typer.Exit(EXIT_INTERRUPTED)
    if state.phase is not RunPhase.SUCCEEDED:
        raise typer.Exit(explain_failure(cluster, end))
    if release is not None:
        await fetch_results(cluster, release, state.name, folder)


def describe_stop(cluster: RunsCluster, end: RunEnd) -> str:
    """Return a line about a stopped run: its checkpoint, and how to continue."""
    step_text = f"at step {end.step} " if end.step else ""
    command = cluster.format_command(f"resume {end.state.name}")
    return f"stopped {step_text}with a checkpoint; continue with: {command}"


async def fetch_results(cluster: RunsCluster, release: Release, run: str, folder: Path) -> None:
    """Fetch and print the results; if that fails, print how to retry, and exit with an error."""
    try:
        with show_activity(get_stderr()) as report:
            await fetch(cluster, release, run, folder, report)
    except LudusError as error:
        folder_option = f" --folder {suggest_folder(folder)}"
        command = cluster.format_command(
            f"fetch {run}{folder_option if isinstance(error, ConfigError) else ''}"
        )
        print_line(get_stderr(), f"error: the results are still on the cluster: {error}")
        print_line(get_stderr(), f"copy them with: {command}")
        raise typer.Exit(EXIT_FAILED) from None
    show_fetched_run(cluster, run, folder)


def show_fetched_run(cluster: RunsCluster, run: str, folder: Path) -> None:
    """Print the results in a fetched run folder, and write the report."""
    command = cluster.format_command(f"resume {run} --set training.num_steps={{more}}")
    show_results(folder, {"train more": command})


def explain_failure(cluster: RunsCluster, end: RunEnd) -> int:
    """Print why a run failed, and return the exit code of the command."""
    console, state, output = get_stderr(), end.state, end.output
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
    hint = f"see: {cluster.format_command(f'logs {state.name}')}"
    print_line(console, f"run '{state.name}' failed{attempts_text}: {reason}; {hint}")
    return UserError.exit_code if state.exit_code == UserError.exit_code else EXIT_FAILED


def _find_errors(message: str) -> Sequence[str]:
    output = TrainerOutput()
    for line in message.splitlines():
        output.add_line(line)
    return output.errors
