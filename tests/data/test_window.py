"""Whatever the durations: no sample is too old, nothing is lost, nobody waits for ever.

Runs are simulated (simulation.py) with durations and ends of all kinds.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.simulation import Plan, Simulation

pytestmark = pytest.mark.slow

PLANS = st.builds(
    Plan,
    groups_per_step=st.integers(1, 6),
    max_staleness=st.integers(0, 3),
    window_fraction=st.floats(0.05, 1.0),
    num_places=st.integers(1, 20),
    durations=st.lists(st.floats(0.0, 30.0), min_size=1, max_size=40),
    fates=st.lists(
        st.sampled_from(["lives", "lives", "lives", "equal", "void", "lost"]), max_size=9
    )
    # A run in which nothing ever lives has no end, and no use.
    .map(lambda fates: [*fates, "lives"]),
    train_s=st.floats(0.01, 20.0),
    deliver_s=st.floats(0.0, 20.0),
)


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
