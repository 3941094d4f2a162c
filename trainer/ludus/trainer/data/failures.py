"""Reasons why episodes are void: a sentence per episode, grouped into kinds for counting.

    exception --describe_error--> reason --mask_numbers--> kind (equal if only numbers differ)

Reasons are part of episodes. The buffer counts them. The driver logs the first
reason of each kind, and reports the most common reason when a run makes no progress.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ludus.proto.errors import LudusError

MAX_REASON_CHARACTERS = 400
MAX_KINDS = 20
"""Maximum number of failure kinds to count separately; the rarest are merged into "others"."""

_OTHERS = "others"
_WORD_WITH_NUMBER = re.compile(r"\S*\d\S*")


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The number of episodes that failed for one kind of reason."""

    num_episodes: int
    example: str
    """The reason of one of these episodes."""


Failures = Mapping[str, FailureCount]
"""Failure counts by kind."""


def find_first_error(error: BaseException) -> BaseException:
    """Return the first error of a group of errors, or the error itself."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_error(error: BaseException) -> str:
    """Describe an error in one line: its type, message and, unless it is ours, its location."""
    error = find_first_error(error)
    location = ""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and not isinstance(error, LudusError):
        # LudusError messages already say how to fix the problem, so no location is added.
        location = f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})"
    message = f"{type(error).__name__}: {' '.join(_get_message(error).split())}"
    max_length = MAX_REASON_CHARACTERS - len(location)
    return (message if len(message) <= max_length else f"{message[: max_length - 3]}...") + location


def mask_numbers(reason: str) -> str:
    """Replace every word that contains a digit with `#`, so that similar reasons compare equal."""
    return _WORD_WITH_NUMBER.sub("#", reason)


def count_failures(reasons: Iterable[str]) -> dict[str, FailureCount]:
    """Count reasons by kind."""
    examples: dict[str, str] = {}
    num_by_kind: Counter[str] = Counter()
    for reason in reasons:
        kind = mask_numbers(reason)
        num_by_kind[kind] += 1
        examples.setdefault(kind, reason)
    return _merge_rarest(
        {kind: FailureCount(num_by_kind[kind], example) for kind, example in examples.items()}
    )


def add_failures(first: Failures, second: Failures) -> dict[str, FailureCount]:
    """Merge two failure counts, keeping the first example of each kind."""
    sums = dict(first)
    for kind, count in second.items():
        previous_count = sums.get(kind, FailureCount(0, count.example))
        num_episodes = previous_count.num_episodes + count.num_episodes
        sums[kind] = FailureCount(num_episodes, previous_count.example)
    return _merge_rarest(sums)


def find_most_common_reason(failures: Failures) -> str:
    """Return a reason of the most common kind; empty if there are no failures."""
    count = max(failures.values(), key=lambda count: count.num_episodes, default=None)
    return count.example if count else ""


def _merge_rarest(counts: dict[str, FailureCount]) -> dict[str, FailureCount]:
    if len(counts) <= MAX_KINDS:
        return counts
    kinds = sorted(counts.keys() - {_OTHERS}, key=lambda kind: (-counts[kind].num_episodes, kind))
    separate_counts = {kind: counts[kind] for kind in kinds[: MAX_KINDS - 1]}
    rare_counts = [count for kind, count in counts.items() if kind not in separate_counts]
    num_episodes = sum(count.num_episodes for count in rare_counts)
    return separate_counts | {_OTHERS: FailureCount(num_episodes, rare_counts[0].example)}


def _get_message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the class of a third-party error may itself be broken
        return "no message"
