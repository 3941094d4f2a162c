"""Changes of the configuration when a run resumes.

    old configuration --+
                        +--> refused | listed in the log | ignored
    new configuration --+

The trainer checks the changes before it writes anything. So does the command that resumes a run
on a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ludus.proto.config.reward_model import RewardModelRun
from ludus.proto.config.run import AnyRunConfig
from ludus.proto.errors import ConfigError

REFUSED_FIELDS = (
    *("kind", "model"),
    *("algorithm.kind", "algorithm.critic.kind", "ppo.num_environments"),
)
"""Fields that decide the shape of a checkpoint, which cannot be loaded after a change."""

IGNORED_FIELDS = (
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
    "output",
    "device",
    "num_threads",
)
"""Fields that change neither training nor evaluation, only where and how long a run runs."""

_MAX_LISTED_CHANGES = 20


@dataclass(frozen=True, slots=True)
class Change:
    """A field with its old and its new value."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field} was {self.old!r} and is {self.new!r}"


def find_changes(old: AnyRunConfig, new: AnyRunConfig) -> list[Change]:
    """Return the changes that a user should see.

    A reward model's run must keep all fields that affect its training.

    Raises:
        ConfigError: a field changed that a run must keep.
    """
    changes = list(_find_differences("", old.model_dump(mode="json"), new.model_dump(mode="json")))
    shown_changes = [
        change for change in changes if not _is_in_sections(change.field, IGNORED_FIELDS)
    ]
    refused_changes = shown_changes
    if not isinstance(new, RewardModelRun):
        refused_changes = [
            change for change in changes if _is_in_sections(change.field, REFUSED_FIELDS)
        ]
    if refused_changes:
        raise ConfigError(
            "a resumed run must keep its model and its algorithm, but "
            + "; ".join(map(str, refused_changes))
            + "; restore the old values, or start a run with another name"
        )
    return shown_changes


def describe_changes(changes: list[Change]) -> str:
    """Return a list of the first changes as text, and the number of the others."""
    listed_changes = "; ".join(map(str, changes[:_MAX_LISTED_CHANGES]))
    num_hidden = len(changes) - _MAX_LISTED_CHANGES
    return listed_changes if num_hidden <= 0 else f"{listed_changes}; and {num_hidden} more"


def _is_in_sections(field: str, sections: tuple[str, ...]) -> bool:
    return any(field == section or field.startswith(section + ".") for section in sections)


def _find_differences(field: str, old: Any, new: Any) -> Iterator[Change]:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        if old != new:
            yield Change(field, old, new)
        return
    for key in {**old, **new}:
        path = f"{field}.{key}" if field else key
        yield from _find_differences(path, old.get(key), new.get(key))
