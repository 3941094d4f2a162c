"""Reward functions, which are imported once and called with lists, and whose values are checked."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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
        needed = ArgumentNames.read(import_object(path, f"{section}.rewards")).required
        for name in sorted(needed - STANDARD_ARGUMENTS - frozenset(columns)):
            hint = did_you_mean(name, columns)
            raise ConfigError(
                f"{section}.rewards: function '{path}' requires '{name}', and the data has the "
                f"columns {', '.join(columns)}"
                + (f"; {hint}" if hint else "; give its argument the name of one, or a default")
            )


@dataclass(frozen=True, slots=True)
class ArgumentNames:
    """The keyword arguments of a function."""

    named: frozenset[str]
    required: frozenset[str]
    """Arguments without a default."""
    accepts_all: bool
    """True if the function has a parameter like `**columns`."""

    @classmethod
    def read(cls, function: Callable[..., Any]) -> ArgumentNames:
        """Return the argument names in the signature of a function."""
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            named=frozenset(p.name for p in named),
            required=frozenset(p.name for p in named if p.default is p.empty),
            accepts_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )


class RewardFunction:
    """An imported reward function."""

    def __init__(self, path: str, threads: ThreadPoolExecutor) -> None:
        self._path = path
        self._threads = threads
        self._function: Callable[..., Any] = import_object(path, "environment.rewards.function")
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004 - its coroutine, if it is one
        )
        self._arguments = ArgumentNames.read(self._function)
        parameters = inspect.signature(self._function).parameters.values()
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ConfigError(
                f"environment.rewards.function = '{path}' must take keyword arguments, but some "
                "are positional-only; remove the '/' from its signature"
            )

    async def values(
        self, name: str, columns: Columns, num_episodes: int, timeout_s: float
    ) -> list[float | None]:
        """Return [num_episodes] values, one for each episode."""
        arguments = self._select_columns(columns)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                returned = await self._call(arguments)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the run's custom code
            if isinstance(error, TimeoutError) and limit.expired():
                raise RewardFunctionError(
                    f"reward function '{self._path}' did not return within "
                    f"rollout.group_timeout_s = {timeout_s:g} s; make it faster or raise the limit"
                ) from None
            raise RewardFunctionError(
                f"reward function '{self._path}' (term '{name}') raised {describe(error)}"
            ) from error
        return self._check_values(returned, num_episodes)

    async def _call(self, arguments: Columns) -> Any:
        if self._is_async:
            return await self._function(**arguments)
        # A long computation must not block the other episodes.
        loop = asyncio.get_running_loop()
        returned = await loop.run_in_executor(self._threads, partial(self._function, **arguments))
        return await returned if inspect.isawaitable(returned) else returned

    def _select_columns(self, columns: Columns) -> Columns:
        names = sorted(self._arguments.required - columns.keys())
        if names:
            raise RewardFunctionError(
                f"reward function '{self._path}' requires '{names[0]}', which no episode of the "
                f"group has; its arguments must be in {sorted(columns)}"
            )
        if self._arguments.accepts_all:
            return columns
        return {key: value for key, value in columns.items() if key in self._arguments.named}

    def _check_values(self, returned: Any, num_episodes: int) -> list[float | None]:
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, (list, tuple)) or len(values) != num_episodes:
            text = f"{len(values)}" if isinstance(values, (list, tuple)) else repr(values)[:100]
            raise RewardFunctionError(
                f"reward function '{self._path}' must return a list of {num_episodes} numbers or "
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
                f"reward function '{self._path}' must return a finite number or None, but it "
                f"returned {value!r:.100} for episode {index}; return None for an episode that "
                "cannot be scored"
            )
        return float(value)
