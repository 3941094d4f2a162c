"""Deletion costs of pods, which make a scale-in remove the pods with the fewest sessions first.

    read_loads() --(num_sessions, capacity) by pod--> bucket --PATCH, if it changed--> annotation

A shrinking ReplicaSet removes the pods with the lowest `pod-deletion-cost` first; a pod without the
annotation counts as 0. Writes are expensive for the cluster, because they wake controllers. The
cost is therefore rounded to a bucket, and only the leading gateway writes it, if it changed, at
most every half minute per pod and ten times per second in total. The cost is only a hint: evictions
and node drains ignore it, and a removed pod still drains its sessions.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ludus.proto.errors import ClusterError
from ludus.services.kubernetes.api import KubernetesApi, make_resource_path

_log = logging.getLogger(__name__)

COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
ReadLoads = Callable[[], Mapping[str, tuple[int, int]]]
"""Function that returns (num_sessions, capacity) of the current pods, by pod name."""

_NOT_FOUND = 404
_TOO_MANY_REQUESTS = 429
_MIN_WRITE_INTERVAL_S = 30.0
"""Minimum time between two writes to one pod, in seconds."""


def choose_bucket(num_sessions: int, capacity: int) -> int:
    """Return a pod's cost, which is the used share of its capacity, rounded up to 25 %.

    0 -> 0, 1-25 % -> 25, 26-50 % -> 50, 51-75 % -> 75, above -> 100.
    """
    if num_sessions <= 0:
        return 0
    if num_sessions >= capacity:
        return 100
    return 25 * -(-4 * num_sessions // capacity)


@dataclass(frozen=True, slots=True)
class _CostWrite:
    """The last write to a pod; `bucket` is None if the write failed."""

    bucket: int | None
    started_s: float


_UNKNOWN_WRITE = _CostWrite(None, -math.inf)


class DeletionCostWriter:
    """A writer of cost annotations to an environment's pods, active while this gateway leads.

    Args:
        sweep_interval_s: interval between two sweeps, in seconds.
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
        self._last_writes: dict[str, _CostWrite] = {}

    async def run(self) -> None:
        """Call `sweep` at intervals, until cancelled."""
        while True:
            await self.sweep()
            await asyncio.sleep(self._sweep_interval_s)

    async def sweep(self) -> int:
        """Read the loads once, write the costs that changed, and return the number of writes."""
        if not self._is_leader():
            self._last_writes.clear()  # another leader may have written other costs
            return 0
        buckets = {pod: choose_bucket(*load) for pod, load in self._read_loads().items()}
        for deleted_pod in self._last_writes.keys() - buckets.keys():
            del self._last_writes[deleted_pod]
        num_writes = 0
        for pod in self._list_due_pods(buckets):
            if not self._is_leader():
                break
            try:
                await self._write_cost(pod, buckets[pod])
                num_writes += 1
            except ClusterError as error:
                _log.warning("cannot write the deletion cost of pod %s: %s", pod, error)
                if error.status in (0, _TOO_MANY_REQUESTS) or error.status >= 500:
                    break  # writes to other pods would fail, too
            await asyncio.sleep(1.0 / self._max_patches_per_s)
        return num_writes

    def _list_due_pods(self, buckets: Mapping[str, int]) -> list[str]:
        """Return the pods whose cost is due to be written, those with the largest error first."""
        due_before_s = self._clock() - _MIN_WRITE_INTERVAL_S
        cost_errors: dict[str, int] = {}
        for pod, bucket in buckets.items():
            last_write = self._last_writes.get(pod, _UNKNOWN_WRITE)
            if last_write.bucket != bucket and last_write.started_s <= due_before_s:
                # A pod without an annotation has cost 0; an earlier leader's annotation is unknown.
                cost_errors[pod] = abs(bucket - (last_write.bucket or 0))
        return sorted(cost_errors, key=lambda pod: -cost_errors[pod])

    async def _write_cost(self, pod: str, bucket: int) -> None:
        started_s = self._clock()
        self._last_writes[pod] = _CostWrite(None, started_s)
        path = make_resource_path("v1", self._namespace, "pods", pod)
        patch = {"metadata": {"annotations": {COST_ANNOTATION: str(bucket)}}}
        try:
            await self._api.merge(path, patch)
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                raise
        # A deleted pod (404) is recorded as written, so that the write is not repeated.
        self._last_writes[pod] = _CostWrite(bucket, started_s)
