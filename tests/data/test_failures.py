"""Reasons are short, kinds are few, and the commonest of them can be named."""

from __future__ import annotations

import pytest

from ludus.proto.errors import ExecutionError, SessionLostError
from ludus.trainer.data.failures import (
    MAX_KINDS,
    MAX_REASON_CHARACTERS,
    add_failures,
    commonest,
    count_failures,
    describe,
    kind_of,
    unwrapped,
)


def caught(error: Exception) -> Exception:
    """The error, raised here."""
    try:
        raise error
    except Exception as raised:  # noqa: BLE001 - handed back
        return raised


def test_a_reason_is_one_line_that_says_where_foreign_code_raised() -> None:
    assert describe(caught(KeyError("answer"))).startswith(
        "KeyError: 'answer' (in caught, test_failures.py:"
    )
    assert describe(caught(ExecutionError("step failed:\n  no luck"))) == (
        "ExecutionError: step failed: no luck"
    )


def test_a_reason_is_bounded_whatever_the_message() -> None:
    assert len(describe(caught(ValueError("x" * 100_000)))) == MAX_REASON_CHARACTERS


def test_an_error_that_cannot_be_printed_is_a_reason_all_the_same() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert describe(caught(Broken())).startswith("Broken: no message")


def test_of_a_group_of_errors_the_first_is_the_reason() -> None:
    lost = SessionLostError("the server died")
    group = ExceptionGroup("two", [ExceptionGroup("one", [lost]), ValueError("later")])
    assert unwrapped(group) is lost
    assert describe(group) == "SessionLostError: the server died"


def test_reasons_that_differ_by_numbers_and_ids_are_one_kind() -> None:
    one = kind_of("ExecutionError: session 3f9a2b-17 failed at step 12")
    assert one == kind_of("ExecutionError: session 77aa01-18 failed at step 3")
    assert one != kind_of("ExecutionError: session 3f9a2b-17 was refused at step 12")


def test_the_commonest_kind_is_named_by_its_first_example() -> None:
    counted = count_failures(["away", "bad at 1", "bad at 2"])
    both = add_failures(counted, count_failures(["away", "bad at 3", "bad at 4"]))
    assert {count.num_episodes for count in both.values()} == {2, 4}
    assert commonest(both) == "bad at 1"
    assert commonest({}) == ""


@pytest.mark.parametrize("at_once", [True, False])
def test_however_many_reasons_there_are_their_kinds_are_few_and_no_episode_uncounted(
    at_once: bool,
) -> None:
    words = ["".join(chr(97 + int(digit)) for digit in str(number)) for number in range(300)]
    reasons = ["often"] * 9 + words
    if at_once:
        counts = count_failures(reasons)
    else:
        counts = {}
        for reason in reasons:
            counts = add_failures(counts, count_failures([reason]))
    assert len(counts) == MAX_KINDS
    assert sum(count.num_episodes for count in counts.values()) == len(reasons)
    assert counts["often"].num_episodes == 9
