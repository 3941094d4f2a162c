"""KEDA and Kubernetes' horizontal autoscaler without a cluster, second by second.

    sessions wanted --KEDA, at each poll--> none or some pods
                    --HPA, at each look---> some or more pods, by windows and policies

The algorithm is the documented one
(https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/ and
https://keda.sh/docs/latest/concepts/scaling-deployments/), for one metric with an average value
as its target. Left out: what happens while the metric cannot be read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HPA_SYNC_S = 15
"""How often the controller looks, unless it was told another time."""
TOLERANCE = 0.1
"""So far from the target nothing changes."""

Object = dict[str, Any]


@dataclass
class Autoscaler:
    """The number of pods of a ScaledObject.

    Args:
        spec: the ScaledObject's.
        sync_s: seconds between two looks of the HPA.
    """

    spec: Object
    replicas: int
    sync_s: int = HPA_SYNC_S
    _active_s: float = -math.inf
    """When KEDA last saw somebody."""
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def tick(self, now_s: int, wanted: float) -> int:
        """The pods after this second, in which so many sessions are to be provided for."""
        if now_s % self.spec["pollingInterval"] == 0:
            self._poll(now_s, wanted)
        if now_s % self.sync_s == 0 and self.replicas > 0:
            self._scale(now_s, wanted)
        return self.replicas

    def _poll(self, now_s: int, wanted: float) -> None:
        least = self.spec["minReplicaCount"]
        is_active = wanted > float(self.spec["triggers"][0]["metadata"]["activationThreshold"])
        if is_active:
            self._active_s = now_s
            self.replicas = self.replicas or max(1, least)
        elif least == 0 and now_s - self._active_s > self.spec["cooldownPeriod"]:
            self.replicas = 0

    def _scale(self, now_s: int, wanted: float) -> None:
        target = float(self.spec["triggers"][0]["metadata"]["threshold"])
        desired = self.replicas
        if abs(1 - wanted / (target * self.replicas)) > TOLERANCE:
            desired = math.ceil(wanted / target)
        least = max(1, self.spec["minReplicaCount"])
        desired = min(max(desired, least), self.spec["maxReplicaCount"])
        behavior = self.spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        desired = self._limited(now_s, self._stabilized(now_s, desired, behavior), behavior)
        if desired != self.replicas:
            self._changes.append((now_s, desired - self.replicas))
            self.replicas = desired

    def _stabilized(self, now_s: int, desired: int, behavior: Object) -> int:
        """The lowest number of the window when it rises, the highest when it falls."""
        rises = desired >= self.replicas
        window_s = behavior["scaleUp" if rises else "scaleDown"]["stabilizationWindowSeconds"]
        recent = [number for at_s, number in self._recommended if at_s > now_s - window_s]
        self._recommended.append((now_s, desired))
        return (min if rises else max)([*recent, desired])

    def _limited(self, now_s: int, desired: int, behavior: Object) -> int:
        """As near to `desired` as the policies let it come."""
        if desired == self.replicas:
            return desired
        rises = desired > self.replicas
        limits = []
        for policy in behavior["scaleUp" if rises else "scaleDown"]["policies"]:
            since_s = now_s - policy["periodSeconds"]
            start = self.replicas - sum(by for at_s, by in self._changes if at_s > since_s)
            amount = policy["value"]
            if policy["type"] == "Percent":
                # Away from the start in both directions: else a tenth of one pod were none.
                factor = 1 + amount / 100 if rises else 1 - amount / 100
                limits.append((math.ceil if rises else math.floor)(start * factor))
            else:
                limits.append(start + amount if rises else start - amount)
        if rises:
            return min(desired, max(self.replicas, *limits))
        return max(desired, min(self.replicas, *limits))


def replayed(scaler: Autoscaler, wanted: Sequence[float], phase_s: int = 0) -> list[int]:
    """The pods at the end of each second of a recorded demand.

    Args:
        phase_s: when the controllers first look.
    """
    return [scaler.tick(at_s - phase_s, number) for at_s, number in enumerate(wanted)]


@dataclass(slots=True, eq=False)
class _Pod:
    ready_s: int
    num_sessions: int = 0
    ends: Counter[int] = field(default_factory=Counter)
    """Sessions by the second in which they end."""

    def tick(self, at_s: int) -> None:
        self.num_sessions -= self.ends.pop(at_s, 0)

    def open(self, number: int, end_s: int) -> None:
        self.num_sessions += number
        self.ends[end_s] += number


@dataclass
class Fleet:
    """Players on pods that a scaler adds and removes; who ends a session opens the next.

    Args:
        capacity: sessions that a pod holds.
        start_s: from a pod that is wanted to one that takes sessions.
        session_s: how long each session lasts.
    """

    scaler: Autoscaler
    capacity: int
    start_s: int
    session_s: int
    _pods: list[_Pod] = field(default_factory=list)
    _draining: list[_Pod] = field(default_factory=list)

    def run(self, players: Sequence[int]) -> list[int]:
        """The pods at the end of each second, with so many players in it."""
        return [self._second(at_s, number) for at_s, number in enumerate(players)]

    def _second(self, at_s: int, players: int) -> int:
        for pod in (*self._pods, *self._draining):
            pod.tick(at_s)
        self._draining = [pod for pod in self._draining if pod.num_sessions]
        pending = max(0, players - sum(pod.num_sessions for pod in (*self._pods, *self._draining)))
        ready = [pod for pod in self._pods if pod.ready_s <= at_s]
        for place, pod in enumerate(sorted(ready, key=lambda pod: -pod.num_sessions)):
            number = min(pending // (len(ready) - place), self.capacity - pod.num_sessions)
            pod.open(number, at_s + self.session_s)
            pending -= number
        active = sum(pod.num_sessions for pod in self._pods)
        replicas = self.scaler.tick(at_s, active + pending)
        while len(self._pods) < replicas:
            self._pods.append(_Pod(at_s + self.start_s))
        while len(self._pods) > replicas:
            emptiest = min(self._pods, key=lambda pod: pod.num_sessions)
            self._pods.remove(emptiest)
            self._draining.append(emptiest)
        return replicas
