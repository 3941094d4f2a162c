"""Deletion costs of pods, so that a scale-in removes those with the fewest sessions first.

    read_loads() --(num_sessions, capacity) by pod--> bucket --PATCH, if it changed--> annotation

A shrinking ReplicaSet removes the pods with the lowest `pod-deletion-cost` first; a pod without
the annotation counts as 0. Each write goes to the API server and wakes controllers. The cost is
therefore a coarse bucket. Only the leading gateway writes it, after a change, at most every half
minute per pod and a few times per second in total. The cost is a hint: evictions and node drains
ignore it, and a pod that is removed with sessions drains them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ludus.proto.errors import ClusterError
from ludus.services.kubernetes.api import KubernetesApi, resource_path

_log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
ReadLoads = Callable[[], Mapping[str, tuple[int, int]]]
"""Function that returns (num_sessions, capacity) of the current pods, by pod name."""

_NOT_FOUND = 404
_OVERLOADED = 429
_MIN_INTERVAL_S = 30.0
"""Minimum time between two writes to one pod, in seconds."""


def choose_bucket(num_sessions: int, capacity: int) -> int:
    """Return the cost of a pod: its use of capacity in percent, rounded up to a quarter.

    0 -> 0, 1-25 % -> 25, 26-50 % -> 50, 51-75 % -> 75, above -> 100.
    """
    if num_sessions <= 0:
        return 0
    if num_sessions >= capacity:
        return 100
    return 25 * -(-4 * num_sessions // capacity)


@dataclass(frozen=True, slots=True)
class _Written:
    """The last write to a pod; `bucket` is None if it failed."""

    bucket: int | None
    at_s: float


class DeletionCostWriter:
    """A writer of the annotations of an environment's pods, active while this gateway leads.

    Args:
        sweep_interval_s: interval between two sweeps.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        read_loads: ReadLoads,
        is_leader: Callable[[], bool],
        *,
        sweep_interval_s: float = 5.0,
        max_patches_per_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._read_loads = read_loads
        self._is_leader = is_leader
        self._sweep_interval_s = sweep_interval_s
        self._max_patches_per_s = max_patches_per_s
        self._clock = clock
        self._written: dict[str, _Written] = {}

    async def run(self) -> None:
        """Sweep at intervals, until cancelled."""
        while True:
            await self.sweep()
            await asyncio.sleep(self._sweep_interval_s)

    async def sweep(self) -> int:
        """Read the loads once, write the costs that changed, and return the number of writes."""
        if not self._is_leader():
            self._written.clear()  # another leader may have written other costs
            return 0
        buckets = {pod: choose_bucket(*load) for pod, load in self._read_loads().items()}
        self._written = {
            pod: last_write for pod, last_write in self._written.items() if pod in buckets
        }
        num_written = 0
        for pod in self._list_due_pods(buckets):
            if not self._is_leader():
                break
            try:
                await self._write(pod, buckets[pod])
                num_written += 1
            except ClusterError as error:
                _log.warning("cannot write the deletion cost of pod %s: %s", pod, error)
                if error.status in (0, _OVERLOADED) or error.status >= 500:
                    break  # not specific to this pod: other writes would fail, too
            await asyncio.sleep(1.0 / self._max_patches_per_s)
        return num_written

    def _list_due_pods(self, buckets: Mapping[str, int]) -> list[str]:
        """Return the pods to write now, largest error of the cost first."""
        earliest_s = self._clock() - _MIN_INTERVAL_S
        errors: dict[str, int] = {}
        for pod, bucket in buckets.items():
            last_write = self._written.get(pod)
            if last_write is None or (
                last_write.bucket != bucket and last_write.at_s <= earliest_s
            ):
                # An unwritten pod counts as 0, unless an earlier leader wrote its cost.
                errors[pod] = abs(bucket - (last_write.bucket or 0 if last_write else 0))
        return sorted(errors, key=lambda pod: -errors[pod])

    async def _write(self, pod: str, bucket: int) -> None:
        started_s = self._clock()
        self._written[pod] = _Written(None, started_s)
        path = resource_path("v1", self._namespace, "pods", pod)
        try:
            await self._api.merge(path, {"metadata": {"annotations": {ANNOTATION: str(bucket)}}})
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                raise
        # A pod that no longer exists counts as written until it leaves the loads.
        self._written[pod] = _Written(bucket, started_s)
