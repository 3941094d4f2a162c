"""Whatever the durations: no sample is too old, nothing is lost, nobody waits for ever.

A run is simulated event by event in virtual time, with the real buffer and the real admission:
groups take as long as drawn and end as drawn, steps train and deliveries travel as long as drawn.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.trainer.data.admission import Admission
from ludus.trainer.data.buffer import GroupBuffer
from ludus.trainer.types import RolloutGroup
from tests.data.rollouts import make_group

NUM_STEPS = 6


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

    @property
    def window(self) -> int:
        """W."""
        most = (self.max_staleness + 1) * self.groups_per_step
        return max(1, math.floor(self.window_fraction * most))


PLANS = st.builds(
    Plan,
    groups_per_step=st.integers(1, 6),
    max_staleness=st.integers(0, 3),
    window_fraction=st.floats(0.05, 1.0),
    num_places=st.integers(1, 20),
    durations=st.lists(st.floats(0.0, 30.0), min_size=1, max_size=40),
    fates=st.lists(st.sampled_from(["lives", "lives", "lives", "dead", "void", "gone"]), max_size=9)
    # A run in which nothing ever lives has no end, and no use.
    .map(lambda fates: [*fates, "lives"]),
    train_s=st.floats(0.01, 20.0),
    deliver_s=st.floats(0.0, 20.0),
)


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

    def run(self) -> None:
        """Nothing; all steps are trained. Fails when nothing is left that could happen."""
        plan = self.plan
        self.buffer = GroupBuffer(
            groups_per_step=plan.groups_per_step,
            max_staleness=plan.max_staleness,
            window_fraction=plan.window_fraction,
            keep_dead_groups=False,
        )
        self.admission = Admission(plan.groups_per_step, plan.max_staleness)
        while len(self.trained) < NUM_STEPS:
            self.admit()
            self.train()
            if len(self.trained) < NUM_STEPS:
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
            durations = self.plan.durations
            self.later(durations[index % len(durations)], "end_group", index)

    def train(self) -> None:
        if self.learner_is_free and (groups := self.buffer.take(self.step)):
            self.trained.append(groups)
            self.learner_is_free = False
            self.later(self.plan.train_s, "end_step", self.step + 1)

    def end_group(self, index: int) -> None:
        self.num_playing -= 1
        fate = self.plan.fates[index % len(self.plan.fates)]
        self.ended[index] = fate
        rewards = {"lives": (1, -1), "dead": (1, 1), "void": (1, None)}
        if fate in rewards:
            group = make_group(*rewards[fate], index=index, version=self.begun_under[index])
            assert self.buffer.put([group]) == int(fate != "lives")
        settled = self.buffer.settle([index])
        assert settled == ([] if fate == "lives" else [index])
        self.admission.give_back(len(settled))

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

    def overtakers(self, index: int) -> int:
        """Groups that began after `index` and were trained on in a batch before it."""
        order = [{group.index for group in batch} for batch in self.trained]
        own = next((n for n, batch in enumerate(order) if index in batch), len(order))
        return sum(other > index for batch in order[:own] for other in batch)


@settings(max_examples=300, deadline=None)
@given(PLANS)
def test_no_sample_is_older_than_the_bound_and_none_is_lost(plan: Plan) -> None:
    run = Simulation(plan)
    run.run()
    for step, batch in enumerate(run.trained):
        assert len(batch) == plan.groups_per_step
        assert [group.index for group in batch] == sorted(group.index for group in batch)
        assert all(step - group.policy_version <= plan.max_staleness for group in batch)
    trained = [group.index for batch in run.trained for group in batch]
    waiting = [group.index for group in run.buffer.groups]
    alive = sorted(index for index, fate in run.ended.items() if fate == "lives")
    assert sorted(trained + waiting) == alive, "each is there once"


@settings(max_examples=300, deadline=None)
@given(PLANS)
def test_fewer_groups_than_the_window_overtake_a_straggler(plan: Plan) -> None:
    run = Simulation(plan)
    run.run()
    # What was refused holds up nobody any more, and cannot be overtaken.
    live = [index for index in range(run.num_begun) if run.ended.get(index, "lives") == "lives"]
    assert all(run.overtakers(index) <= plan.window - 1 for index in live)


def straggler(window_fraction: float) -> Simulation:
    """A run in which one early group takes as long as ten steps; workers are the slower side."""
    durations = [1.0] * 400
    durations[5] = 20.0
    run = Simulation(
        Plan(4, 3, window_fraction, 4, durations, ["lives"], train_s=0.5, deliver_s=0.1)
    )
    run.run()
    return run


def test_a_straggler_is_overtaken_within_the_window_and_holds_up_a_strict_queue() -> None:
    assert straggler(window_fraction=1.0).overtakers(5) > 0
    assert straggler(window_fraction=0.01).overtakers(5) == 0
    assert straggler(window_fraction=1.0).now_s < straggler(window_fraction=0.01).now_s
