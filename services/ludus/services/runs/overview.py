"""An overview of the runs in a namespace: state, configuration and latest metrics of each run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ludus.proto.errors import NotFoundError
from ludus.proto.runs import LOG_ROW_PREFIX
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.cluster import RunsCluster, read_run_config_json
from ludus.services.runs.follow import HeadLog
from ludus.services.runs.names import RUN_LABEL
from ludus.services.runs.operations import list_states
from ludus.services.runs.state import ClusterRunState

_LOG_TIMEOUT_S = 2.0
_NUM_LAST_LINES = 1000
"""Number of lines of a driver's log that are read: at most about 2 MB for each run."""


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A run on a cluster, with its latest metrics if its head still exists."""

    state: ClusterRunState
    config_json: str
    """Configuration of the run; empty if it is unknown."""
    rows_json: Sequence[str]
    """Latest rows of the metrics, the oldest first."""
    changed_at: str
    """Time in ISO 8601 of the latest line of the log, otherwise of the end or the creation."""


async def list_overviews(cluster: RunsCluster) -> list[RunOverview]:
    """Return the overviews of all runs of the namespace, oldest first.

    Raises:
        ClusterError: the API server does not respond, or it refuses a request.
    """
    states, config_maps, heads = await asyncio.gather(
        list_states(cluster), cluster.list_config_maps(), cluster.list_heads()
    )
    configs = {
        config_map["metadata"]["labels"][RUN_LABEL]: _find_config_json(config_map)
        for config_map in config_maps
    }
    return await asyncio.gather(
        *(
            _read_overview(
                cluster, state, configs.get(state.name, ""), heads.get(state.ray_cluster)
            )
            for state in states
        )
    )


async def _read_overview(
    cluster: RunsCluster, state: ClusterRunState, config_json: str, head: JsonObject | None
) -> RunOverview:
    log = HeadLog(cluster, _NUM_LAST_LINES)
    try:
        log.follow_pod(head)
        with suppress(TimeoutError):  # a node may not respond, and the state is known without it
            async with asyncio.timeout(_LOG_TIMEOUT_S):
                await log.read_to_end()
    finally:
        await log.close()
    return RunOverview(
        state=state,
        config_json=config_json,
        rows_json=[
            line.removeprefix(LOG_ROW_PREFIX)
            for line in log.take_lines()
            if line.startswith(LOG_ROW_PREFIX)
        ],
        changed_at=log.last_timestamp or state.ended_at or state.created_at,
    )


def _find_config_json(config_map: JsonObject) -> str:
    try:
        return read_run_config_json(config_map)
    except NotFoundError:
        return ""
