"""`ludus list`, `status`, `logs`, `stop` and `fetch`: commands for existing runs on a cluster."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ludus.proto.errors import ClusterError, LudusError, UserError
from ludus.proto.runs import SUMMARY_FILE
from ludus.services.cli import options
from ludus.services.cli.console import (
    get_stderr,
    get_stdout,
    make_table,
    print_line,
    write_text,
)
from ludus.services.numbers import format_duration

if TYPE_CHECKING:
    from ludus.services.runs.cluster import RunsCluster
    from ludus.services.runs.state import ClusterRunState


@options.make_cluster_command
async def list_runs(cluster: RunsCluster) -> None:
    """List the runs on a cluster.

    Example: `ludus list --namespace arena`
    """
    from ludus.services.runs import operations

    states = await operations.list_states(cluster)
    if not states:
        print_line(get_stderr(), f"no runs in namespace '{cluster.namespace}'")
        return
    table = make_table("run", "state", "attempts", "queue", "age")
    for state in states:
        attempts_text = f"{state.num_attempts_failed + 1} of {state.num_attempts_allowed}"
        age = datetime.now(UTC) - datetime.fromisoformat(state.created_at)
        age_text = format_duration(age.total_seconds())
        cells = state.name, _format_state(state), attempts_text, state.queue, age_text
        table.add_row(*map(Text, cells))
    get_stdout().print(table)


@options.make_cluster_command
async def show_status(cluster: RunsCluster, run: options.RunName) -> None:
    """Print the state of a run on a cluster: progress, pods, and why pods are waiting.

    Example: `ludus status demo`
    """
    from ludus.services.runs import operations
    from ludus.services.runs.state import find_pod_troubles, read_pod_role

    state = await operations.find_state(cluster, run)
    if state is None:
        await cluster.read_job(run)  # raises a NotFoundError that names the existing runs
        return
    console = get_stdout()
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


@options.make_cluster_command
async def show_logs(
    cluster: RunsCluster,
    run: options.RunName,
    follows: Annotated[
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

    if follows:
        await _follow_run(cluster, run, release_name, folder)
        return
    update = await read_update(cluster, run)
    for line in update.lines:
        if parse_row(line) is None:
            write_text(line)
    if not update.lines:
        # The head pod no longer exists, but the run folder contains its log.
        write_text(await read_log(cluster, await cluster.read_release(release_name), run))


@options.make_cluster_command
async def stop(
    cluster: RunsCluster,
    run: options.RunName,
    deletes_now: Annotated[
        bool,
        typer.Option(
            "--now", help="Delete the run at once; steps since the latest checkpoint are lost."
        ),
    ] = False,
    timeout_s: Annotated[
        int, typer.Option("--timeout", min=1, help="Seconds to wait for the checkpoint.")
    ] = 900,
) -> None:
    """Stop a run on a cluster after its current step, with a checkpoint.

    Example: `ludus stop demo`
    """
    from ludus.services.runs import operations

    console = get_stderr()
    match await operations.stop(cluster, run, deletes_now=deletes_now):
        case operations.StopOutcome.NOT_RUNNING:
            print_line(console, f"run '{run}' has already ended; see: ludus status {run}")
        case operations.StopOutcome.DELETED:
            message = f"run '{run}' is deleted; its checkpoints remain: ludus resume {run}"
            print_line(console, message)
        case operations.StopOutcome.REQUESTED:
            print_line(console, f"run '{run}' stops after its current step, with a checkpoint")
            await _await_stop(cluster, run, timeout_s)


@options.make_cluster_command
async def fetch(
    cluster: RunsCluster,
    run: options.RunName,
    folder: options.ResultsFolder = None,
    includes_checkpoints: Annotated[
        bool, typer.Option("--all", help="Fetch checkpoints and models, too.")
    ] = False,
    release_name: options.ReleaseName = None,
) -> None:
    """Copy the results of a run on a cluster to this machine, and write its report.

    Example: `ludus fetch demo`
    """
    from ludus.services.cli.run_view import show_fetched_run
    from ludus.services.report import write_report
    from ludus.services.runs import volume

    folder = folder or Path("runs") / run
    release = await cluster.read_release(release_name)
    with get_stderr().status(f"fetching {run}"):
        await volume.fetch(cluster, release, run, folder, includes_checkpoints=includes_checkpoints)
    if (folder / SUMMARY_FILE).exists():
        show_fetched_run(folder, run)
    else:
        print_line(get_stdout(), f"report      {write_report(folder)}")


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
    state, output = await watch(cluster, run)
    release = None
    if folder is not None or not initial_state.is_over:
        with contextlib.suppress(UserError):  # the user may lack access to releases
            release = await cluster.read_release(release_name)
    await show_end(cluster, release, state, output, folder or Path("runs") / run)


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
    console = get_stderr()
    if state.phase is not RunPhase.STOPPED:
        raise typer.Exit(explain_failure(console, state, output))
    print_line(console, f"stopped with a checkpoint; continue with: ludus resume {run}")


def _format_state(state: ClusterRunState) -> str:
    return f"{state.phase}: {state.reason}" if state.reason else str(state.phase)
