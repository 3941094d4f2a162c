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

JsonObject = dict[str, Any]


@dataclass
class Autoscaler:
    """The number of pods of a ScaledObject.

    Args:
        spec: spec of the ScaledObject.
        replicas: initial number of pods.
        sync_s: seconds between two syncs of the HPA.
    """

    spec: JsonObject
    replicas: int
    sync_s: int = HPA_SYNC_S
    _last_active_s: float = -math.inf
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
            self._last_active_s = now_s
            self.replicas = self.replicas or max(1, min_replicas)
        elif min_replicas == 0 and now_s - self._last_active_s > self.spec["cooldownPeriod"]:
            self.replicas = 0

    def _scale(self, now_s: int, num_sessions: float) -> None:
        target = float(self.spec["triggers"][0]["metadata"]["threshold"])
        goal = self.replicas
        if abs(1 - num_sessions / (target * self.replicas)) > TOLERANCE:
            goal = math.ceil(num_sessions / target)
        min_replicas = max(1, self.spec["minReplicaCount"])
        goal = min(max(goal, min_replicas), self.spec["maxReplicaCount"])
        behavior = self.spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        goal = self._stabilize(now_s, goal, behavior)
        goal = self._apply_policies(now_s, goal, behavior)
        if goal != self.replicas:
            self._changes.append((now_s, goal - self.replicas))
            self.replicas = goal

    def _stabilize(self, now_s: int, goal: int, behavior: JsonObject) -> int:
        """Return the lowest recent recommendation to scale up, the highest to scale down."""
        scales_up = goal >= self.replicas
        window_s = behavior["scaleUp" if scales_up else "scaleDown"]["stabilizationWindowSeconds"]
        candidates = [number for at_s, number in self._recommendations if at_s > now_s - window_s]
        self._recommendations.append((now_s, goal))
        return (min if scales_up else max)([*candidates, goal])

    def _apply_policies(self, now_s: int, goal: int, behavior: JsonObject) -> int:
        """Return the number nearest to `goal` that the policies allow."""
        if goal == self.replicas:
            return goal
        scales_up = goal > self.replicas
        limits = []
        for policy in behavior["scaleUp" if scales_up else "scaleDown"]["policies"]:
            since_s = now_s - policy["periodSeconds"]
            base = self.replicas - sum(change for at_s, change in self._changes if at_s > since_s)
            amount = policy["value"]
            if policy["type"] == "Percent":
                # Round away from the start, so that 10 % of one pod is one pod.
                factor = 1 + amount / 100 if scales_up else 1 - amount / 100
                limits.append((math.ceil if scales_up else math.floor)(base * factor))
            else:
                limits.append(base + amount if scales_up else base - amount)
        if scales_up:
            return min(goal, max(self.replicas, *limits))
        return max(goal, min(self.replicas, *limits))


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
    endings: Counter[int] = field(default_factory=Counter)
    """Number of sessions by the second in which they end."""

    def tick(self, at_s: int) -> None:
        self.num_sessions -= self.endings.pop(at_s, 0)

    def open_sessions(self, number: int, end_s: int) -> None:
        self.num_sessions += number
        self.endings[end_s] += number


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
    _draining_pods: list[_Pod] = field(default_factory=list)

    def run(self, players: Sequence[int]) -> list[int]:
        """Return the number of pods at the end of each second, given the players in each second."""
        return [self._advance(at_s, number) for at_s, number in enumerate(players)]

    def _advance(self, at_s: int, players: int) -> int:
        pods = (*self._pods, *self._draining_pods)
        for pod in pods:
            pod.tick(at_s)
        self._draining_pods = [pod for pod in self._draining_pods if pod.num_sessions]
        backlog = max(0, players - sum(pod.num_sessions for pod in pods))
        ready_pods = [pod for pod in self._pods if pod.ready_s <= at_s]
        for index, pod in enumerate(sorted(ready_pods, key=lambda pod: -pod.num_sessions)):
            number = min(backlog // (len(ready_pods) - index), self.capacity - pod.num_sessions)
            pod.open_sessions(number, at_s + self.session_s)
            backlog -= number
        num_active = sum(pod.num_sessions for pod in self._pods)
        replicas = self.scaler.tick(at_s, num_active + backlog)
        while len(self._pods) < replicas:
            self._pods.append(_Pod(at_s + self.start_s))
        while len(self._pods) > replicas:
            emptiest_pod = min(self._pods, key=lambda pod: pod.num_sessions)
            self._pods.remove(emptiest_pod)
            self._draining_pods.append(emptiest_pod)
        return replicas
