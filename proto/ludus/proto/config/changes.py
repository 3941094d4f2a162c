"""What a run may change when it continues: some of it silently, most of it aloud, some not at all.

begun with      the configuration then --+
                                         +--> refused | listed | of no account
continues with  the configuration now ---+

Trainers ask before they write anything, and so does whoever resumes a run on a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ludus.proto.config.run import RunConfig
from ludus.proto.errors import ConfigError

REFUSED = ("model", "algorithm.kind", "algorithm.critic.kind", "ppo.num_environments")
"""What the checkpoint was made with: nothing else can be loaded from it."""

OF_NO_ACCOUNT = (
    "name",
    "output_dir",
    "log_level",
    "metrics",
    "placement",
    "training.num_steps",
    "training.num_epochs",
    "training.checkpoint_every_steps",
    "training.keep_checkpoints",
    "training.max_learner_restarts",
    "rollout.num_workers",
    "rollout.min_workers",
)
"""What decides where a run goes on and how far, and nothing that is learned or measured."""

_MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class Change:
    """One field that differs from what the run was begun with."""

    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.field} was {self.before!r} and is {self.after!r}"


def changes_between(begun: RunConfig, now: RunConfig) -> list[Change]:
    """What differs, and is worth a word.

    Raises:
        ConfigError: it is what a run cannot change.
    """
    changes = list(_differences("", begun.model_dump(mode="json"), now.model_dump(mode="json")))
    refused = [change for change in changes if _is_in(change.field, REFUSED)]
    if refused:
        raise ConfigError(
            "a run that continues keeps its model and its algorithm: "
            + "; ".join(map(str, refused))
            + "; set it back, or begin another run under another name"
        )
    return [change for change in changes if not _is_in(change.field, OF_NO_ACCOUNT)]


def in_words(changes: list[Change]) -> str:
    """The changes, one after the other, and how many there are if there are many."""
    listed = "; ".join(map(str, changes[:_MOST_LISTED]))
    more = len(changes) - _MOST_LISTED
    return listed if more <= 0 else f"{listed}; and {more} more"


def _is_in(field: str, sections: tuple[str, ...]) -> bool:
    return any(field == one or field.startswith(one + ".") for one in sections)


def _differences(field: str, before: Any, after: Any) -> Iterator[Change]:
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        if before != after:
            yield Change(field, before, after)
        return
    for key in {**before, **after}:
        path = f"{field}.{key}" if field else key
        yield from _differences(path, before.get(key), after.get(key))
