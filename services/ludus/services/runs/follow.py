"""Updates of a run on a cluster, from its polled state and its driver's streamed log.

    RayJob, pods  --(every 2 s)--> RunUpdate.state, troubles --+
                                                               +--> `follow_run` --> display
    log of the head's container  --(stream)--> RunUpdate.lines +

The driver's output is copied to its container's log (`manifest.py`). It is therefore sufficient to
have access to pods/log; no connection to Ray and no command in a pod is needed. A stream that
breaks or stays silent is resumed after its last line. A request to which the API server does not
respond is repeated.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from ludus.proto.errors import ClusterError
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.cluster import FORBIDDEN, NOT_FOUND, RunsCluster, is_head
from ludus.services.runs.names import make_core_path
from ludus.services.runs.state import ClusterRunState, RunPhase, find_pod_troubles, read_state

POLL_INTERVAL_S = 2.0
SILENT_OPERATOR_S = 30.0
"""Seconds without a status after which a RayJob is reported as ignored by the operator."""
SILENT_LOG_S = 30.0
"""Seconds without a line after which the log is requested again, because streams can get stuck."""
_RETRY_S = 1.0
_COLOR_CODE = re.compile(r"\x1b\[[0-9;]*m")
"""Codes with which Ray colors the lines of its workers."""
_FIRST_READ_TIMEOUT_S = 5.0
"""Seconds to wait for the existing log before the first update."""
_MAX_LINES = 200_000
_PERMANENT_STATUSES = {401, FORBIDDEN}


@dataclass(slots=True)
class RunUpdate:
    """The state of a run and its new log lines."""

    state: ClusterRunState
    troubles: list[str] = field(default_factory=list)
    """Reasons why the run currently makes no progress."""
    lines: list[str] = field(default_factory=list)
    """Lines of the driver's log since the previous update."""


async def follow_run(cluster: RunsCluster, run: str) -> AsyncGenerator[RunUpdate]:
    """Yield updates of a run until it is over.

    A caller that stops early must close the generator (`contextlib.aclosing`).

    Raises:
        NotFoundError: the run does not exist or was deleted.
        ClusterError: the API server refuses a request.
    """
    log = HeadLog(cluster)
    silent_s = 0.0
    previous_update: RunUpdate | None = None
    try:
        while True:
            try:
                update = await _poll_run(cluster, run, log)
            except ClusterError as error:
                if previous_update is None or error.status in _PERMANENT_STATUSES:
                    raise
                trouble = "the API server does not respond; retrying"
                update = RunUpdate(previous_update.state, [trouble])
            is_unprocessed = update.state.phase is RunPhase.SUBMITTED
            silent_s = silent_s + POLL_INTERVAL_S if is_unprocessed else 0.0
            if silent_s > SILENT_OPERATOR_S:
                update.troubles.append(
                    f"no operator has processed the RayJob for {silent_s:.0f} s; check that "
                    "KubeRay runs and watches this namespace"
                )
            if previous_update is None:
                await log.wait_for_existing_lines()
            if update.state.is_over:
                await log.read_to_end()
            update.lines = log.take_lines()
            yield update
            if update.state.is_over:
                return
            previous_update = update
            await log.wait_for_line(POLL_INTERVAL_S)
    finally:
        await log.close()


async def read_update(cluster: RunsCluster, run: str) -> RunUpdate:
    """Return the current state of a run and the whole log of its head.

    Raises:
        NotFoundError: there is no such run.
    """
    log = HeadLog(cluster)
    try:
        update = await _poll_run(cluster, run, log)
        await log.read_to_end()
        update.lines = log.take_lines()
        return update
    finally:
        await log.close()


async def _poll_run(cluster: RunsCluster, run: str, log: HeadLog) -> RunUpdate:
    job = await cluster.read_job(run)
    state = read_state(job, await cluster.find_config_map(run))
    pods = await cluster.list_pods(state.ray_cluster)
    head = next((pod for pod in pods if is_head(pod)), None)
    log.follow_pod(head)
    troubles = [] if state.is_over else find_pod_troubles(pods)
    if not pods and state.phase is RunPhase.STARTING and state.ray_cluster:
        events = await cluster.list_warning_events(state.ray_cluster)
        troubles = [f"{event.get('reason')}: {event.get('message')}" for event in events[-1:]]
    elif state.phase is RunPhase.QUEUED:
        troubles = [f"the run waits in queue '{state.queue}'"]
    elif state.phase is RunPhase.RUNNING and log.trouble:
        troubles.append(f"steps are not shown, because the log cannot be read: {log.trouble}")
    return RunUpdate(state, troubles)


class HeadLog:
    """The log of the head's container. After a retry of the run, the new head's log follows.

    Args:
        num_last_lines: number of lines to read from the end of the existing log; None reads all.
    """

    def __init__(self, cluster: RunsCluster, num_last_lines: int | None = None) -> None:
        self._cluster = cluster
        self._num_last_lines = num_last_lines
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._line_event = asyncio.Event()
        self._pod, self._container = "", ""
        self.last_timestamp = ""
        """Time of the latest line in ISO 8601; empty before the first line."""
        self._read_task: asyncio.Task[None] | None = None
        self._existing_lines_event = asyncio.Event()
        self.trouble = ""
        """Reason why the last attempt to read the log failed; empty if it succeeded."""

    def follow_pod(self, head: JsonObject | None) -> None:
        """Start to read the log of this head; do nothing if it is None or already followed."""
        if head is None or head["metadata"]["name"] == self._pod:
            return
        if (head.get("status") or {}).get("phase") == "Pending":
            return
        self._cancel_read_task()
        self._pod = head["metadata"]["name"]
        self._container = head["spec"]["containers"][0]["name"]
        self.last_timestamp = ""
        self._read_task = asyncio.create_task(self._read_forever())

    def take_lines(self) -> list[str]:
        """Return the lines since the last call."""
        self._line_event.clear()
        lines = list(self._lines)
        self._lines.clear()
        return lines

    async def wait_for_line(self, timeout_s: float) -> None:
        """Wait until shortly after the next line arrives, at most for this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._line_event.wait()
                await asyncio.sleep(min(_RETRY_S, timeout_s) / 4)

    async def wait_for_existing_lines(self) -> None:
        """Wait until the lines that the log already contains are read, if a pod has a log."""
        if self._read_task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_READ_TIMEOUT_S):
                    await self._existing_lines_event.wait()

    async def read_to_end(self) -> None:
        """Read the rest of the log, if the pod still exists."""
        self._cancel_read_task()
        if self._pod:
            with suppress(ClusterError):  # if the pod is deleted, its log is in the run folder
                await self._read_log(is_followed=False)

    async def close(self) -> None:
        """Stop reading."""
        read_tasks = [self._read_task] if self._read_task else []
        self._cancel_read_task()
        await asyncio.gather(*read_tasks, return_exceptions=True)

    def _cancel_read_task(self) -> None:
        if self._read_task is not None:
            self._read_task.cancel()
            self._read_task = None

    async def _read_forever(self) -> None:
        with suppress(ClusterError):  # the loop reports an error that persists
            await self._read_log(is_followed=False)
        self._existing_lines_event.set()
        while True:
            try:
                await self._read_log(is_followed=True)
            except ClusterError as error:
                # The state of the run shows whether the pod has not started or is gone.
                if error.status in _PERMANENT_STATUSES:
                    self._lines.append(f"warning: {error}")
                    self._line_event.set()
                if error.status in (NOT_FOUND, *_PERMANENT_STATUSES):
                    return
                self.trouble = str(error)
            await asyncio.sleep(_RETRY_S)

    async def _read_log(self, *, is_followed: bool) -> None:
        path = f"{make_core_path(self._cluster.namespace, 'pods', self._pod)}/log"
        query = {"container": self._container, "timestamps": "true"}
        if is_followed:
            query["follow"] = "true"
        if self.last_timestamp:
            query["sinceTime"] = self.last_timestamp
        elif self._num_last_lines is not None:
            query["tailLines"] = str(self._num_last_lines)
        log_lines = self._cluster.api.read_lines(path, query, silence_s=SILENT_LOG_S)
        async with aclosing(log_lines) as lines:
            async for line in lines:
                self._add_line(line)

    def _add_line(self, line: str) -> None:
        timestamp, _, content = line.partition(" ")
        if not timestamp[:4].isdigit():
            # A node that cannot open the log sends an error message without a timestamp.
            self.trouble = line
            return
        self.trouble = ""
        if timestamp <= self.last_timestamp:
            return  # a repeated line, because sinceTime has a resolution of one second
        self.last_timestamp = timestamp
        self._lines.append(_COLOR_CODE.sub("", content))
        self._line_event.set()
