"""`ludus list`, `status`, `logs`, `stop` and `fetch`: commands for existing runs on a cluster."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ludus.proto.errors import ClusterError, LudusError, UserError
from ludus.proto.runs import SUMMARY_FILE
from ludus.services.cli import options
from ludus.services.cli.console import (
    make_progress_console,
    make_results_console,
    make_table,
    print_line,
)
from ludus.services.numbers import format_duration

if TYPE_CHECKING:
    from ludus.services.runs.cluster import RunsCluster
    from ludus.services.runs.state import ClusterRunState

_DEFAULT_STOP_TIMEOUT_S = 900


@options.cluster_command
async def list_runs(cluster: RunsCluster) -> None:
    """List the runs on a cluster.

    Example: `ludus list --namespace arena`
    """
    from ludus.services.runs import operations

    states = await operations.list_states(cluster)
    if not states:
        print_line(make_progress_console(), f"no runs in namespace '{cluster.namespace}'")
        return
    table = make_table("run", "state", "attempts", "queue", "age")
    for state in states:
        attempts_text = f"{state.num_attempts_failed + 1} of {state.num_attempts_allowed}"
        cells = (
            state.name,
            _format_state(state),
            attempts_text,
            state.queue,
            _format_age(state.created_at),
        )
        table.add_row(*map(Text, cells))
    make_results_console().print(table)


@options.cluster_command
async def status(cluster: RunsCluster, run: options.RunName) -> None:
    """Print the state of a run on a cluster: progress, pods, and why pods are waiting.

    Example: `ludus status demo`
    """
    from ludus.services.runs import operations
    from ludus.services.runs.state import find_pod_troubles, read_pod_role

    state = await operations.find_state(cluster, run)
    if state is None:
        await cluster.read_job(run)  # raises a NotFoundError that names the existing runs
        return
    console = make_results_console()
    attempt_text = f"attempt {state.num_attempts_failed + 1} of {state.num_attempts_allowed}"
    print_line(console, f"{run}: {_format_state(state)} · {attempt_text}")
    pods = await cluster.list_pods(state.ray_cluster)
    progress_line = await _format_progress(cluster, run)
    if progress_line:
        print_line(console, progress_line)
    if pods:
        table = make_table("pod", "role", "phase", "node")
        for pod in pods:
            phase, node = pod["status"].get("phase", ""), pod["spec"].get("nodeName", "")
            table.add_row(*map(Text, (pod["metadata"]["name"], read_pod_role(pod), phase, node)))
        console.print(table)
    for trouble in find_pod_troubles(pods):
        print_line(console, trouble)


@options.cluster_command
async def logs(
    cluster: RunsCluster,
    run: options.RunName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show the progress until the run ends.")
    ] = False,
    release_name: options.ReleaseName = None,
    folder: options.ResultsFolder = None,
) -> None:
    """Print the driver's log of a run on a cluster, or follow the run until it ends.

    Example: `ludus logs -f demo`
    """
    from ludus.services.cli.run_view import parse_row
    from ludus.services.runs.follow import read_update
    from ludus.services.runs.volume import read_log

    if follow:
        await _follow_run(cluster, run, release_name, folder)
        return
    update = await read_update(cluster, run)
    for line in update.lines:
        if parse_row(line) is None:
            typer.echo(line)
    if not update.lines:
        # The head pod no longer exists, but the run folder contains its log.
        typer.echo(await read_log(cluster, await cluster.read_release(release_name), run), nl=False)


@options.cluster_command
async def stop(
    cluster: RunsCluster,
    run: options.RunName,
    deletes_now: Annotated[
        bool,
        typer.Option("--now", help="Delete the run at once; steps since a checkpoint are lost."),
    ] = False,
    timeout_s: Annotated[
        int, typer.Option("--timeout", min=1, help="Seconds to wait for the checkpoint.")
    ] = _DEFAULT_STOP_TIMEOUT_S,
) -> None:
    """Stop a run on a cluster after its current step, with a checkpoint.

    Example: `ludus stop demo`
    """
    from ludus.services.runs import operations

    console = make_progress_console()
    match await operations.stop(cluster, run, deletes_now=deletes_now):
        case operations.StopOutcome.OVER:
            print_line(console, f"run '{run}' has already ended; see: ludus status {run}")
        case operations.StopOutcome.DELETED:
            print_line(
                console, f"run '{run}' is deleted; its checkpoints remain: ludus resume {run}"
            )
        case operations.StopOutcome.REQUESTED:
            print_line(console, f"run '{run}' stops after its current step, with a checkpoint")
            await _await_stop(cluster, run, timeout_s)


@options.cluster_command
async def fetch(
    cluster: RunsCluster,
    run: options.RunName,
    folder: options.ResultsFolder = None,
    with_checkpoints: Annotated[
        bool, typer.Option("--all", help="Fetch checkpoints and models, too.")
    ] = False,
    release_name: options.ReleaseName = None,
) -> None:
    """Copy the results of a run on a cluster to this machine, and write its report.

    Example: `ludus fetch demo`
    """
    from ludus.services.cli.run_view import show_fetched
    from ludus.services.report import write_report
    from ludus.services.runs import volume

    folder = folder or Path("runs") / run
    target_release = await cluster.read_release(release_name)
    with make_progress_console().status(f"fetching {run}"):
        await volume.fetch(cluster, target_release, run, folder, with_checkpoints=with_checkpoints)
    if (folder / SUMMARY_FILE).exists():
        show_fetched(folder, run)
    else:
        print_line(make_results_console(), f"report      {write_report(folder)}")


async def _format_progress(cluster: RunsCluster, run: str) -> str:
    """Return one line with the progress from the driver's log; '' if the log cannot be read."""
    from ludus.services.cli.progress import RunProgress
    from ludus.services.cli.run_view import parse_row, read_num_steps
    from ludus.services.runs.follow import read_update

    try:
        lines = (await read_update(cluster, run)).lines
    except LudusError:
        return ""
    rows = [row for line in lines if (row := parse_row(line)) is not None]
    progress = RunProgress(await read_num_steps(cluster, run))
    progress.update(rows)
    return progress.format_line() if rows else ""


async def _follow_run(
    cluster: RunsCluster, run: str, release_name: str | None, folder: Path | None
) -> None:
    from ludus.services.cli.run_view import show_end, watch
    from ludus.services.runs.state import read_state

    initial_state = read_state(await cluster.read_job(run))
    end = await watch(cluster, run)
    if initial_state.is_over and folder is None:
        await show_end(cluster, None, end, None)
        return
    try:
        target_release = await cluster.read_release(release_name)
    except UserError:
        target_release = None  # the user may follow runs, but may not read releases
    await show_end(cluster, target_release, end, folder or Path("runs") / run)


async def _await_stop(cluster: RunsCluster, run: str, timeout_s: int) -> None:
    from ludus.services.cli.run_view import explain_failure, watch
    from ludus.services.runs.state import RunPhase

    try:
        state, output = await watch(cluster, run, timeout_s=timeout_s)
    except TimeoutError:
        raise ClusterError(
            f"run '{run}' has not stopped within {timeout_s} s; wait longer with --timeout, see: "
            f"ludus status {run}, or delete the run with: ludus stop {run} --now"
        ) from None
    console = make_progress_console()
    if state.phase is not RunPhase.STOPPED:
        raise typer.Exit(explain_failure(console, state, output))
    print_line(console, f"stopped with a checkpoint; continue with: ludus resume {run}")


def _format_state(state: ClusterRunState) -> str:
    return f"{state.phase}: {state.reason}" if state.reason else str(state.phase)


def _format_age(created_at: str) -> str:
    age = datetime.now(UTC) - datetime.fromisoformat(created_at)
    return format_duration(age.total_seconds())
