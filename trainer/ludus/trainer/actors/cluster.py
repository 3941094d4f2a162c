"""The Ray cluster of a run: connection, survey of its nodes, and waiting for room.

    survey --> nodes, and whether others may join --> Placement, placement group
                                             |
                                             +----> error message, or wait

Missing room may appear later: an autoscaler starts nodes for waiting actors, and lost nodes are
replaced. A run fails if room is missing for placement.join_timeout_s, and there is no autoscaler or
the autoscaler reports that the demand is infeasible.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import ray
from ray import cloudpickle
from ray.core.generated.autoscaler_pb2 import AutoscalingState, GetClusterStatusReply
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.trainer.actors.placement import (
    Placement,
    Resources,
    Roles,
    RunDemand,
    format_resources,
    place_in_cluster,
    place_on_one_machine,
)
from ludus.trainer.actors.ray_address import (
    check_cluster,
    get_address,
    is_local,
    make_address_error,
)
from ludus.trainer.actors.ray_signals import defer_signals
from ludus.trainer.core.functions import copy_registered_functions, unregister_function
from ludus.trainer.core.output import warn_user
from ludus.trainer.core.tasks import CancellingTaskGroup

_log = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0
_STATUS_TIMEOUT_S = 10.0
_MESSAGE_INTERVAL_S = 60.0
_FIRST_MESSAGE_DELAY_S = 5.0
"""Time before the first message. Ray usually grants existing room sooner."""

_TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
_TOKEN_PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"
_TOKEN_BYTES = 16
_START_TIMEOUT_MESSAGE = "timed out during startup"
"""Text of Ray's error if it does not start within 30 s, a fixed limit."""
_START_LOGGERS = ("ray._private.worker", "ray._private.authentication.authentication_token_setup")
_EXPECTED_MESSAGES = (
    "SIGTERM handler is not set",  # the trainer's event loop may be in any thread
    "Token authentication is enabled",
)

ResultT = TypeVar("ResultT")


def start_ray() -> None:
    """Join the Ray cluster of RAY_ADDRESS, or start Ray on this machine.

    The program's handlers of SIGINT and SIGTERM stay, and are called after the start.

    Raises:
        ConfigError: there is no usable cluster at RAY_ADDRESS.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_local():
        _ensure_token()
    else:
        check_cluster()
    with defer_signals():
        _start_ray_with_retry()


def _start_ray_with_retry() -> None:
    try:
        _init_ray()
    except Exception as error:  # Ray does not raise a narrower class
        if not is_local():
            raise make_address_error(describe_failure(error)) from error
        if _START_TIMEOUT_MESSAGE not in str(error):
            raise
        _log.warning("Ray did not start in time, perhaps because the machine is busy; retrying")
        _init_ray()


def _ensure_token() -> None:
    """Choose a token for a new cluster if Ray cannot write one to the home directory."""
    if _TOKEN_PATH_VARIABLE in os.environ:
        return
    try:
        folder = Path.home() / ".ray"
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "auth_token").exists() or os.access(folder, os.W_OK):
            return
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        pass
    os.environ.setdefault(_TOKEN_VARIABLE, secrets.token_hex(_TOKEN_BYTES))


def _init_ray() -> None:
    for name in _START_LOGGERS:
        logging.getLogger(name).addFilter(_is_useful)
    ray.init(
        address=get_address(),
        include_dashboard=False if is_local() else None,
        log_to_driver=not is_local(),
        logging_level=logging.WARNING,
        configure_logging=False,
    )


def _is_useful(record: logging.LogRecord) -> bool:
    """Return whether a log record of Ray's start tells the user something to act on."""
    return not record.getMessage().startswith(_EXPECTED_MESSAGES)


@dataclass(frozen=True, slots=True)
class ClusterSurvey:
    """The nodes of a cluster and the state of its autoscaler, at one time."""

    nodes: tuple[Resources, ...]
    """Total resources of each living node, including those in use."""
    autoscaling: AutoscalingState

    def may_provide(self, demand: RunDemand) -> bool:
        """Return whether an autoscaler exists and does not report the demand as infeasible."""
        if not self.autoscaling.autoscaler_state_version:
            return False
        infeasible_requests = list(self.autoscaling.infeasible_resource_requests)
        for gang in self.autoscaling.infeasible_gang_resource_requests:
            infeasible_requests += gang.requests
            for selector in gang.bundle_selectors:
                infeasible_requests += selector.resource_requests
        infeasible_bundles = [dict(request.resources_bundle) for request in infeasible_requests]
        requests = (demand.ranks, demand.workers)
        bundles = [dict(request.resources) for request in requests if request.num_actors]
        return not any(bundle in infeasible_bundles for bundle in bundles)


def survey_cluster() -> ClusterSurvey:
    """Return the current nodes and autoscaler state."""
    nodes = tuple(node["Resources"] for node in ray.nodes() if node["Alive"])
    status = GetClusterStatusReply()
    status.ParseFromString(internal_kv_get_gcs_client().get_cluster_status())
    return ClusterSurvey(nodes, status.autoscaling_state)


def list_draining_nodes() -> frozenset[str]:
    """Return the ids of nodes that will be removed: evicted, reclaimed, or no longer needed."""
    return frozenset(internal_kv_get_gcs_client().get_draining_nodes(timeout=_STATUS_TIMEOUT_S))


@asynccontextmanager
async def place_in_ray(run: LanguageModelRun, roles: Roles = Roles.ALL) -> AsyncIterator[Placement]:
    """Connect to Ray for the block, and yield the placement of the run's actors of these roles.

    If the process is already connected to a cluster, the run uses that cluster.

    Raises:
        ConfigError: there is no room for the run, and none can be provided.
    """
    starts_ray = not ray.is_initialized()
    if starts_ray:
        start_ray()
    try:
        if starts_ray and is_local():
            yield _place_on_this_machine(run, roles)
            return
        placement = await _reserve_room(run, roles)
        try:
            yield placement
        finally:
            if placement.group is not None:
                remove_placement_group(placement.group)
    finally:
        if starts_ray:
            ray.shutdown()


def _place_on_this_machine(run: LanguageModelRun, roles: Roles) -> Placement:
    placement = place_on_one_machine(run, roles)
    nodes = [node["Resources"] for node in ray.nodes()]
    if not placement.demand.fits(nodes):
        raise ConfigError(_format_no_room_message("this machine", placement.demand, nodes))
    if Roles.WORKERS not in roles:
        return placement
    max_workers = placement.demand.count_max_workers(nodes)
    if run.rollout.num_workers > max_workers:
        resources = format_resources(placement.demand.workers.resources)
        warn_user(
            f"rollout.num_workers = {run.rollout.num_workers}, but this machine has room for "
            f"{max_workers}, each with {resources}; starting {max_workers}"
        )
    # No node can join, so a worker without room would wait forever.
    return replace(placement, max_workers=max_workers)


async def _reserve_room(run: LanguageModelRun, roles: Roles) -> Placement:
    """Return the placement of the actors in a cluster, with reserved room for all ranks."""
    survey = await asyncio.to_thread(survey_cluster)
    node_id = ray.get_runtime_context().get_node_id()
    placement = place_in_cluster(run, survey.nodes, node_id, roles)
    if Roles.RANKS not in roles:
        return placement
    ranks = placement.demand.ranks
    strategy = "STRICT_PACK" if ranks.must_share_node else "PACK"
    group = placement_group([dict(ranks.resources)] * ranks.num_actors, strategy=strategy)
    await wait_for_room(placement, _wait_for_group(group), may_be_in_use=True)
    return replace(placement, group=group)


async def wait_for_room(
    placement: Placement,
    awaitable: Awaitable[ResultT],
    *,
    may_be_in_use: bool = False,
    raises_without_room: bool = True,
) -> ResultT:
    """Await the start of actors and return its result; meanwhile report missing room.

    With `may_be_in_use`, waiting is also reported if the room exists, because other programs may
    use it.

    Raises:
        ConfigError: `raises_without_room` is set, and no room can be provided.
    """
    if placement.is_one_machine:
        return await awaitable
    async with CancellingTaskGroup() as tasks:
        tasks.start(_watch_room(placement, may_be_in_use, raises_without_room))
        return await awaitable


async def _wait_for_group(group: PlacementGroup) -> None:
    # The wait is short, because its thread cannot be cancelled and would delay the exit.
    while not await asyncio.to_thread(group.wait, 1.0):
        pass


async def _watch_room(placement: Placement, may_be_in_use: bool, raises_without_room: bool) -> None:
    """Report at intervals which room the run waits for; see `wait_for_room`."""
    demand = placement.demand
    last_chance_s = time.monotonic()
    next_message_s = last_chance_s + _FIRST_MESSAGE_DELAY_S
    while True:
        survey = await asyncio.to_thread(survey_cluster)
        now_s = time.monotonic()
        has_room, may_get_room = demand.fits(survey.nodes), survey.may_provide(demand)
        if has_room or may_get_room:
            last_chance_s = now_s
        elif raises_without_room and now_s - last_chance_s >= placement.join_timeout_s:
            raise ConfigError(_format_no_room_message("the Ray cluster", demand, survey.nodes))
        if now_s >= next_message_s and (may_be_in_use or not has_room):
            provider = "the autoscaler" if may_get_room else "nodes to join"
            provider = "other programs to release resources" if has_room else provider
            nodes = demand.describe_nodes(survey.nodes)
            warn_user(f"waiting for {provider}: the run needs {demand}; the cluster has {nodes}")
            next_message_s = now_s + _MESSAGE_INTERVAL_S
        await asyncio.sleep(POLL_INTERVAL_S)


def check_sendable_functions() -> None:
    """Check that all registered functions can be sent.

    Raises:
        ConfigError: a function cannot be sent. It is unregistered, so that the next run of a
            notebook can register a new one.
    """
    for path, function in copy_registered_functions().items():
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # pickling raises any class
            unregister_function(path)
            raise ConfigError(
                f"function '{path}' cannot be sent to the run's processes: {error}; create the "
                "objects that it refers to inside the function, or import the function from a "
                "module"
            ) from error


def describe_failure(error: BaseException) -> str:
    """Return the reason of a failure in one line, without tracebacks and Ray's general advice."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    return " ".join(str(error).split()).partition(" Some common causes include")[0]


def _format_no_room_message(location: str, demand: RunDemand, nodes: Iterable[Resources]) -> str:
    return (
        f"{location} has no room for this run: it needs {demand}, and there is "
        f"{demand.describe_nodes(nodes)}; add resources, or lower learner.num_ranks, "
        "rollout.min_workers, or the num_threads and GPUs of either"
    )
