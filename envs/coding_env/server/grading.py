"""Test results of a program, and the feedback that a player reads."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from ..problems import FUNCTION_NAME, TestCall
from .programs import CallOutcome, ProgramResult

_MAX_QUOTED_CHARS = 1000
"""Maximum number of characters of stdout, of stderr and of a value in the feedback."""
_TOLERANCE = 1e-9


def grade(result: ProgramResult, tests: Sequence[TestCall]) -> list[bool]:
    """Return whether each test passed. A call that was not reached did not pass."""
    return [
        outcome is not None
        and outcome.has_returned
        and _is_equal(outcome.value, test.expected_value)
        for outcome, test in zip_longest(result.outcomes[: len(tests)], tests)
    ]


def write_feedback(
    result: ProgramResult, tests: Sequence[TestCall], passed_tests: Sequence[bool], num_shown: int
) -> str:
    """Return the number of passed tests, the failures of shown tests, and the output."""
    lines = [f"{sum(passed_tests)} of {len(tests)} tests passed."]
    if result.timed_out:
        lines.append("The program took too long and was stopped.")
    elif result.exit_code:
        lines.append(f"The program exited with code {result.exit_code}.")
    for index in range(num_shown):
        if not passed_tests[index]:
            outcome = result.outcomes[index] if index < len(result.outcomes) else None
            lines.append(_describe_failure(tests[index], outcome))
    for stream_name, stream_text in (("stdout", result.stdout), ("stderr", result.stderr)):
        if stream_text.strip():
            lines.append(f"{stream_name}:\n{_shorten(stream_text.rstrip())}")
    return "\n".join(lines)


def write_call(test: TestCall) -> str:
    """Return the call as Python code, for example "solve([1, 2])"."""
    return f"{FUNCTION_NAME}({', '.join(map(repr, test.arguments))})"


def _describe_failure(test: TestCall, outcome: CallOutcome | None) -> str:
    if outcome is None:
        return f"{write_call(test)} was not reached; expected {test.expected_value!r}."
    answer = _write_value(outcome.value) if outcome.has_returned else outcome.error
    return f"{write_call(test)} expected {test.expected_value!r}, got {_shorten(answer)}."


def _write_value(value: Any) -> str:
    try:
        return repr(value)
    except RecursionError:
        return "a value that is nested too deeply"


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]} [cut]"


def _is_equal(value: Any, expected_value: Any) -> bool:
    """Return whether two values are equal as JSON, so that True is not 1.

    Floats may differ by rounding.
    """
    if isinstance(expected_value, float) and isinstance(value, float):
        return math.isclose(value, expected_value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    try:
        return json.dumps(value, sort_keys=True) == json.dumps(expected_value, sort_keys=True)
    except RecursionError:  # nested almost too deeply for the parser
        return False
