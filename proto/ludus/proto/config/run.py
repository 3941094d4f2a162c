"""The run configuration: one variant for each kind of model that a run trains."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, TypeAdapter

from ludus.proto.config.language_model import LanguageModelRun
from ludus.proto.config.network import NetworkRun
from ludus.proto.config.reward_model import RewardModelRun
from ludus.proto.config.section import assume_kind
from ludus.proto.errors import ConfigError

RunConfig = Annotated[
    LanguageModelRun | NetworkRun, Field(discriminator="kind"), assume_kind("language_model")
]
"""Configuration of a run of `ludus train`. A tree without `kind` is a language-model run."""

AnyRunConfig = Annotated[
    LanguageModelRun | NetworkRun | RewardModelRun,
    Field(discriminator="kind"),
    assume_kind("language_model"),
]
"""Configuration of a run of `ludus train` or `ludus train-reward`."""

ANY_RUN: TypeAdapter[LanguageModelRun | NetworkRun | RewardModelRun] = TypeAdapter(AnyRunConfig)
"""Validator of any run configuration."""


def validate_run_json(text: str | bytes) -> RunConfig:
    """Return the run of `ludus train` that a JSON document describes.

    Raises:
        pydantic.ValidationError: the document is not a valid run.
        ConfigError: the run trains a reward model.
    """
    return require_policy(ANY_RUN.validate_json(text))


def require_policy(run: AnyRunConfig) -> RunConfig:
    """Return the run if it trains a policy.

    Raises:
        ConfigError: the run trains a reward model.
    """
    if isinstance(run, RewardModelRun):
        raise ConfigError(
            f"a run with kind = '{run.kind}' trains no policy; train its model with "
            "`ludus train-reward`"
        )
    return run


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
