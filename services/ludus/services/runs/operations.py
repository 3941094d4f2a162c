"""Operations on the runs of a cluster: list, stop, scale and resume.

stop      writes a stop request into the control file in the run's ConfigMap. The driver reads the
          file, finishes its step, writes a checkpoint and succeeds, so KubeRay neither retries nor
          reports a failure. KubeRay itself cannot stop a run without losing the steps since the
          last checkpoint: `suspend` deletes the RayCluster while the driver runs, and a deletion
          sends SIGTERM to the driver when the learners are already stopping.
scale     writes the number of rollout workers into the same file.
resume    replaces the RayJob by a new one with the same name, which uses the same folder and its
          checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum

from ludus.proto.config import (
    LanguageModelRun,
    RunConfig,
    make_run_config,
    require_language_model,
    validate_run_json,
)
from ludus.proto.config.changes import find_changes
from ludus.proto.errors import ConfigError, NotFoundError
from ludus.proto.runs import RunControl
from ludus.services.kubernetes.api import JsonObject
from ludus.services.runs.cluster import RunsCluster, is_head, read_run_config_json
from ludus.services.runs.manifest import count_max_workers
from ludus.services.runs.names import CONTROL_KEY, RUN_LABEL, make_job_path
from ludus.services.runs.state import ClusterRunState, RunPhase, read_state

_TTL_AFTER_STOP_S = 30
"""Seconds that pods remain after a stop. The time is short, so that resources become free."""


class StopOutcome(StrEnum):
    """The outcome of a request to stop a run."""

    NOT_RUNNING = "not running"
    """The run had already ended."""
    DELETED = "deleted"
    """The RayJob is deleted; its checkpoints remain."""
    REQUESTED = "requested"
    """The driver will stop after its current step, with a checkpoint."""


async def refuse_existing(cluster: RunsCluster, run: str) -> None:
    """Refuse a run whose name is already in use.

    Raises:
        ConfigError: a run with this name exists.
    """
    state = await find_state(cluster, run)
    if state is None:
        return
    advice = f"see: {cluster.format_command(f'status {run}')}"
    if state.is_over:
        advice = f"resume it with: {cluster.format_command(f'resume {run}')}"
    raise ConfigError(
        f"run '{run}' already exists in namespace '{cluster.namespace}' ({state.phase}); {advice}; "
        "or choose another name with --set name=..."
    )


async def find_state(cluster: RunsCluster, run: str) -> ClusterRunState | None:
    """Return the state of a run, or None if there is no such run."""
    job, config_map = await cluster.find_job(run), await cluster.find_config_map(run)
    if job is not None:
        return read_state(job, config_map)
    return None if config_map is None else ClusterRunState(run, RunPhase.STOPPED)


async def read_run_state(cluster: RunsCluster, run: str) -> ClusterRunState:
    """Return the state of a run.

    Raises:
        NotFoundError: there is no such run.
    """
    state = await find_state(cluster, run)
    if state is None:
        raise await cluster.make_missing_error(run)
    return state


async def list_states(cluster: RunsCluster) -> list[ClusterRunState]:
    """Return the states of all runs of the namespace, oldest first."""
    config_maps = {
        config_map["metadata"]["labels"][RUN_LABEL]: config_map
        for config_map in await cluster.list_config_maps()
    }
    states = [
        read_state(job, config_maps.pop(job["metadata"]["name"], None))
        for job in await cluster.list_jobs()
    ]
    for run, config_map in config_maps.items():
        created_at = config_map["metadata"]["creationTimestamp"]
        states.append(ClusterRunState(run, RunPhase.STOPPED, created_at=created_at))
    return sorted(states, key=lambda state: state.created_at)


async def stop(cluster: RunsCluster, run: str, *, deletes_now: bool = False) -> StopOutcome:
    """Request a stop after the current step, or delete the run if it has not started.

    Args:
        deletes_now: True to delete the run without waiting for its current step.

    Raises:
        NotFoundError: there is no such run.
    """
    state, config_map = await read_run_state(cluster, run), await cluster.find_config_map(run)
    if state.is_over:
        return StopOutcome.NOT_RUNNING
    has_started = state.phase in (RunPhase.RUNNING, RunPhase.STOPPING)
    if deletes_now or not has_started or config_map is None:
        await cluster.delete(run)
        return StopOutcome.DELETED
    ttl_patch = {"spec": {"ttlSecondsAfterFinished": _TTL_AFTER_STOP_S}}
    await cluster.api.merge(make_job_path(cluster.namespace, run), ttl_patch)
    await _change_control(cluster, state, config_map, stop=True)
    return StopOutcome.REQUESTED


async def scale(cluster: RunsCluster, run: str, num_workers: int) -> None:
    """Request a different number of rollout workers for a run that has not ended.

    Raises:
        NotFoundError: there is no such run.
        ConfigError: the run has ended, or cannot have this number of workers.
    """
    state, config_map = await read_run_state(cluster, run), await cluster.find_config_map(run)
    resume_command = cluster.format_command(f"resume {run} --set rollout.num_workers={num_workers}")
    if state.is_over or config_map is None:
        raise ConfigError(f"run '{run}' has ended; continue it with: {resume_command}")
    config = require_language_model(
        validate_run_json(read_run_config_json(config_map)), "ludus scale"
    )
    if num_workers < config.rollout.min_workers:
        raise ConfigError(
            f"run '{run}' needs at least rollout.min_workers = {config.rollout.min_workers} "
            f"workers, got {num_workers}"
        )
    release = await cluster.find_run_release(run)
    max_workers = count_max_workers(await cluster.read_job(run), release.platform)
    if num_workers > max_workers:
        stop_command = cluster.format_command(f"stop {run}")
        raise ConfigError(
            f"run '{run}' has room for {max_workers} workers, got {num_workers}; raise "
            "runs.rollout.max and set runs.autoscaling.enabled in the release's values for later "
            f"runs, or restart this run with: {stop_command}, then: {resume_command}"
        )
    await _change_control(cluster, state, config_map, num_workers=num_workers)


async def _change_control(
    cluster: RunsCluster, state: ClusterRunState, config_map: JsonObject, **changes: int
) -> None:
    """Change fields of the run's control file, and deliver the file to the driver at once."""
    control = _read_control(config_map).model_copy(update=changes)
    await cluster.write_control(state.name, control.model_dump_json())
    for pod in await cluster.list_pods(state.ray_cluster):
        if is_head(pod):
            await cluster.refresh_mounts(pod["metadata"]["name"], datetime.now(UTC).isoformat())


def _read_control(config_map: JsonObject) -> RunControl:
    return RunControl.model_validate_json(config_map["data"].get(CONTROL_KEY, "{}"))


async def load_resumable_config(
    cluster: RunsCluster, run: str, overrides: Sequence[str]
) -> LanguageModelRun:
    """Return the configuration of a run that has ended, with overrides applied.

    Raises:
        NotFoundError: there is no such run.
        ConfigError: the run has not ended, it is complete, or an override is invalid or cannot be
            changed.
    """
    config_map = await cluster.find_config_map(run)
    state = await find_state(cluster, run)
    if state is None or config_map is None:
        raise NotFoundError(
            f"there is no run '{run}' in namespace '{cluster.namespace}'; see: "
            f"{cluster.format_command('list')}. If its folder is still on the volume, `ludus "
            "submit` with the same name continues from its latest checkpoint"
        )
    if not state.is_over:
        raise ConfigError(
            f"run '{run}' has not ended ({state.phase}); follow it with: "
            f"{cluster.format_command(f'logs -f {run}')}"
        )
    old_config_json = read_run_config_json(config_map)
    num_workers = _read_control(config_map).num_workers
    if num_workers is not None:
        overrides = [f"rollout.num_workers={num_workers}", *overrides]
    run_config = make_run_config(json.loads(old_config_json), overrides)
    config = require_language_model(run_config, "ludus resume")
    if config.name != run:
        raise ConfigError(
            f"--set name={config.name}: a resumed run keeps its name '{run}', which identifies its "
            "checkpoints; remove this option"
        )
    # The driver would refuse the same changes, but only after the old RayJob is deleted.
    old_config = validate_run_json(old_config_json)
    find_changes(old_config, config)
    if state.phase is RunPhase.SUCCEEDED and not _asks_for_more(config, old_config):
        num_steps = old_config.training.num_steps
        command = cluster.format_command(f"resume {run} --set training.num_steps={2 * num_steps}")
        raise ConfigError(
            f"run '{run}' is complete, so nothing was started; train more steps with: {command}; "
            f"copy its results with: {cluster.format_command(f'fetch {run}')}"
        )
    return config


def _asks_for_more(config: LanguageModelRun, old_config: RunConfig) -> bool:
    """Return whether a configuration may ask for more steps than a complete run has trained."""
    num_epochs = config.training.num_epochs
    old_num_epochs = getattr(old_config.training, "num_epochs", None)
    if num_epochs is None and old_num_epochs is None:
        return config.training.num_steps > old_config.training.num_steps
    return num_epochs is None or old_num_epochs is None or num_epochs > old_num_epochs
