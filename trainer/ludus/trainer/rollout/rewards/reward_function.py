"""Reward functions, which are imported once and called with lists, and whose values are checked."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import Parameter
from numbers import Real
from typing import Any

from ludus.proto.errors import ConfigError, RewardFunctionError, UserError, did_you_mean
from ludus.trainer.core.functions import import_object
from ludus.trainer.data.failures import describe

Columns = dict[str, list[Any]]
"""Arguments of a reward function by name, each with one entry for each episode."""

STANDARD_ARGUMENTS = frozenset(
    {
        "prompts",
        "completions",
        "completion_ids",
        "episode_return",
        "terminated",
        "status",
        "num_turns",
        "seed",
        "environment",
    }
)
"""Arguments that Ludus gives to every reward function that names them."""

_log = logging.getLogger(__name__)


def check_columns(functions: Sequence[str], columns: Sequence[str], section: str) -> None:
    """Check that the data has every column that a reward function requires.

    Args:
        functions: the import path of each reward function.
        section: the environment's section in the configuration.

    Raises:
        ConfigError: a function requires a column that the data does not have.
    """
    names = sorted(STANDARD_ARGUMENTS.intersection(columns))
    if names and functions:
        _log.warning(
            "%s: reward functions get the trainer's argument %s; they do not see the data's column "
            "of that name",
            *(section, ", ".join(names)),
        )
    for path in functions:
        needed = _required_names(import_object(path, f"{section}.rewards"))
        for name in sorted(needed - STANDARD_ARGUMENTS - frozenset(columns)):
            hint = did_you_mean(name, columns)
            raise ConfigError(
                f"{section}.rewards: function '{path}' requires '{name}', and the data has the "
                f"columns {', '.join(columns)}"
                + (f"; {hint}" if hint else "; give its argument the name of one, or a default")
            )


class RewardFunction:
    """An imported reward function."""

    remedy = "make it faster or raise the limit"

    def __init__(self, path: str, term_name: str, threads: ThreadPoolExecutor) -> None:
        self.description = f"reward function '{path}' (term '{term_name}')"
        self._threads = threads
        self._function: Callable[..., Any] = import_object(path, "environment.rewards.function")
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004 - its coroutine, if it is one
        )
        kinds = {p.kind for p in inspect.signature(self._function).parameters.values()}
        if Parameter.POSITIONAL_ONLY in kinds:
            raise ConfigError(
                f"environment.rewards.function = '{path}' must take keyword arguments, but some "
                "are positional-only; remove the '/' from its signature"
            )
        self._accepts_all = Parameter.VAR_KEYWORD in kinds

    async def values(self, columns: Columns, num_episodes: int) -> list[float | None]:
        """Return [num_episodes] values, one for each episode."""
        try:
            returned = await self._call(self._select_columns(columns))
        except (UserError, RewardFunctionError):
            raise
        except (Exception, SystemExit) as error:  # the run's custom code
            raise RewardFunctionError(f"{self.description} raised {describe(error)}") from error
        return self._check_values(returned, num_episodes)

    async def _call(self, arguments: Columns) -> Any:
        if self._is_async:
            return await self._function(**arguments)
        # A long computation must not block the other episodes.
        loop = asyncio.get_running_loop()
        returned = await loop.run_in_executor(self._threads, partial(self._function, **arguments))
        return await returned if inspect.isawaitable(returned) else returned

    def _select_columns(self, columns: Columns) -> Columns:
        parameters = _named_parameters(self._function)
        missing_names = sorted(_required_names(self._function) - columns.keys())
        if missing_names:
            raise RewardFunctionError(
                f"{self.description} requires '{missing_names[0]}', which no episode of the group "
                f"has; its arguments must be in {sorted(columns)}"
            )
        if self._accepts_all:
            return columns
        return {name: columns[name] for name in parameters if name in columns}

    def _check_values(self, returned: Any, num_episodes: int) -> list[float | None]:
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, (list, tuple)) or len(values) != num_episodes:
            text = f"{len(values)}" if isinstance(values, (list, tuple)) else repr(values)[:100]
            raise RewardFunctionError(
                f"{self.description} must return a list of {num_episodes} numbers or "
                f"None, one per episode, but it returned {text}"
            )
        return [self._check_number(value, index) for index, value in enumerate(values)]

    def _check_number(self, value: Any, index: int) -> float | None:
        if value is None:
            return None
        if hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardFunctionError(
                f"{self.description} must return a finite number or None, but it "
                f"returned {value!r:.100} for episode {index}; return None for an episode that "
                "cannot be scored"
            )
        return float(value)


def _named_parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters that can be passed by name."""
    parameters = inspect.signature(function).parameters
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}


def _required_names(function: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments without a default."""
    parameters = _named_parameters(function)
    return {name for name, parameter in parameters.items() if parameter.default is Parameter.empty}
