"""Sampling runs ahead of training exactly as far as the staleness bound allows."""

from __future__ import annotations

import pytest

from ludus.trainer.data.buffer import GroupAdmission


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_capacity_is_version_plus_staleness_plus_one_batches(max_staleness: int) -> None:
    admission = GroupAdmission(groups_per_step=8, max_staleness=max_staleness)
    for version in range(4):
        admission.admit(admission.compute_capacity(version))
        assert admission.num_admitted == (version + max_staleness + 1) * 8
        assert admission.compute_capacity(version) == 0


def test_staleness_zero_is_on_policy() -> None:
    admission = GroupAdmission(groups_per_step=8, max_staleness=0)
    admission.admit(8)
    assert admission.compute_capacity(version=0) == 0
    assert admission.compute_capacity(version=1) == 8


def test_released_groups_can_be_replaced() -> None:
    admission = GroupAdmission(groups_per_step=8, max_staleness=0, num_admitted=8)
    admission.release(3)
    assert admission.compute_capacity(version=0) == 3


def test_capacity_is_never_negative() -> None:
    assert (
        GroupAdmission(groups_per_step=2, max_staleness=0, num_admitted=9).compute_capacity(0) == 0
    )
