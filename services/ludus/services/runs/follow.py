"""A run in a cluster as it goes: its state every few seconds, its driver's lines as they come.

    RayJob, pods  --(every 2 s)--> RunUpdate.state, troubles --+
                                                               +--> `follow` --> whoever shows it
    log of the head's container  --(stream)--> RunUpdate.lines +

What the driver says is copied to its container's log (`manifest.py`), so pods/log is all that
is needed: no way to the head's ports, no Ray token, no command in a pod. A stream that breaks or
is silent is taken up at its last line. An API server that does not answer is asked again.
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
from ludus.services.runs.state import RunPhase, RunState, pod_troubles, state_of

POLL_S = 2.0
SILENT_OPERATOR_S = 30.0
"""A RayJob that no operator has looked at for so long has none."""
SILENT_LOG_S = 30.0
"""A log that says nothing for so long is asked for anew: a node can forget who listens."""
_RETRY_S = 1.0
_MAX_LINES = 200_000
_LASTING = {401, FORBIDDEN}


@dataclass(slots=True)
class RunUpdate:
    """What is new of a run."""

    state: RunState
    troubles: list[str] = field(default_factory=list)
    """What keeps it from going on now."""
    lines: list[str] = field(default_factory=list)
    """What its driver said since the last update."""


async def follow(cluster: RunsCluster, run: str) -> AsyncGenerator[RunUpdate]:
    """What becomes of a run, until it is over.

    To be closed by whoever leaves it early (`contextlib.aclosing`).

    Raises:
        NotFoundError: there is no such run, or somebody has deleted it.
        ClusterError: the API server refuses to tell.
    """
    log = HeadLog(cluster)
    silent_s = 0.0
    last: RunUpdate | None = None
    try:
        while True:
            try:
                update = await _look(cluster, run, log)
            except ClusterError as error:
                if last is None or error.status in _LASTING:
                    raise
                update = RunUpdate(last.state, ["the API server does not answer; asking again"])
            is_new = update.state.phase is RunPhase.SUBMITTED
            silent_s = silent_s + POLL_S if is_new else 0.0
            if silent_s > SILENT_OPERATOR_S:
                update.troubles.append(
                    f"no operator has looked at it for {silent_s:.0f} s; see whether KubeRay's "
                    "runs and watches this namespace"
                )
            if update.state.is_over:
                await log.read_to_end()
            update.lines = log.take()
            yield update
            if update.state.is_over:
                return
            last = update
            await log.wait(POLL_S)
    finally:
        await log.close()


async def look(cluster: RunsCluster, run: str) -> RunUpdate:
    """Where a run stands now, and all that its head's log holds.

    Raises:
        NotFoundError: there is no such run.
    """
    log = HeadLog(cluster)
    try:
        update = await _look(cluster, run, log)
        await log.read_to_end()
        update.lines = log.take()
        return update
    finally:
        await log.close()


async def _look(cluster: RunsCluster, run: str, log: HeadLog) -> RunUpdate:
    job = await cluster.job(run)
    state = state_of(job, await cluster.config_map(run))
    pods = await cluster.pods(state.ray_cluster)
    head = next((pod for pod in pods if is_head(pod)), None)
    log.follow(head)
    troubles = [] if state.is_over else pod_troubles(pods)
    if not pods and state.phase is RunPhase.STARTING and state.ray_cluster:
        troubles = _said_in(await cluster.warnings_about(state.ray_cluster))
    elif state.phase is RunPhase.QUEUED:
        troubles = [f"it waits in queue '{state.queue}'"]
    elif state.phase is RunPhase.RUNNING and log.trouble:
        troubles.append(f"its log cannot be read, so its steps are not shown: {log.trouble}")
    return RunUpdate(state, troubles)


def _said_in(events: list[JsonObject]) -> list[str]:
    return [f"{event.get('reason')}: {event.get('message')}" for event in events[-1:]]


class HeadLog:
    """The lines of the head's container; those of a retry's head follow the first one's."""

    def __init__(self, cluster: RunsCluster) -> None:
        self._cluster = cluster
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._news = asyncio.Event()
        self._pod, self._container = "", ""
        self._last_time = ""
        self._reading: asyncio.Task[None] | None = None
        self.trouble = ""
        """Why the last try to read failed; empty where it did not."""

    def follow(self, head: JsonObject | None) -> None:
        """Read the log of this pod from now on; without one, nothing changes."""
        if head is None or head["metadata"]["name"] == self._pod:
            return
        if (head.get("status") or {}).get("phase") == "Pending":
            return
        self._end_reading()
        self._pod = head["metadata"]["name"]
        self._container = head["spec"]["containers"][0]["name"]
        self._last_time = ""
        self._reading = asyncio.create_task(self._read_for_ever())

    def take(self) -> list[str]:
        """The lines that were not taken yet."""
        self._news.clear()
        lines = list(self._lines)
        self._lines.clear()
        return lines

    async def wait(self, seconds: float) -> None:
        """Wait for that time, or shortly after the next line if that is sooner."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
                await asyncio.sleep(min(_RETRY_S, seconds) / 4)
        except TimeoutError:
            pass

    async def read_to_end(self) -> None:
        """Read what the log holds beyond what has come; the pod may be gone."""
        self._end_reading()
        if self._pod:
            with suppress(ClusterError):  # gone with its cluster: the run's folder has it all
                await self._read(is_followed=False)

    async def close(self) -> None:
        """End reading."""
        reading = self._reading
        self._end_reading()
        if reading is not None:
            await asyncio.gather(reading, return_exceptions=True)

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _read_for_ever(self) -> None:
        while True:
            try:
                await self._read(is_followed=True)
            except ClusterError as error:
                # Not begun yet, or gone: whoever polls the run will see. Forbidden stays so.
                if error.status in _LASTING:
                    self._lines.append(f"warning: {error}")
                    self._news.set()
                if error.status in (NOT_FOUND, *_LASTING):
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
        read = self._cluster.api.lines(path, query, silence_s=SILENT_LOG_S)
        async with aclosing(read) as lines:
            async for line in lines:
                self._take_in(line)

    def _take_in(self, line: str) -> None:
        moment, _, text = line.partition(" ")
        if not moment[:4].isdigit():
            # A node that cannot open the file says so in place of its lines.
            self.trouble = line
            return
        self.trouble = ""
        if moment <= self._last_time:
            return  # sinceTime counts in whole seconds
        self._last_time = moment
        self._lines.append(text)
        self._news.set()
