"""`ludus list`, `status`, `logs`, `stop` and `fetch`: runs on a cluster that are there already."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ludus.services.cli import cluster_options as options
from ludus.services.cli.console import progress_console, results_console, say
from ludus.services.numbers import format_duration

if TYPE_CHECKING:
    from ludus.services.runs.cluster import RunsCluster
    from ludus.services.runs.state import RunState

_DEFAULT_STOP_S = 900


def list_runs(namespace: options.Namespace = "", context: options.Context = "") -> None:
    """List the runs of a namespace.

    Example: `ludus list --namespace arena`
    """
    options.in_event_loop(_list(namespace, context))


def status(
    run: options.Run, namespace: options.Namespace = "", context: options.Context = ""
) -> None:
    """Say where a run on a cluster stands: its progress, its pods and what keeps them.

    Example: `ludus status demo`
    """
    options.in_event_loop(_status(run, namespace, context))


def logs(
    run: options.Run,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show the run's progress until it ends.")
    ] = False,
    namespace: options.Namespace = "",
    context: options.Context = "",
    release: options.ReleaseName = None,
    folder: options.Output = None,
) -> None:
    """Print what the driver of a run has said, or follow the run to its end.

    Example: `ludus logs -f demo`
    """
    work = (
        _follow(run, namespace, context, release, folder)
        if follow
        else _logs(run, namespace, context, release)
    )
    options.in_event_loop(work)


def stop(
    run: options.Run,
    now: Annotated[
        bool, typer.Option("--now", help="Delete it at once; steps since a checkpoint are lost.")
    ] = False,
    wait_s: Annotated[
        int, typer.Option("--timeout", min=1, help="Seconds to wait for the checkpoint.")
    ] = _DEFAULT_STOP_S,
    namespace: options.Namespace = "",
    context: options.Context = "",
) -> None:
    """Stop a run on a cluster: it ends its step and writes a checkpoint.

    Example: `ludus stop demo`
    """
    options.in_event_loop(_stop(run, now, wait_s, namespace, context))


def fetch(
    run: options.Run,
    folder: options.Output = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Bring checkpoints and models, too.")
    ] = False,
    namespace: options.Namespace = "",
    context: options.Context = "",
    release: options.ReleaseName = None,
) -> None:
    """Bring what a run on a cluster left to this machine, and write its report.

    Example: `ludus fetch demo`
    """
    options.in_event_loop(
        _fetch(run, folder or Path("runs") / run, everything, (namespace, context, release))
    )


async def _list(namespace: str, context: str) -> None:
    from ludus.services.runs import operations
    from ludus.services.runs.cluster import connected

    async with connected(context, namespace) as cluster:
        found = await operations.states(cluster)
        if not found:
            say(progress_console(), f"no runs in namespace '{cluster.namespace}'")
            return
        table = _table("run", "state", "attempts", "queue", "age")
        for state, created in found:
            attempts = f"{state.attempts_failed + 1} of {state.attempts_allowed}"
            row = (state.name, _state_text(state), attempts, state.queue, _age(created))
            table.add_row(*map(Text, row))
        results_console().print(table)


async def _status(run: str, namespace: str, context: str) -> None:
    from ludus.services.runs import operations
    from ludus.services.runs.cluster import connected
    from ludus.services.runs.state import pod_troubles, role_of

    async with connected(context, namespace) as cluster:
        state = await operations.find_state(cluster, run)
        if state is None:
            await cluster.job(run)  # says which there are
            return
        console = results_console()
        attempt = f"attempt {state.attempts_failed + 1} of {state.attempts_allowed}"
        say(console, f"{run}: {_state_text(state)} · {attempt}")
        pods = await cluster.pods(state.ray_cluster)
        line = await _progress_line(cluster, run)
        if line:
            say(console, line)
        if pods:
            table = _table("pod", "role", "phase", "node")
            for pod in pods:
                found: dict[str, Any] = pod.get("status") or {}
                node = (pod.get("spec") or {}).get("nodeName") or ""
                cells = (pod["metadata"]["name"], role_of(pod), str(found.get("phase")), node)
                table.add_row(*map(Text, cells))
            console.print(table)
        for trouble in pod_troubles(pods):
            say(console, trouble)


async def _progress_line(cluster: RunsCluster, run: str) -> str:
    """How far the run is, from its head's log; empty where that cannot be read."""
    from ludus.proto.errors import LudusError
    from ludus.services.cli.progress import RunProgress
    from ludus.services.cli.run_view import num_steps_of, row_in_line
    from ludus.services.runs.follow import look

    try:
        lines = (await look(cluster, run)).lines
    except LudusError:
        return ""
    rows = [row for line in lines if (row := row_in_line(line)) is not None]
    progress = RunProgress(await num_steps_of(cluster, run))
    progress.update(rows)
    return progress.line() if rows else ""


async def _logs(run: str, namespace: str, context: str, release: str | None) -> None:
    from ludus.services.cli.run_view import row_in_line
    from ludus.services.runs.cluster import connected
    from ludus.services.runs.fetch import read_log
    from ludus.services.runs.follow import look

    async with connected(context, namespace) as cluster:
        update = await look(cluster, run)
        if update.lines:
            for line in update.lines:
                if row_in_line(line) is None:
                    typer.echo(line)
            return
        # The head is gone, and its log with it; the run's folder is not.
        typer.echo(await read_log(cluster, await cluster.release(release), run), nl=False)


async def _follow(
    run: str, namespace: str, context: str, release: str | None, folder: Path | None
) -> None:
    from ludus.proto.errors import UserError
    from ludus.services.cli.run_view import show_end, watch
    from ludus.services.runs.cluster import connected
    from ludus.services.runs.operations import find_state

    async with connected(context, namespace) as cluster:
        await cluster.job(run)
        before = await find_state(cluster, run)
        end = await watch(cluster, run)
        if before is not None and before.is_over and folder is None:
            await show_end(cluster, None, end, None)
            return
        try:
            found = await cluster.release(release)
        except UserError:
            found = None  # whoever may follow a run need not see the release
        await show_end(cluster, found, end, folder or Path("runs") / run)


async def _stop(run: str, now: bool, wait_s: int, namespace: str, context: str) -> None:
    from ludus.services.runs import operations
    from ludus.services.runs.cluster import connected

    console = progress_console()
    async with connected(context, namespace) as cluster:
        match await operations.stop(cluster, run, now=now):
            case operations.StopOutcome.OVER:
                say(console, f"run '{run}' has ended already; see: ludus status {run}")
            case operations.StopOutcome.REMOVED:
                say(console, f"run '{run}' is ended; what it had saved remains: ludus resume {run}")
            case operations.StopOutcome.ASKED:
                say(console, f"run '{run}' is asked to end its step and to write a checkpoint")
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
            f"expected run '{run}' to end within {wait_s} s, but it still goes; wait longer with "
            f"--timeout, look with: ludus status {run}, or end it with: ludus stop {run} --now"
        ) from None
    if state.phase is RunPhase.STOPPED:
        say(console, f"stopped with a checkpoint; continue with: ludus resume {run}")
        return
    raise typer.Exit(explain_failure(console, state, output))


async def _fetch(
    run: str, folder: Path, everything: bool, place: tuple[str, str, str | None]
) -> None:
    from ludus.proto.runs import SUMMARY_FILE
    from ludus.services.cli.train_command import show_results
    from ludus.services.report import write_report
    from ludus.services.runs.cluster import connected
    from ludus.services.runs.fetch import fetch

    namespace, context, release = place
    async with connected(context, namespace) as cluster:
        found = await cluster.release(release)
        with progress_console().status(f"fetching {run}"):
            await fetch(cluster, found, run, folder, everything=everything)
    if (folder / SUMMARY_FILE).exists():
        show_results(folder, {"train on": f"ludus resume {run} --set training.num_steps={{more}}"})
    else:
        say(results_console(), f"report      {write_report(folder)}")


def _table(*columns: str) -> Table:
    from ludus.services.cli.tables import new_table

    table = new_table()
    for column in columns:
        table.add_column(column)
    return table


def _state_text(state: RunState) -> str:
    return f"{state.phase}: {state.reason}" if state.reason else str(state.phase)


def _age(created: str) -> str:
    try:
        then = datetime.fromisoformat(created)
    except ValueError:
        return ""
    return format_duration((datetime.now(UTC) - then).total_seconds())
