"""The checker of commit subjects."""

from __future__ import annotations

import pytest
from commit_subjects import find_problem


@pytest.mark.parametrize(
    "subject", ["Add a glossary", "Fix the retry of a lost session", "Use torch.optim.Adam"]
)
def test_an_imperative_subject_is_accepted(subject: str) -> None:
    assert find_problem(subject) is None


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        ("A run stops at once", "imperative"),
        ("Fixed the retry", "imperative"),
        ("Fix the retry.", "full stop"),
        ("fix the retry", "capital"),
        ("Fix " + "the retry " * 8, "characters"),
    ],
)
def test_an_invalid_subject_is_refused_with_the_reason(subject: str, reason: str) -> None:
    assert reason in str(find_problem(subject))
