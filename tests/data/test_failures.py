"""Failure reasons are short and grouped into a limited number of kinds."""

from __future__ import annotations

import pytest

from ludus.proto.errors import ExecutionError, SessionLostError
from ludus.trainer.data.failures import (
    MAX_KINDS,
    MAX_REASON_CHARACTERS,
    add_failures,
    count_failures,
    describe_error,
    find_first_error,
    find_most_common_reason,
    mask_numbers,
)


def raise_and_catch(error: Exception) -> Exception:
    """Raise and catch the error, so that it has a traceback; return it."""
    try:
        raise error
    except Exception as caught_error:  # noqa: BLE001 - returned
        return caught_error


def test_reason_is_one_line_with_a_location() -> None:
    assert describe_error(raise_and_catch(KeyError("answer"))).startswith(
        "KeyError: 'answer' (in raise_and_catch, test_failures.py:"
    )
    assert describe_error(raise_and_catch(ExecutionError("step failed:\n  no luck"))) == (
        "ExecutionError: step failed: no luck"
    )


def test_reason_has_a_maximum_length() -> None:
    assert len(describe_error(raise_and_catch(ValueError("x" * 100_000)))) == MAX_REASON_CHARACTERS


def test_error_without_a_message_has_a_reason() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("cannot be printed")

    assert describe_error(raise_and_catch(UnprintableError())).startswith(
        "UnprintableError: no message"
    )


def test_first_error_of_a_group_is_the_reason() -> None:
    lost_error = SessionLostError("the server died")
    inner_group = ExceptionGroup("inner", [lost_error])
    outer_group = ExceptionGroup("outer", [inner_group, ValueError("later")])
    assert find_first_error(outer_group) is lost_error
    assert describe_error(outer_group) == "SessionLostError: the server died"


def test_reasons_with_different_numbers_have_the_same_kind() -> None:
    kind = mask_numbers("ExecutionError: session 3f9a2b-17 failed at step 12")
    assert kind == mask_numbers("ExecutionError: session 77aa01-18 failed at step 3")
    assert kind != mask_numbers("ExecutionError: session 3f9a2b-17 was refused at step 12")


def test_first_reason_of_the_most_common_kind_is_returned() -> None:
    counts = count_failures(["away", "bad at 1", "bad at 2"])
    total_counts = add_failures(counts, count_failures(["away", "bad at 3", "bad at 4"]))
    assert {count.num_episodes for count in total_counts.values()} == {2, 4}
    assert find_most_common_reason(total_counts) == "bad at 1"
    assert find_most_common_reason({}) == ""


@pytest.mark.parametrize("is_single_call", [True, False])
def test_number_of_kinds_is_bounded_and_all_episodes_are_counted(
    is_single_call: bool,
) -> None:
    words = ["".join(chr(97 + int(digit)) for digit in str(number)) for number in range(300)]
    reasons = ["often"] * 9 + words
    if is_single_call:
        counts = count_failures(reasons)
    else:
        counts = {}
        for reason in reasons:
            counts = add_failures(counts, count_failures([reason]))
    assert len(counts) == MAX_KINDS
    assert sum(count.num_episodes for count in counts.values()) == len(reasons)
    assert counts["often"].num_episodes == 9
