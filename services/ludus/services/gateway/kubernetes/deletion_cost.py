"""Tells Kubernetes which pods a scale-in should remove first: those with the fewest sessions.

    loads() --(num_sessions, capacity) by pod--> bucket --PATCH, if it changed--> annotation

A ReplicaSet that shrinks removes the pods of lowest `pod-deletion-cost` first, and a pod
without one counts as 0. Each change is a write to the API server and wakes controllers, so
the cost is a coarse bucket, written when it changed, at least half a minute apart for each
pod, a few a second in all, and by the leading gateway alone. It is a hint: evictions and node
drains do not ask for it, and a pod that is removed with sessions on it drains them.
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
Loads = Callable[[], Mapping[str, tuple[int, int]]]
"""(num_sessions, capacity) by the name of the pod, of the pods that are there now."""

_NOT_FOUND = 404
_OVERLOADED = 429


def bucket_of(num_sessions: int, capacity: int) -> int:
    """The cost of a pod: 0 without sessions, else its use of capacity rounded up to a quarter.

    0 -> 0, 1-25 % -> 25, 26-50 % -> 50, 51-75 % -> 75, above -> 100.
    """
    if num_sessions <= 0:
        return 0
    if num_sessions >= capacity:
        return 100
    return 25 * -(-4 * num_sessions // capacity)


@dataclass(frozen=True, slots=True)
class CostOptions:
    """How often to write."""

    sweep_s: float = 5.0
    """Between two looks at the loads."""
    min_interval_s: float = 30.0
    """Between two writes to one pod."""
    max_patches_per_s: float = 10.0


@dataclass(frozen=True, slots=True)
class _Written:
    """The last write to a pod; `bucket` is None when it failed."""

    bucket: int | None
    at_s: float


class DeletionCost:
    """Keeps the annotation of an environment's pods, while this gateway leads."""

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        loads: Loads,
        is_leader: Callable[[], bool],
        *,
        options: CostOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._loads = loads
        self._is_leader = is_leader
        self._options = options or CostOptions()
        self._clock = clock
        self._written: dict[str, _Written] = {}

    async def run(self) -> None:
        """Sweep at intervals, for ever."""
        while True:
            await self.sweep()
            await asyncio.sleep(self._options.sweep_s)

    async def sweep(self) -> int:
        """The number of pods written to, after one look at the loads."""
        if not self._is_leader():
            self._written.clear()  # who led meanwhile wrote other costs
            return 0
        buckets = {pod: bucket_of(*load) for pod, load in self._loads().items()}
        self._written = {pod: last for pod, last in self._written.items() if pod in buckets}
        num_written = 0
        for pod in self._due(buckets):
            if not self._is_leader():
                break
            try:
                await self._write(pod, buckets[pod])
                num_written += 1
            except ClusterError as error:
                _log.warning("the deletion cost of pod %s: %s", pod, error)
                if error.status in (0, _OVERLOADED) or error.status >= 500:
                    break  # not about this pod: the others would fare no better
            await asyncio.sleep(1.0 / self._options.max_patches_per_s)
        return num_written

    def _due(self, buckets: Mapping[str, int]) -> list[str]:
        """The pods to write to now, those first whose cost is farthest from the truth."""
        earliest_s = self._clock() - self._options.min_interval_s
        errors: dict[str, int] = {}
        for pod, bucket in buckets.items():
            last = self._written.get(pod)
            if last is None or (last.bucket != bucket and last.at_s <= earliest_s):
                # A pod never written to counts as 0, unless a former leader wrote to it.
                errors[pod] = abs(bucket - (last.bucket or 0 if last else 0))
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
        # A pod that vanished is remembered as written, and forgotten when its load is.
        self._written[pod] = _Written(bucket, started_s)
