"""Arguments of reward functions, and their checks before a run. They need no torch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

from ludus.proto.errors import ConfigError, did_you_mean
from ludus.trainer.core.functions import import_callable

_log = logging.getLogger(__name__)

STANDARD_ARGUMENTS = frozenset(
    (
        "prompts",
        "completions",
        "completion_ids",
        "episode_return",
        "terminated",
        "status",
        "num_turns",
        "seed",
        "environment",
    )
)
"""Names of the arguments that every reward function can request."""


def check_columns(functions: Sequence[str], columns: Sequence[str], section: str) -> None:
    """Check that the data has every column that a reward function requires.

    Args:
        functions: import path of each reward function.
        section: section of the environment in the configuration.

    Raises:
        ConfigError: a function requires a column that the data does not have.
    """
    hidden_columns = sorted(STANDARD_ARGUMENTS.intersection(columns))
    if hidden_columns and functions:
        _log.warning(
            "%s: reward functions get the trainer's argument %s; they do not see the data's column "
            "of that name",
            *(section, ", ".join(hidden_columns)),
        )
    for path in functions:
        required_names = list_required_names(import_callable(path, f"{section}.rewards"))
        for missing_name in sorted(required_names - STANDARD_ARGUMENTS - frozenset(columns)):
            hint = did_you_mean(missing_name, columns)
            if f"{missing_name}s" in STANDARD_ARGUMENTS:
                hint = f"did you mean '{missing_name}s'?"
            raise ConfigError(
                f"{section}.rewards: function '{path}' requires '{missing_name}', and the data has "
                f"the columns {', '.join(columns)}"
                + (f"; {hint}" if hint else "; give its argument the name of one, or a default")
            )


def check_keyword_arguments(path: str, function: Callable[..., Any]) -> None:
    """Check that a reward function takes keyword arguments.

    Raises:
        ConfigError: an argument is positional-only.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is Parameter.POSITIONAL_ONLY for parameter in parameters):
        raise ConfigError(
            f"environment.rewards.function = '{path}' must take keyword arguments, but some "
            "are positional-only; remove the '/' from its signature"
        )


def list_named_parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters that can be passed by name."""
    parameters = inspect.signature(function).parameters
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}


def list_required_names(function: Callable[..., Any]) -> set[str]:
    """Return the names of the parameters without a default."""
    parameters = list_named_parameters(function)
    return {name for name, parameter in parameters.items() if parameter.default is Parameter.empty}
