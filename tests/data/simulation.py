"""A run, event by event in virtual time, with the real buffer and the real admission.

Groups take as long as planned and end as planned, steps train and deliveries travel as long as
planned: the tests of the window and the benchmark of the two loops play the same game.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from ludus.trainer.core.types import RolloutGroup
from ludus.trainer.data.admission import Admission
from ludus.trainer.data.buffer import GroupBuffer
from tests.data.rollouts import make_group


@dataclass(frozen=True)
class Plan:
    """One simulated run."""

    groups_per_step: int
    max_staleness: int
    window_fraction: float
    num_places: int
    durations: list[float]
    """Of group n, over and over."""
    fates: list[str]
    train_s: float
    deliver_s: float
    num_steps: int = 6

    @property
    def window(self) -> int:
        """W."""
        most = (self.max_staleness + 1) * self.groups_per_step
        return max(1, math.floor(self.window_fraction * most))

    def duration_s(self, index: int) -> float:
        """How long group `index` is played."""
        return self.durations[index % len(self.durations)]


@dataclass
class Simulation:
    """Plays a plan to its last step."""

    plan: Plan
    now_s: float = 0.0
    step: int = 0
    held: int = 0
    num_begun: int = 0
    num_playing: int = 0
    trained: list[list[RolloutGroup]] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)
    events: list[tuple[float, int, str, int]] = field(default_factory=list)
    begun_under: dict[int, int] = field(default_factory=dict)
    learner_is_free: bool = True
    deliveries: list[int] = field(default_factory=list)
    learner_waited_s: float = 0.0
    played_s: float = 0.0
    """Of all groups together, which have ended."""
    _free_since_s: float = 0.0

    def run(self) -> None:
        """Train all steps; fail when nothing is left that could happen."""
        plan = self.plan
        self.buffer = GroupBuffer(
            groups_per_step=plan.groups_per_step,
            max_staleness=plan.max_staleness,
            window_fraction=plan.window_fraction,
            keep_zero_variance_groups=False,
        )
        self.admission = Admission(plan.groups_per_step, plan.max_staleness)
        while len(self.trained) < self.plan.num_steps:
            self.admit()
            self.train()
            if len(self.trained) < self.plan.num_steps:
                assert self.events, "deadlock"
                self.now_s, _, kind, number = heapq.heappop(self.events)
                getattr(self, kind)(number)

    def later(self, delay_s: float, kind: str, number: int) -> None:
        heapq.heappush(self.events, (self.now_s + delay_s, len(self.events), kind, number))

    def admit(self) -> None:
        while self.num_playing < self.plan.num_places and self.admission.capacity(self.held):
            index = self.num_begun
            self.admission.admit(1)
            self.buffer.begin([index], self.held)
            self.begun_under[index] = self.held
            self.num_begun += 1
            self.num_playing += 1
            self.later(self.plan.duration_s(index), "end_group", index)

    def train(self) -> None:
        if self.learner_is_free and (groups := self.buffer.take(self.step)):
            self.trained.append(groups)
            self.learner_is_free = False
            self.learner_waited_s += self.now_s - self._free_since_s
            self.later(self.plan.train_s, "end_step", self.step + 1)

    def end_group(self, index: int) -> None:
        self.num_playing -= 1
        self.played_s += self.plan.duration_s(index)
        fate = self.plan.fates[index % len(self.plan.fates)]
        self.ended[index] = fate
        rewards = {"lives": (1, -1), "equal": (1, 1), "void": (1, None), "lost": (None, None)}
        group = make_group(*rewards[fate], index=index, version=self.begun_under[index])
        refused = self.buffer.put([group])
        assert [one.index for one in refused] == ([] if fate == "lives" else [index])
        self.admission.give_back(len(refused))

    def end_step(self, version: int) -> None:
        self.step = version
        self.deliveries.append(version)
        if len(self.deliveries) == 1:
            self.later(self.plan.deliver_s, "end_delivery", version)

    def end_delivery(self, version: int) -> None:
        # At most one is under way, and the learner waits for it before the next.
        self.held = version
        self.deliveries.remove(version)
        for waiting in self.deliveries[:1]:
            self.later(self.plan.deliver_s, "end_delivery", waiting)
        self.learner_is_free = True
        self._free_since_s = self.now_s

    def overtakers(self, index: int) -> int:
        """Groups that began after `index` and were trained on in a batch before it."""
        order = [{group.index for group in batch} for batch in self.trained]
        own = next((n for n, batch in enumerate(order) if index in batch), len(order))
        return sum(other > index for batch in order[:own] for other in batch)
