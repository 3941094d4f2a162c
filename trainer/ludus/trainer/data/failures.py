"""Why episodes are void: in one sentence each, and in few kinds that can be counted.

    exception --describe--> reason --kind_of--> kind     what differs by a number is one kind

Reasons travel with their episodes to the buffer, which counts them; the driver logs the first of
each kind, and names the commonest when a run gets nowhere.
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
"""That counts tell apart; the rarest beyond them are one kind."""

_OTHERS = "others"
_WORD_WITH_NUMBER = re.compile(r"\S*\d\S*")


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The episodes that failed for one kind of reason."""

    num_episodes: int
    example: str
    """The reason of one of them."""


Failures = Mapping[str, FailureCount]
"""By kind."""


def unwrapped(error: BaseException) -> BaseException:
    """What failed first where several errors were raised as one."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException) -> str:
    """The error in one line: its type, its message, and where foreign code raised it."""
    error = unwrapped(error)
    place = ""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and not isinstance(error, LudusError):
        # Our own errors say all that is to be done about them.
        place = f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})"
    text = f"{type(error).__name__}: {' '.join(_message(error).split())}"
    room = MAX_REASON_CHARACTERS - len(place)
    return (text if len(text) <= room else f"{text[: room - 3]}...") + place


def kind_of(reason: str) -> str:
    """What reasons have in common that differ by numbers, places or ids."""
    return _WORD_WITH_NUMBER.sub("#", reason)


def count_failures(reasons: Iterable[str]) -> dict[str, FailureCount]:
    """The reasons by kind."""
    examples: dict[str, str] = {}
    kinds: Counter[str] = Counter()
    for reason in reasons:
        kind = kind_of(reason)
        kinds[kind] += 1
        examples.setdefault(kind, reason)
    return _bounded({kind: FailureCount(num, examples[kind]) for kind, num in kinds.items()})


def add_failures(one: Failures, other: Failures) -> dict[str, FailureCount]:
    """The counts of the whole; of each kind the example that came first."""
    sums = dict(one)
    for kind, more in other.items():
        before = sums.get(kind, FailureCount(0, more.example))
        sums[kind] = FailureCount(before.num_episodes + more.num_episodes, before.example)
    return _bounded(sums)


def commonest(failures: Failures) -> str:
    """A reason of the kind that most episodes failed for; empty where none failed."""
    counts = max(failures.values(), key=lambda count: count.num_episodes, default=None)
    return counts.example if counts else ""


def _bounded(counts: dict[str, FailureCount]) -> dict[str, FailureCount]:
    if len(counts) <= MAX_KINDS:
        return counts
    ordered = sorted(counts.items(), key=lambda item: -item[1].num_episodes)
    kept = [item for item in ordered if item[0] != _OTHERS][: MAX_KINDS - 1]
    left = [count for kind, count in counts.items() if kind not in dict(kept)]
    num_left = sum(count.num_episodes for count in left)
    return dict(kept) | {_OTHERS: FailureCount(num_left, left[0].example)}


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an error of foreign code, which may be broken itself
        return "no message"
