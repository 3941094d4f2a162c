"""The runs on a cluster in the list of `ludus runs`, read within a short time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeVar

from ludus.env.text.terminal import format_notice
from ludus.proto.errors import ClusterError, ConfigError
from ludus.services.cli.console import get_stderr, print_line
from ludus.services.cli.options import run_until_signal
from ludus.services.run_list import ListedRun, Location, describe_run
from ludus.services.runs.cluster import NO_RESPONSE, NOT_FOUND, connect_cluster
from ludus.services.runs.overview import RunOverview, list_overviews

T = TypeVar("T")

TIMEOUT_S = 5.0
"""Time within which the cluster must respond; some credentials alone take two seconds."""


class _DaemonExecutor(ThreadPoolExecutor):
    """An executor that runs each call in a daemon thread.

    The command therefore ends although a lookup of a name or a credential plugin does not.
    """

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start a call."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the future passes the error on
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


def read_cluster_runs(context: str, namespace: str) -> list[ListedRun] | None:
    """Return the runs in a namespace of a cluster.

    If they cannot be read, print a notice and return None.

    Args:
        context: context of the kubeconfig; empty for the current context.
        namespace: empty for the namespace of the context.

    Raises:
        ConfigError: a context or namespace was given, and it cannot be used.
    """
    runs: list[ListedRun] = []
    try:
        run_until_signal(_append_runs(runs, context, namespace))
    except TimeoutError:
        reason = f"the cluster did not respond within {TIMEOUT_S:g} s"
    except ClusterError as error:
        reason = _explain(error)
    except ConfigError as error:
        if context or namespace:
            raise
        reason = str(error)
    else:
        return runs
    message = f"the runs on the cluster are not listed: {reason}; --local leaves them out"
    print_line(get_stderr(), format_notice("note", message))
    return None


async def _append_runs(runs: list[ListedRun], context: str, namespace: str) -> None:
    asyncio.get_running_loop().set_default_executor(_DaemonExecutor())
    async with asyncio.timeout(TIMEOUT_S), connect_cluster(context, namespace) as cluster:
        runs += map(_make_listed_run, await list_overviews(cluster))


def _explain(error: ClusterError) -> str:
    """Return a reason in a few words; `ludus list` shows the whole error."""
    reason = {
        NO_RESPONSE: "the API server gave no valid response",
        NOT_FOUND: "the cluster has no RayJobs, in which runs train",
    }.get(error.status, f"the API server refused a request ({error.status})")
    return f"{reason} (see: ludus list)"


def _make_listed_run(overview: RunOverview) -> ListedRun:
    state = overview.state
    lines_backwards = [row.encode() for row in reversed(overview.rows_json)]
    description = describe_run(overview.config_json, lines_backwards)
    progress = description.progress
    return ListedRun(
        name=state.name,
        location=Location.CLUSTER,
        folder=None,
        status=state.phase,
        environments=description.environments,
        model=description.model,
        step=progress.step,
        num_steps=progress.num_steps,
        result=progress.result,
        changed_s=datetime.fromisoformat(overview.changed_at).timestamp(),
    )
