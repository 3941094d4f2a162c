"""What people do with runs in a cluster: submit, stop, resume.

stop      a wish in the run's control file, which its ConfigMap mounts: the driver ends after its
          step, writes a checkpoint and succeeds, so that KubeRay neither tries again nor reports
          a failure. KubeRay's own ways save nothing: `suspend` deletes the cluster under the
          driver, and deletion sends it SIGTERM while its learners are already being ended.
resume    the same name, so the same folder and checkpoint: a new RayJob in the old one's place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from ludus.proto.config import (
    LanguageModelRun,
    load_run_config,
    require_language_model,
    validate_run_json,
)
from ludus.proto.config.changes import changes_between
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.runs import RunControl
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.cluster import RunsCluster, is_head, run_config_in
from ludus.services.runs.manifest import RunManifests
from ludus.services.runs.names import (
    CONTROL_KEY,
    RUN_KEY,
    config_map_name,
    job_path,
)
from ludus.services.runs.state import RunPhase, RunState, state_of

_TTL_AFTER_STOP_S = 30
"""What a stopped run's pods outlive it by: nobody waits for them, somebody for their place."""


class StopOutcome(StrEnum):
    """What came of the wish to stop."""

    OVER = "over"
    """It had ended before."""
    REMOVED = "removed"
    """Its RayJob is deleted; what it had saved remains."""
    ASKED = "asked"
    """Its driver will end after the step, with a checkpoint."""


async def refuse_existing(cluster: RunsCluster, run: str) -> None:
    """Refuse the name of a run that is there already.

    Raises:
        ConfigError: one is.
    """
    state = await find_state(cluster, run)
    if state is None:
        return
    way_on = (
        f"continue it with: ludus resume {run}" if state.is_over else f"see: ludus status {run}"
    )
    raise ConfigError(
        f"run '{run}' is in namespace '{cluster.namespace}' already ({state.phase}); {way_on}; or "
        "take another name with --set name=..."
    )


async def find_state(cluster: RunsCluster, run: str) -> RunState | None:
    """Where a run stands; None where there is none of that name."""
    job, config_map = await cluster.find_job(run), await cluster.config_map(run)
    if job is not None:
        return state_of(job, config_map)
    return None if config_map is None else RunState(run, RunPhase.STOPPED)


async def states(cluster: RunsCluster) -> list[tuple[RunState, str]]:
    """All runs of the namespace, oldest first, and when each was created."""
    config_maps = {one["metadata"]["name"]: one for one in await cluster.config_maps()}
    found = []
    for job in await cluster.jobs():
        config_map = config_maps.pop(config_map_name(job["metadata"]["name"]), None)
        found.append((state_of(job, config_map), _created(job)))
    for name, config_map in config_maps.items():
        run = name.removesuffix(config_map_name(""))
        found.append((RunState(run, RunPhase.STOPPED), _created(config_map)))
    return sorted(found, key=lambda one: one[1])


async def stop(cluster: RunsCluster, run: str, *, now: bool = False) -> StopOutcome:
    """Have a run end after its step; one that has not begun, or that shall not wait, is deleted.

    Raises:
        NotFoundError: there is no such run.
    """
    job, config_map = await cluster.job(run), await cluster.config_map(run)
    state = state_of(job, config_map)
    if state.is_over:
        return StopOutcome.OVER
    has_begun = state.phase in (RunPhase.RUNNING, RunPhase.STOPPING)
    if now or not has_begun or config_map is None:
        await cluster.delete(run, keep_config=True)
        return StopOutcome.REMOVED
    control = RunControl.model_validate_json(config_map["data"].get(CONTROL_KEY, "{}"))
    await cluster.want(run, control.model_copy(update={"stop": True}).model_dump_json())
    ttl = {"spec": {"ttlSecondsAfterFinished": _TTL_AFTER_STOP_S}}
    await cluster.api.merge(job_path(cluster.namespace, run), ttl)
    for pod in await cluster.pods(state.ray_cluster):
        if is_head(pod):
            await cluster.nudge(pod["metadata"]["name"], datetime.now(UTC).isoformat())
    return StopOutcome.ASKED


async def resumable(cluster: RunsCluster, run: str, overrides: Sequence[str]) -> LanguageModelRun:
    """The configuration of a run that has ended, after overrides.

    Raises:
        NotFoundError: there is no such run.
        ConfigError: it has not ended, the overrides do not fit, or they change what a run keeps.
    """
    config_map = await cluster.config_map(run)
    state = await find_state(cluster, run)
    if state is None or config_map is None:
        raise NotFoundError(
            f"no run '{run}' was found in namespace '{cluster.namespace}'; see: ludus list. Where "
            "its folder is still on the volume, `ludus submit` of the same name continues from "
            "its newest checkpoint"
        )
    if not state.is_over:
        raise ConfigError(
            f"run '{run}' has not ended ({state.phase}); follow it with: ludus logs -f {run}"
        )
    begun = run_config_in(config_map)
    with tempfile.TemporaryDirectory(prefix="ludus-") as folder:
        path = Path(folder) / RUN_KEY
        path.write_text(begun, encoding="utf-8")
        config = require_language_model(load_run_config(path, overrides), "ludus resume")
    if config.name != run:
        raise ConfigError(
            f"--set name={config.name}: a run is resumed under its own name '{run}', by which "
            "its checkpoint is found; leave the name out"
        )
    # Its driver would refuse the same, but only after the old RayJob is gone.
    changes_between(validate_run_json(begun), config)
    return config


async def resume(cluster: RunsCluster, manifests: RunManifests) -> None:
    """Put a new RayJob in the old one's place; it continues from the newest checkpoint."""
    await cluster.delete(manifests.run.name, keep_config=True)
    await cluster.create(manifests)


def _created(found: JsonObject) -> str:
    return str(found["metadata"].get("creationTimestamp", ""))
