"""Simulation of KEDA and Kubernetes' horizontal pod autoscaler (HPA), second by second.

    sessions --KEDA, at each poll--> zero pods or more
             --HPA, at each sync---> one pod or more, by windows and policies

The algorithm is the documented one
(https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/ and
https://keda.sh/docs/latest/concepts/scaling-deployments/), for one metric with an average value
as its target. A metric that cannot be read is not simulated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HPA_SYNC_S = 15
"""Default seconds between two syncs of the HPA."""
TOLERANCE = 0.1
"""Relative distance from the target below which the number of pods does not change."""

Object = dict[str, Any]


@dataclass
class Autoscaler:
    """The number of pods of a ScaledObject.

    Args:
        spec: spec of the ScaledObject.
        replicas: initial number of pods.
        sync_s: seconds between two syncs of the HPA.
    """

    spec: Object
    replicas: int
    sync_s: int = HPA_SYNC_S
    _active_s: float = -math.inf
    """Time of the last poll at which KEDA saw activity."""
    _recommendations: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def tick(self, now_s: int, num_sessions: float) -> int:
        """Return the number of pods after this second, with this number of sessions."""
        if now_s % self.spec["pollingInterval"] == 0:
            self._poll(now_s, num_sessions)
        if now_s % self.sync_s == 0 and self.replicas > 0:
            self._scale(now_s, num_sessions)
        return self.replicas

    def _poll(self, now_s: int, num_sessions: float) -> None:
        min_replicas = self.spec["minReplicaCount"]
        metadata = self.spec["triggers"][0]["metadata"]
        is_active = num_sessions > float(metadata["activationThreshold"])
        if is_active:
            self._active_s = now_s
            self.replicas = self.replicas or max(1, min_replicas)
        elif min_replicas == 0 and now_s - self._active_s > self.spec["cooldownPeriod"]:
            self.replicas = 0

    def _scale(self, now_s: int, num_sessions: float) -> None:
        target = float(self.spec["triggers"][0]["metadata"]["threshold"])
        desired = self.replicas
        if abs(1 - num_sessions / (target * self.replicas)) > TOLERANCE:
            desired = math.ceil(num_sessions / target)
        min_replicas = max(1, self.spec["minReplicaCount"])
        desired = min(max(desired, min_replicas), self.spec["maxReplicaCount"])
        behavior = self.spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        desired = self._stabilize(now_s, desired, behavior)
        desired = self._limit(now_s, desired, behavior)
        if desired != self.replicas:
            self._changes.append((now_s, desired - self.replicas))
            self.replicas = desired

    def _stabilize(self, now_s: int, desired: int, behavior: Object) -> int:
        """Return the lowest recent recommendation to scale up, the highest to scale down."""
        rises = desired >= self.replicas
        window_s = behavior["scaleUp" if rises else "scaleDown"]["stabilizationWindowSeconds"]
        recent = [number for at_s, number in self._recommendations if at_s > now_s - window_s]
        self._recommendations.append((now_s, desired))
        return (min if rises else max)([*recent, desired])

    def _limit(self, now_s: int, desired: int, behavior: Object) -> int:
        """Return the number nearest to `desired` that the policies allow."""
        if desired == self.replicas:
            return desired
        rises = desired > self.replicas
        limits = []
        for policy in behavior["scaleUp" if rises else "scaleDown"]["policies"]:
            since_s = now_s - policy["periodSeconds"]
            start = self.replicas - sum(by for at_s, by in self._changes if at_s > since_s)
            amount = policy["value"]
            if policy["type"] == "Percent":
                # Round away from the start, so that 10 % of one pod is one pod.
                factor = 1 + amount / 100 if rises else 1 - amount / 100
                limits.append((math.ceil if rises else math.floor)(start * factor))
            else:
                limits.append(start + amount if rises else start - amount)
        if rises:
            return min(desired, max(self.replicas, *limits))
        return max(desired, min(self.replicas, *limits))


def simulate_demand(
    scaler: Autoscaler, num_sessions: Sequence[float], phase_s: int = 0
) -> list[int]:
    """Return the number of pods at the end of each second of a recorded demand.

    Args:
        num_sessions: sessions in each second.
        phase_s: second of the controllers' first sync.
    """
    return [scaler.tick(at_s - phase_s, number) for at_s, number in enumerate(num_sessions)]


@dataclass(slots=True, eq=False)
class _Pod:
    ready_s: int
    num_sessions: int = 0
    ends: Counter[int] = field(default_factory=Counter)
    """Number of sessions by the second in which they end."""

    def tick(self, at_s: int) -> None:
        self.num_sessions -= self.ends.pop(at_s, 0)

    def open(self, number: int, end_s: int) -> None:
        self.num_sessions += number
        self.ends[end_s] += number


@dataclass
class Fleet:
    """Players on pods that a scaler adds and removes. A player opens a new session after each one.

    Args:
        scaler: autoscaler of the pods.
        capacity: maximum number of sessions per pod.
        start_s: seconds from the creation of a pod until it accepts sessions.
        session_s: duration of each session.
    """

    scaler: Autoscaler
    capacity: int
    start_s: int
    session_s: int
    _pods: list[_Pod] = field(default_factory=list)
    _draining: list[_Pod] = field(default_factory=list)

    def run(self, players: Sequence[int]) -> list[int]:
        """Return the number of pods at the end of each second, given the players in each second."""
        return [self._advance(at_s, number) for at_s, number in enumerate(players)]

    def _advance(self, at_s: int, players: int) -> int:
        for pod in (*self._pods, *self._draining):
            pod.tick(at_s)
        self._draining = [pod for pod in self._draining if pod.num_sessions]
        pending = max(0, players - sum(pod.num_sessions for pod in (*self._pods, *self._draining)))
        ready = [pod for pod in self._pods if pod.ready_s <= at_s]
        for index, pod in enumerate(sorted(ready, key=lambda pod: -pod.num_sessions)):
            number = min(pending // (len(ready) - index), self.capacity - pod.num_sessions)
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
