"""Follows a run on a cluster: its state every few seconds, and its driver's log as a stream.

    RayJob, pods  --(every 2 s)--> RunUpdate.state, troubles --+
                                                               +--> `follow` --> display
    log of the head's container  --(stream)--> RunUpdate.lines +

The driver's output is copied to its container's log (`manifest.py`), so access to pods/log is
sufficient: no connection to the head's ports, no Ray token, no command in a pod. A stream that
breaks or stays silent is resumed after its last line. A request that the API server does not answer
is repeated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from ludus.proto.errors import ClusterError
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.cluster import FORBIDDEN, NOT_FOUND, RunsCluster, is_head
from ludus.services.runs.names import core_path
from ludus.services.runs.state import ClusterRunState, RunPhase, pod_troubles, read_state

POLL_S = 2.0
SILENT_OPERATOR_S = 30.0
"""Seconds after which a RayJob without a status is reported as ignored by the operator."""
SILENT_LOG_S = 30.0
"""Seconds without a line after which the log is requested again: a node can drop a stream."""
_RETRY_S = 1.0
_MAX_LINES = 200_000
_PERMANENT = {401, FORBIDDEN}


@dataclass(slots=True)
class RunUpdate:
    """The state of a run and its new log lines."""

    state: ClusterRunState
    troubles: list[str] = field(default_factory=list)
    """Reasons why the run currently makes no progress."""
    lines: list[str] = field(default_factory=list)
    """Log lines of the driver since the last update."""


async def follow(cluster: RunsCluster, run: str) -> AsyncGenerator[RunUpdate]:
    """Yield updates of a run until it is over.

    Close the generator (`contextlib.aclosing`) if you leave it early.

    Raises:
        NotFoundError: the run does not exist or was deleted.
        ClusterError: the API server refuses a request.
    """
    log = HeadLog(cluster)
    silent_s = 0.0
    previous: RunUpdate | None = None
    try:
        while True:
            try:
                update = await _poll(cluster, run, log)
            except ClusterError as error:
                if previous is None or error.status in _PERMANENT:
                    raise
                update = RunUpdate(previous.state, ["the API server does not respond; retrying"])
            is_new = update.state.phase is RunPhase.SUBMITTED
            silent_s = silent_s + POLL_S if is_new else 0.0
            if silent_s > SILENT_OPERATOR_S:
                update.troubles.append(
                    f"no operator has processed the RayJob for {silent_s:.0f} s; check that "
                    "KubeRay runs and watches this namespace"
                )
            if update.state.is_over:
                await log.read_to_end()
            update.lines = log.drain()
            yield update
            if update.state.is_over:
                return
            previous = update
            await log.wait(POLL_S)
    finally:
        await log.close()


async def read_update(cluster: RunsCluster, run: str) -> RunUpdate:
    """Return the current state of a run and the whole log of its head.

    Raises:
        NotFoundError: there is no such run.
    """
    log = HeadLog(cluster)
    try:
        update = await _poll(cluster, run, log)
        await log.read_to_end()
        update.lines = log.drain()
        return update
    finally:
        await log.close()


async def _poll(cluster: RunsCluster, run: str, log: HeadLog) -> RunUpdate:
    job = await cluster.job(run)
    state = read_state(job, await cluster.config_map(run))
    pods = await cluster.pods(state.ray_cluster)
    head = next((pod for pod in pods if is_head(pod)), None)
    log.follow(head)
    troubles = [] if state.is_over else pod_troubles(pods)
    if not pods and state.phase is RunPhase.STARTING and state.ray_cluster:
        events = await cluster.warning_events(state.ray_cluster)
        troubles = [f"{event.get('reason')}: {event.get('message')}" for event in events[-1:]]
    elif state.phase is RunPhase.QUEUED:
        troubles = [f"the run waits in queue '{state.queue}'"]
    elif state.phase is RunPhase.RUNNING and log.trouble:
        troubles.append(f"steps are not shown, because the log cannot be read: {log.trouble}")
    return RunUpdate(state, troubles)


class HeadLog:
    """The log of the head's container; after a retry, the log of the new head follows."""

    def __init__(self, cluster: RunsCluster) -> None:
        self._cluster = cluster
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._has_lines = asyncio.Event()
        self._pod, self._container = "", ""
        self._last_time = ""
        self._reading: asyncio.Task[None] | None = None
        self.trouble = ""
        """Reason why the last attempt to read failed; empty if it succeeded."""

    def follow(self, head: JsonObject | None) -> None:
        """Read the log of this pod from now on; do nothing if there is no pod."""
        if head is None or head["metadata"]["name"] == self._pod:
            return
        if (head.get("status") or {}).get("phase") == "Pending":
            return
        self._cancel_reading()
        self._pod = head["metadata"]["name"]
        self._container = head["spec"]["containers"][0]["name"]
        self._last_time = ""
        self._reading = asyncio.create_task(self._keep_reading())

    def drain(self) -> list[str]:
        """Return the lines since the last call."""
        self._has_lines.clear()
        lines = list(self._lines)
        self._lines.clear()
        return lines

    async def wait(self, seconds: float) -> None:
        """Wait for this time, or until shortly after the next line if that is sooner."""
        try:
            async with asyncio.timeout(seconds):
                await self._has_lines.wait()
                await asyncio.sleep(min(_RETRY_S, seconds) / 4)
        except TimeoutError:
            pass

    async def read_to_end(self) -> None:
        """Read the rest of the log, if the pod still exists."""
        self._cancel_reading()
        if self._pod:
            with suppress(ClusterError):  # a deleted pod's log is in the run folder
                await self._read(is_followed=False)

    async def close(self) -> None:
        """Stop reading."""
        reading = self._reading
        self._cancel_reading()
        if reading is not None:
            await asyncio.gather(reading, return_exceptions=True)

    def _cancel_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _keep_reading(self) -> None:
        while True:
            try:
                await self._read(is_followed=True)
            except ClusterError as error:
                # A pod that has not started or is gone shows in the state of the run.
                if error.status in _PERMANENT:
                    self._lines.append(f"warning: {error}")
                    self._has_lines.set()
                if error.status in (NOT_FOUND, *_PERMANENT):
                    return
                self.trouble = str(error)
            await asyncio.sleep(_RETRY_S)

    async def _read(self, *, is_followed: bool) -> None:
        path = f"{core_path(self._cluster.namespace, 'pods', self._pod)}/log"
        query = {"container": self._container, "timestamps": "true"}
        if is_followed:
            query["follow"] = "true"
        if self._last_time:
            query["sinceTime"] = self._last_time
        read = self._cluster.api.read_lines(path, query, silence_s=SILENT_LOG_S)
        async with aclosing(read) as lines:
            async for line in lines:
                self._add(line)

    def _add(self, line: str) -> None:
        timestamp, _, text = line.partition(" ")
        if not timestamp[:4].isdigit():
            # A node that cannot open the file sends an error message instead of lines.
            self.trouble = line
            return
        self.trouble = ""
        if timestamp <= self._last_time:
            return  # sinceTime has a resolution of one second
        self._last_time = timestamp
        self._lines.append(text)
        self._has_lines.set()
