"""In simulated runs, no sample exceeds the maximum staleness and no group waits forever.

The simulated runs (`simulation.py`) have random durations and outcomes.
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
    num_slots=st.integers(1, 20),
    durations=st.lists(st.floats(0.0, 30.0), min_size=1, max_size=40),
    outcomes=st.lists(
        st.sampled_from(["trained", "trained", "trained", "equal", "void", "lost"]), max_size=9
    )
    # Without an outcome "trained", a run would never end.
    .map(lambda outcomes: [*outcomes, "trained"]),
    train_s=st.floats(0.01, 20.0),
    deliver_s=st.floats(0.0, 20.0),
)


@settings(max_examples=300, deadline=None)
@given(PLANS)
def test_no_sample_exceeds_max_staleness_or_is_lost(plan: Plan) -> None:
    simulation = Simulation(plan)
    simulation.run()
    for step, batch in enumerate(simulation.trained_batches):
        assert len(batch) == plan.groups_per_step
        assert [group.index for group in batch] == sorted(group.index for group in batch)
        assert all(step - group.policy_version <= plan.max_staleness for group in batch)
    trained_indices = [group.index for batch in simulation.trained_batches for group in batch]
    waiting_groups = [group.index for group in simulation.buffer.groups]
    expected_indices = sorted(
        index for index, outcome in simulation.outcome_by_index.items() if outcome == "trained"
    )
    assert sorted(trained_indices + waiting_groups) == expected_indices, (
        "a group is missing or repeated"
    )


@settings(max_examples=300, deadline=None)
@given(PLANS)
def test_number_of_groups_overtaking_a_straggler_is_below_the_window(plan: Plan) -> None:
    simulation = Simulation(plan)
    simulation.run()
    # Refused groups block no other group and are never trained on, so they are left out.
    trained_indices = [
        index
        for index in range(simulation.num_started)
        if simulation.outcome_by_index.get(index, "trained") == "trained"
    ]
    assert all(simulation.count_overtakers(index) <= plan.window - 1 for index in trained_indices)


def simulate_straggler(window_fraction: float) -> Simulation:
    """Simulate a run that is limited by sampling, with one early group of 20 s; return it."""
    durations = [1.0] * 400
    durations[5] = 20.0
    simulation = Simulation(
        Plan(4, 3, window_fraction, 4, durations, ["trained"], train_s=0.5, deliver_s=0.1)
    )
    simulation.run()
    return simulation


def test_straggler_blocks_other_groups_only_in_a_strict_queue() -> None:
    assert simulate_straggler(window_fraction=1.0).count_overtakers(5) > 0
    assert simulate_straggler(window_fraction=0.01).count_overtakers(5) == 0
    assert (
        simulate_straggler(window_fraction=1.0).now_s
        < simulate_straggler(window_fraction=0.01).now_s
    )
