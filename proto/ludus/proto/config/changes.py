"""Changes of the configuration when a run resumes.

    old configuration --+
                        +--> refused | listed in the log | ignored
    new configuration --+

The trainer checks the changes before it writes anything. So does the command that resumes a run
on a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ludus.proto.config.algorithm import ModelCritic, PpoConfig
from ludus.proto.config.language_model import LanguageModelRun
from ludus.proto.config.network import NetworkRun
from ludus.proto.config.reward_model import RewardModelRun
from ludus.proto.config.run import AnyRunConfig
from ludus.proto.config.sft import SftRun
from ludus.proto.errors import ConfigError

REFUSED_FIELDS = (
    *("kind", "model"),
    *("algorithm.kind", "algorithm.critic.kind", "ppo.num_environments", "ppo.scale_rewards"),
    "rollout.constrain",
)
"""Fields that decide the content of a checkpoint, which cannot be used after a change."""

IGNORED_FIELDS = (
    "name",
    "output_dir",
    "log_level",
    "metrics",
    "placement",
    "training.num_steps",
    "training.num_epochs",
    "training.checkpoint_every_steps",
    "training.checkpoint_every_s",
    "training.stop_grace_s",
    "training.keep_checkpoints",
    "training.max_learner_restarts",
    "training.learner_timeout_s",
    "rollout.num_workers",
    "rollout.min_workers",
    "rollout.num_threads",
    "learner.num_threads",
    "output",
    "device",
    "num_threads",
)
"""Fields that change neither a training step nor an evaluation, only where and how long a run
runs."""

_LENGTH_FIELDS = ("training.num_steps", "training.num_epochs")
"""Fields that are shown only if the run has a schedule over its whole length."""
_MAX_LISTED_CHANGES = 20


@dataclass(frozen=True, slots=True)
class Change:
    """A field with its old and its new value."""

    field: str
    old: Any
    new: Any
    effect: str = ""
    """Effect on other fields, as a clause; empty if there is none."""

    def __str__(self) -> str:
        return f"{self.field} was {self.old!r} and is {self.new!r}{self.effect}"


def find_changes(old: AnyRunConfig, new: AnyRunConfig) -> list[Change]:
    """Return the changes that a user should see.

    A reward model's run must keep all fields that affect its training.

    Raises:
        ConfigError: a field changed that a run must keep.
    """
    changes = list(_find_differences("", old.model_dump(mode="json"), new.model_dump(mode="json")))
    schedules = _list_schedules(new)
    length_effect = f", so {' and '.join(schedules)} follow the new length"
    shown_changes = [
        change for change in changes if not _is_in_sections(change.field, IGNORED_FIELDS)
    ]
    if schedules:
        shown_changes += [
            replace(change, effect=length_effect)
            for change in changes
            if change.field in _LENGTH_FIELDS
        ]
    refused_changes = shown_changes
    if not isinstance(new, RewardModelRun):
        refused_changes = [
            change
            for change in changes
            if _is_in_sections(change.field, REFUSED_FIELDS) or _splits_optimizer(change, new)
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


def _list_schedules(run: AnyRunConfig) -> list[str]:
    """Return the settings that make a value change over the whole length of the run."""
    match run:
        case LanguageModelRun(learner=learner, algorithm=algorithm):
            final_fields = ("entropy_coef_final", "kl_coef_final")
            settings = {f"algorithm.{name}": getattr(algorithm, name) for name in final_fields}
            if learner.schedule != "constant":
                settings["learner.schedule"] = learner.schedule
            return [f"{name} = {value!r}" for name, value in settings.items() if value is not None]
        case SftRun(learner=learner) if learner.schedule != "constant":
            return [f"learner.schedule = {learner.schedule!r}"]
        case NetworkRun(ppo=ppo) if ppo.schedule != "constant":
            return [f"ppo.schedule = {ppo.schedule!r}"]
    return []


def _splits_optimizer(change: Change, run: AnyRunConfig) -> bool:
    """Return whether the optimizer gets or loses the critic's group of parameters."""
    rate_field = "ppo.critic_learning_rate"
    if isinstance(run, LanguageModelRun):
        if isinstance(run.algorithm, PpoConfig) and isinstance(run.algorithm.critic, ModelCritic):
            return False  # a separate model always has its own group
        rate_field = "algorithm.critic.learning_rate"
    return change.field == rate_field and None in (change.old, change.new)


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
