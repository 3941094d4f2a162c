"""`ludus list`, `status`, `logs`, `stop` and `fetch`: commands for existing runs on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ludus.proto.errors import ClusterError, ConfigError, LudusError, NotFoundError
from ludus.proto.runs import LOG_ROW_PREFIX, SUMMARY_FILE
from ludus.services.cli import options
from ludus.services.cli.console import (
    get_stderr,
    get_stdout,
    make_table,
    print_line,
    print_warning,
    show_activity,
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
    from ludus.services.cli.run_view import read_progress
    from ludus.services.runs import operations
    from ludus.services.runs.state import find_pod_troubles, read_pod_phase, read_pod_role

    state = await operations.read_run_state(cluster, run)
    console = get_stdout()
    attempt_text = f"attempt {state.num_attempts_failed + 1} of {state.num_attempts_allowed}"
    print_line(console, f"{run}: {_format_state(state)} · {attempt_text}")
    pods = await cluster.list_pods(state.ray_cluster)
    progress = await read_progress(cluster, run)
    if progress is not None:
        print_line(console, progress.format_line())
    if pods:
        table = make_table("pod", "role", "phase", "node")
        for pod in pods:
            phase, node = read_pod_phase(pod), pod["spec"].get("nodeName", "")
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
    from ludus.services.cli.run_view import read_log_lines
    from ludus.services.runs import operations

    state = await operations.read_run_state(cluster, run)
    if not follows:
        _print_log(await read_log_lines(cluster, state, release_name))
    elif state.is_over:
        await _show_ended_run(cluster, state, release_name, folder)
    else:
        await _follow_run(cluster, run, release_name, folder)


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
    status_command = cluster.format_command(f"status {run}")
    match await operations.stop(cluster, run, deletes_now=deletes_now):
        case operations.StopOutcome.NOT_RUNNING:
            print_line(console, f"run '{run}' has already ended; see: {status_command}")
        case operations.StopOutcome.DELETED:
            command = cluster.format_command(f"resume {run}")
            print_line(console, f"run '{run}' is deleted; its checkpoints remain: {command}")
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
    is_deleted: Annotated[
        bool,
        typer.Option(
            "--deleted", help="Fetch a deleted run, whose folder is still on the release's volume."
        ),
    ] = False,
    release_name: options.ReleaseName = None,
) -> None:
    """Copy the results of a run on a cluster to this machine, and write its report.

    Example: `ludus fetch demo`
    """
    from ludus.services.cli.run_view import show_fetched_run
    from ludus.services.report import write_report
    from ludus.services.runs import operations, volume
    from ludus.services.runs.names import explain_job_name_problem

    if is_deleted:
        problem = explain_job_name_problem(run)
        if problem:
            raise ConfigError(problem)
    elif await operations.find_state(cluster, run) is None:
        error = await cluster.make_missing_error(run)
        raise NotFoundError(f"{error}; if the run was deleted from the cluster, add --deleted")
    folder = folder or Path("runs") / run
    release = await cluster.find_run_release(run, release_name)
    with show_activity(get_stderr()) as report:
        await volume.fetch(cluster, release, run, folder, report, includes_checkpoints)
    if (folder / SUMMARY_FILE).exists():
        show_fetched_run(cluster, run, folder)
    else:
        print_line(get_stdout(), f"report      {write_report(folder)}")


def _print_log(lines: Sequence[str]) -> None:
    """Print the lines of a driver's log without its metrics rows."""
    for line in lines:
        if not line.startswith(LOG_ROW_PREFIX):
            write_text(line)


async def _show_ended_run(
    cluster: RunsCluster, state: ClusterRunState, release_name: str | None, folder: Path | None
) -> None:
    """Print the log and the final state of a run that has ended; fetch it if a folder is given."""
    from ludus.services.cli.run_view import RunEnd, read_log_lines, read_progress, show_end
    from ludus.services.cli.trainer_process import TrainerOutput
    from ludus.services.runs.state import RunPhase

    console, run, lines = get_stderr(), state.name, list[str]()
    try:
        if state.phase is not RunPhase.REFUSED:  # a refused run has no pods
            lines = await read_log_lines(cluster, state, release_name)
    except LudusError as error:
        print_warning(console, f"the log cannot be read: {error}")
    _print_log(lines)
    output = TrainerOutput()
    for line in lines:
        output.add_line(line)
    progress = await read_progress(cluster, run, lines)
    if progress is not None:
        print_line(console, progress.format_line())
    print_line(console, f"run '{run}' has ended: {_format_state(state)}")
    release = await cluster.find_run_release(run, release_name) if folder is not None else None
    end = RunEnd(state, output, None if progress is None else progress.step)
    await show_end(cluster, release, end, folder or Path("runs") / run)
    if folder is None:
        print_line(console, f"copy its results with: {cluster.format_command(f'fetch {run}')}")


async def _follow_run(
    cluster: RunsCluster, run: str, release_name: str | None, folder: Path | None
) -> None:
    """Show a run until it ends, then copy its results."""
    from ludus.services.cli.run_view import show_end, watch
    from ludus.services.runs.results_folder import RunOrigin, check_results_folder

    folder = folder or Path("runs") / run
    release = await cluster.find_run_release(run, release_name)
    check_results_folder(folder, RunOrigin(name=run, output_dir=release.platform.output_dir))
    await show_end(cluster, release, await watch(cluster, run), folder)


async def _await_stop(cluster: RunsCluster, run: str, timeout_s: int) -> None:
    from ludus.services.cli.run_view import describe_stop, explain_failure, watch
    from ludus.services.runs.state import RunPhase

    try:
        end = await watch(cluster, run, timeout_s=timeout_s)
    except TimeoutError:
        raise ClusterError(
            f"run '{run}' has not stopped within {timeout_s} s; wait longer with --timeout, see: "
            f"{cluster.format_command(f'status {run}')}, or delete the run with: "
            f"{cluster.format_command(f'stop {run} --now')}"
        ) from None
    if end.state.phase is not RunPhase.STOPPED:
        raise typer.Exit(explain_failure(cluster, end))
    print_line(get_stderr(), describe_stop(cluster, end))


def _format_state(state: ClusterRunState) -> str:
    return f"{state.phase}: {state.reason}" if state.reason else str(state.phase)
