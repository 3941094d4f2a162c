"""`ludus list`, `status`, `logs`, `stop` and `fetch`: commands for existing runs on a cluster."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ludus.services.cli import cluster_options as options
from ludus.services.cli.console import print_line, progress_console, results_console
from ludus.services.numbers import format_duration

if TYPE_CHECKING:
    from ludus.services.runs.cluster import RunsCluster
    from ludus.services.runs.state import ClusterRunState

_DEFAULT_STOP_S = 900


def list_runs(namespace: options.Namespace = "", context: options.Context = "") -> None:
    """List the runs on a cluster.

    Example: `ludus list --namespace arena`
    """
    options.run_coroutine(_print_runs(namespace, context))


def status(
    run: options.Run, namespace: options.Namespace = "", context: options.Context = ""
) -> None:
    """Print the state of a run on a cluster: progress, pods, and why pods are waiting.

    Example: `ludus status demo`
    """
    options.run_coroutine(_print_status(run, namespace, context))


def logs(
    run: options.Run,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show the progress until the run ends.")
    ] = False,
    namespace: options.Namespace = "",
    context: options.Context = "",
    release: options.ReleaseName = None,
    folder: options.Output = None,
) -> None:
    """Print the driver's log of a run on a cluster, or follow the run until it ends.

    Example: `ludus logs -f demo`
    """
    work = (
        _follow_run(run, namespace, context, release, folder)
        if follow
        else _print_logs(run, namespace, context, release)
    )
    options.run_coroutine(work)


def stop(
    run: options.Run,
    now: Annotated[
        bool,
        typer.Option("--now", help="Delete the run at once; steps since a checkpoint are lost."),
    ] = False,
    wait_s: Annotated[
        int, typer.Option("--timeout", min=1, help="Seconds to wait for the checkpoint.")
    ] = _DEFAULT_STOP_S,
    namespace: options.Namespace = "",
    context: options.Context = "",
) -> None:
    """Stop a run on a cluster after its current step, with a checkpoint.

    Example: `ludus stop demo`
    """
    options.run_coroutine(_request_stop(run, now, wait_s, namespace, context))


def fetch(
    run: options.Run,
    folder: options.Output = None,
    with_checkpoints: Annotated[
        bool, typer.Option("--all", help="Fetch checkpoints and models, too.")
    ] = False,
    namespace: options.Namespace = "",
    context: options.Context = "",
    release: options.ReleaseName = None,
) -> None:
    """Copy the results of a run on a cluster to this machine, and write its report.

    Example: `ludus fetch demo`
    """
    options.run_coroutine(
        _fetch_run(
            run, folder or Path("runs") / run, with_checkpoints, (namespace, context, release)
        )
    )


async def _print_runs(namespace: str, context: str) -> None:
    from ludus.services.runs import operations
    from ludus.services.runs.cluster import connect_cluster

    async with connect_cluster(context, namespace) as cluster:
        states = await operations.list_states(cluster)
        if not states:
            print_line(progress_console(), f"no runs in namespace '{cluster.namespace}'")
            return
        table = _table("run", "state", "attempts", "queue", "age")
        for state, created_at in states:
            attempts = f"{state.attempts_failed + 1} of {state.attempts_allowed}"
            row = (state.name, _state_text(state), attempts, state.queue, _age(created_at))
            table.add_row(*map(Text, row))
        results_console().print(table)


async def _print_status(run: str, namespace: str, context: str) -> None:
    from ludus.services.runs import operations
    from ludus.services.runs.cluster import connect_cluster
    from ludus.services.runs.state import pod_role, pod_troubles

    async with connect_cluster(context, namespace) as cluster:
        state = await operations.find_state(cluster, run)
        if state is None:
            await cluster.job(run)  # raises an error that names the existing runs
            return
        console = results_console()
        attempt = f"attempt {state.attempts_failed + 1} of {state.attempts_allowed}"
        print_line(console, f"{run}: {_state_text(state)} · {attempt}")
        pods = await cluster.pods(state.ray_cluster)
        line = await _progress_line(cluster, run)
        if line:
            print_line(console, line)
        if pods:
            table = _table("pod", "role", "phase", "node")
            for pod in pods:
                pod_status: dict[str, Any] = pod.get("status") or {}
                node = (pod.get("spec") or {}).get("nodeName") or ""
                phase = str(pod_status.get("phase"))
                cells = (pod["metadata"]["name"], pod_role(pod), phase, node)
                table.add_row(*map(Text, cells))
            console.print(table)
        for trouble in pod_troubles(pods):
            print_line(console, trouble)


async def _progress_line(cluster: RunsCluster, run: str) -> str:
    """Return the progress from the log of the run's head; empty if the log cannot be read."""
    from ludus.proto.errors import LudusError
    from ludus.services.cli.progress import RunProgress
    from ludus.services.cli.run_view import read_num_steps, row_in_line
    from ludus.services.runs.follow import read_update

    try:
        lines = (await read_update(cluster, run)).lines
    except LudusError:
        return ""
    rows = [row for line in lines if (row := row_in_line(line)) is not None]
    progress = RunProgress(await read_num_steps(cluster, run))
    progress.update(rows)
    return progress.line() if rows else ""


async def _print_logs(run: str, namespace: str, context: str, release: str | None) -> None:
    from ludus.services.cli.run_view import row_in_line
    from ludus.services.runs.cluster import connect_cluster
    from ludus.services.runs.fetch import read_log
    from ludus.services.runs.follow import read_update

    async with connect_cluster(context, namespace) as cluster:
        update = await read_update(cluster, run)
        if update.lines:
            for line in update.lines:
                if row_in_line(line) is None:
                    typer.echo(line)
            return
        # The head and its log are gone, but the run folder still exists.
        typer.echo(await read_log(cluster, await cluster.release(release), run), nl=False)


async def _follow_run(
    run: str, namespace: str, context: str, release: str | None, folder: Path | None
) -> None:
    from ludus.proto.errors import UserError
    from ludus.services.cli.run_view import show_end, watch
    from ludus.services.runs.cluster import connect_cluster
    from ludus.services.runs.operations import find_state

    async with connect_cluster(context, namespace) as cluster:
        await cluster.job(run)
        initial_state = await find_state(cluster, run)
        end = await watch(cluster, run)
        if initial_state is not None and initial_state.is_over and folder is None:
            await show_end(cluster, None, end, None)
            return
        try:
            found_release = await cluster.release(release)
        except UserError:
            found_release = None  # permission to follow a run does not include the release
        await show_end(cluster, found_release, end, folder or Path("runs") / run)


async def _request_stop(run: str, now: bool, wait_s: int, namespace: str, context: str) -> None:
    from ludus.services.runs import operations
    from ludus.services.runs.cluster import connect_cluster

    console = progress_console()
    async with connect_cluster(context, namespace) as cluster:
        match await operations.stop(cluster, run, now=now):
            case operations.StopOutcome.OVER:
                print_line(console, f"run '{run}' has already ended; see: ludus status {run}")
            case operations.StopOutcome.DELETED:
                print_line(
                    console, f"run '{run}' is deleted; its checkpoints remain: ludus resume {run}"
                )
            case operations.StopOutcome.REQUESTED:
                print_line(console, f"run '{run}' stops after its current step, with a checkpoint")
                await _await_stop(cluster, run, wait_s)


async def _await_stop(cluster: RunsCluster, run: str, wait_s: int) -> None:
    from ludus.proto.errors import ClusterError
    from ludus.services.cli.run_view import explain_failure, watch
    from ludus.services.runs.state import RunPhase

    console = progress_console()
    try:
        state, output = await watch(cluster, run, within_s=wait_s)
    except TimeoutError:
        raise ClusterError(
            f"run '{run}' has not stopped within {wait_s} s; wait longer with --timeout, see: "
            f"ludus status {run}, or delete the run with: ludus stop {run} --now"
        ) from None
    if state.phase is RunPhase.STOPPED:
        print_line(console, f"stopped with a checkpoint; continue with: ludus resume {run}")
        return
    raise typer.Exit(explain_failure(console, state, output))


async def _fetch_run(
    run: str, folder: Path, with_checkpoints: bool, cluster_options: tuple[str, str, str | None]
) -> None:
    from ludus.proto.runs import SUMMARY_FILE
    from ludus.services.cli.train_command import show_results
    from ludus.services.report import write_report
    from ludus.services.runs.cluster import connect_cluster
    from ludus.services.runs.fetch import fetch

    namespace, context, release = cluster_options
    async with connect_cluster(context, namespace) as cluster:
        found_release = await cluster.release(release)
        with progress_console().status(f"fetching {run}"):
            await fetch(cluster, found_release, run, folder, with_checkpoints=with_checkpoints)
    if (folder / SUMMARY_FILE).exists():
        show_results(
            folder, {"train more": f"ludus resume {run} --set training.num_steps={{more}}"}
        )
    else:
        print_line(results_console(), f"report      {write_report(folder)}")


def _table(*columns: str) -> Table:
    from ludus.services.cli.tables import new_table

    table = new_table()
    for column in columns:
        table.add_column(column)
    return table


def _state_text(state: ClusterRunState) -> str:
    return f"{state.phase}: {state.reason}" if state.reason else str(state.phase)


def _age(created: str) -> str:
    try:
        created_at = datetime.fromisoformat(created)
    except ValueError:
        return ""
    return format_duration((datetime.now(UTC) - created_at).total_seconds())
