"""The run configuration: one variant for each kind of model that a run trains."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, TypeAdapter

from ludus.proto.config.language_model import LanguageModelRun
from ludus.proto.config.network import NetworkRun
from ludus.proto.config.reward_model import RewardModelRun
from ludus.proto.config.section import assume_kind
from ludus.proto.config.sft import SftRun
from ludus.proto.errors import ConfigError

RunConfig = Annotated[
    LanguageModelRun | NetworkRun, Field(discriminator="kind"), assume_kind("language_model")
]
"""Configuration of a run of `ludus train`. A tree without `kind` is a language-model run."""

RecordedRun = LanguageModelRun | NetworkRun | SftRun
"""Configuration of a run that records metrics in its folder."""

AnyRunConfig = Annotated[
    LanguageModelRun | NetworkRun | RewardModelRun | SftRun,
    Field(discriminator="kind"),
    assume_kind("language_model"),
]
"""Configuration of a run of `ludus train`, `ludus train-reward` or `ludus sft`."""

ANY_RUN: TypeAdapter[LanguageModelRun | NetworkRun | RewardModelRun | SftRun] = TypeAdapter(
    AnyRunConfig
)
"""Validator of any run configuration."""

RUN_KINDS = ("language_model", "network", "reward_model", "sft")
"""Values of the field `kind`."""

_COMMANDS = {"reward_model": "train-reward", "sft": "sft"}
"""Commands that train other models than a policy, by kind of run."""


def validate_run_json(text: str | bytes) -> RunConfig:
    """Return the run of `ludus train` that a JSON document describes.

    Raises:
        pydantic.ValidationError: the document is not a valid run.
        ConfigError: the run is of another kind.
    """
    return require_policy(ANY_RUN.validate_json(text))


def validate_recorded_run_json(text: str | bytes) -> RecordedRun:
    """Return the run with a folder of metrics that a JSON document describes.

    Raises:
        pydantic.ValidationError: the document is not a valid run.
        ConfigError: the run trains a reward model.
    """
    return require_recorded_run(ANY_RUN.validate_json(text))


def require_policy(run: AnyRunConfig) -> RunConfig:
    """Return the run if it trains a policy in environments.

    Raises:
        ConfigError: the run is of another kind.
    """
    if isinstance(run, RewardModelRun | SftRun):
        raise ConfigError(
            f"a run with kind = '{run.kind}' trains no policy in an environment; train its model "
            f"with `ludus {_COMMANDS[run.kind]}`"
        )
    return run


def require_recorded_run(run: AnyRunConfig) -> RecordedRun:
    """Return the run if it records metrics in its folder.

    Raises:
        ConfigError: the run trains a reward model.
    """
    return run if isinstance(run, SftRun) else require_policy(run)


def require_language_model(run: RunConfig, caller: str) -> LanguageModelRun:
    """Return the run if it trains a language model.

    Args:
        caller: name of the command or class that needs a language model, for the message.

    Raises:
        ConfigError: the run is of another kind.
    """
    if isinstance(run, LanguageModelRun):
        return run
    raise ConfigError(
        f"{caller} supports language-model runs only, but run '{run.name}' has kind = "
        f"'{run.kind}'; train it with `ludus train`"
    )
