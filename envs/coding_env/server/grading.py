"""Whether a program returned what it should have, and what is said of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ..problems import FUNCTION, Test
from .programs import Ended, Outcome

_MAX_CHARS_SAID = 1000
"""Of each of stdout, stderr and a value."""
_TOLERANCE = 1e-9


def passed_tests(ended: Ended, tests: Sequence[Test]) -> list[bool]:
    """By test, whether the call returned what was expected; False where it was not reached."""
    outcomes = [*ended.outcomes, *[Outcome()] * len(tests)]
    return [
        outcome.has_returned and _is_same(outcome.value, test.expected)
        for outcome, test in zip(outcomes, tests, strict=False)
    ]


def feedback_on(ended: Ended, tests: Sequence[Test], passed: Sequence[bool], num_shown: int) -> str:
    """How many tests passed, how the shown ones went, and what the program wrote."""
    said = [f"{sum(passed)} of {len(tests)} tests passed."]
    if ended.timed_out:
        said.append("The program took too long and was ended.")
    elif ended.exit_code:
        said.append(f"The program ended with exit code {ended.exit_code}.")
    for number in range(num_shown):
        if not passed[number]:
            said.append(_told(tests[number], ended.outcomes[number : number + 1]))
    for name, text in (("stdout", ended.stdout), ("stderr", ended.stderr)):
        if text.strip():
            said.append(f"{name}:\n{_cut(text.rstrip())}")
    return "\n".join(said)


def shown_call(test: Test) -> str:
    """For example "solve([1, 2])"."""
    return f"{FUNCTION}({', '.join(map(repr, test.arguments))})"


def _told(test: Test, outcome: Sequence[Outcome]) -> str:
    if not outcome:
        return f"{shown_call(test)} was not reached; expected {test.expected!r}."
    (one,) = outcome
    got = _cut(repr(one.value)) if one.has_returned else _cut(one.error)
    return f"{shown_call(test)} expected {test.expected!r}, got {got}."


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS_SAID else f"{text[:_MAX_CHARS_SAID]} [cut]"


def _is_same(got: Any, expected: Any) -> bool:
    """Equal as JSON, but for the last digits of fractions; True is not 1."""
    if isinstance(expected, float) and isinstance(got, float):
        return math.isclose(got, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    try:
        return json.dumps(got, sort_keys=True) == json.dumps(expected, sort_keys=True)
    except RecursionError:  # lists in lists, as deep as could just be read
        return False
