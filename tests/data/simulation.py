"""A simulated run in virtual time, with the real buffer and the real admission.

A plan contains the durations of groups, training steps and deliveries, and the outcome of each
group. Both `test_window.py` and `bench/overlap.py` use this simulation.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from ludus.trainer.core.types import RolloutGroup
from ludus.trainer.data.buffer import GroupAdmission, GroupBuffer
from tests.data.rollouts import make_group


@dataclass(frozen=True)
class Plan:
    """Settings of a simulated run."""

    groups_per_step: int
    max_staleness: int
    window_fraction: float
    num_slots: int
    durations: list[float]
    """Durations of the groups in seconds. The list repeats."""
    outcomes: list[str]
    """Outcomes of the groups: "trained", "equal", "void" or "lost". The list repeats."""
    train_s: float
    deliver_s: float
    num_steps: int = 6

    @property
    def window(self) -> int:
        """Size of the buffer's window in groups."""
        max_groups = (self.max_staleness + 1) * self.groups_per_step
        return max(1, math.floor(self.window_fraction * max_groups))

    def get_duration_s(self, index: int) -> float:
        """Return the duration of group `index` in seconds."""
        return self.durations[index % len(self.durations)]


@dataclass
class Simulation:
    """State of a simulated run."""

    plan: Plan
    now_s: float = 0.0
    step: int = 0
    worker_version: int = 0
    num_started: int = 0
    num_playing: int = 0
    trained_batches: list[list[RolloutGroup]] = field(default_factory=list)
    outcome_by_index: dict[int, str] = field(default_factory=dict)
    events: list[tuple[float, int, str, int]] = field(default_factory=list)
    start_versions: dict[int, int] = field(default_factory=dict)
    learner_is_free: bool = True
    deliveries: list[int] = field(default_factory=list)
    learner_waited_s: float = 0.0
    played_s: float = 0.0
    """Total duration of all finished groups in seconds."""
    learner_free_since_s: float = 0.0

    def run(self) -> None:
        """Train all steps; fail if no event remains."""
        plan = self.plan
        self.buffer = GroupBuffer(
            groups_per_step=plan.groups_per_step,
            max_staleness=plan.max_staleness,
            window_fraction=plan.window_fraction,
            keeps_zero_variance_groups=False,
        )
        self.admission = GroupAdmission(plan.groups_per_step, plan.max_staleness)
        while len(self.trained_batches) < self.plan.num_steps:
            self.admit()
            self.train()
            if len(self.trained_batches) < self.plan.num_steps:
                assert self.events, "deadlock: no event remains"
                self.now_s, _, kind, number = heapq.heappop(self.events)
                getattr(self, kind)(number)

    def schedule(self, delay_s: float, kind: str, number: int) -> None:
        heapq.heappush(self.events, (self.now_s + delay_s, len(self.events), kind, number))

    def admit(self) -> None:
        while self.num_playing < self.plan.num_slots and self.admission.compute_capacity(
            self.worker_version
        ):
            index = self.num_started
            self.admission.admit(1)
            self.buffer.begin([index], self.worker_version)
            self.start_versions[index] = self.worker_version
            self.num_started += 1
            self.num_playing += 1
            self.schedule(self.plan.get_duration_s(index), "end_group", index)

    def train(self) -> None:
        if self.learner_is_free and (groups := self.buffer.take(self.step)):
            self.trained_batches.append(groups)
            self.learner_is_free = False
            self.learner_waited_s += self.now_s - self.learner_free_since_s
            self.schedule(self.plan.train_s, "end_step", self.step + 1)

    def end_group(self, index: int) -> None:
        self.num_playing -= 1
        self.played_s += self.plan.get_duration_s(index)
        outcome = self.plan.outcomes[index % len(self.plan.outcomes)]
        self.outcome_by_index[index] = outcome
        rewards = {"trained": (1, -1), "equal": (1, 1), "void": (1, None), "lost": (None, None)}
        group = make_group(*rewards[outcome], index=index, version=self.start_versions[index])
        refusals = self.buffer.put([group])
        assert [refusal.index for refusal in refusals] == ([] if outcome == "trained" else [index])
        self.admission.release(len(refusals))

    def end_step(self, version: int) -> None:
        self.step = version
        self.deliveries.append(version)
        if len(self.deliveries) == 1:
            self.schedule(self.plan.deliver_s, "end_delivery", version)

    def end_delivery(self, version: int) -> None:
        # Deliveries run one at a time. The learner starts its next step after a delivery ends.
        self.worker_version = version
        self.deliveries.remove(version)
        for next_version in self.deliveries[:1]:
            self.schedule(self.plan.deliver_s, "end_delivery", next_version)
        self.learner_is_free = True
        self.learner_free_since_s = self.now_s

    def count_overtakers(self, index: int) -> int:
        """Return the number of later groups that were trained on before group `index`."""
        index_sets = [{group.index for group in batch} for batch in self.trained_batches]
        batch_index = next(
            (position for position, batch in enumerate(index_sets) if index in batch),
            len(index_sets),
        )
        return sum(
            other_index > index for batch in index_sets[:batch_index] for other_index in batch
        )
