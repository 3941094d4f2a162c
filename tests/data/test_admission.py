"""Sampling runs ahead of training as far as the bound allows, and no further."""

from __future__ import annotations

import pytest

from ludus.trainer.data.admission import Admission


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_at_version_v_at_most_v_plus_s_plus_one_batches_have_begun(max_staleness: int) -> None:
    admission = Admission(groups_per_step=8, max_staleness=max_staleness)
    for version in range(4):
        admission.admit(admission.capacity(version))
        assert admission.num_admitted == (version + max_staleness + 1) * 8
        assert admission.capacity(version) == 0


def test_without_staleness_a_step_samples_from_its_own_weights_only() -> None:
    admission = Admission(groups_per_step=8, max_staleness=0)
    admission.admit(8)
    assert admission.capacity(version=0) == 0
    assert admission.capacity(version=1) == 8


def test_a_group_that_will_not_be_trained_on_is_replaced() -> None:
    admission = Admission(groups_per_step=8, max_staleness=0, num_admitted=8)
    admission.give_back(3)
    assert admission.capacity(version=0) == 3


def test_capacity_is_never_negative() -> None:
    assert Admission(groups_per_step=2, max_staleness=0, num_admitted=9).capacity(0) == 0
