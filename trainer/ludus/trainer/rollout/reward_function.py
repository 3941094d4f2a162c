"""Reward functions: imported once, called with lists, their answers checked."""

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
"""The arguments of a reward function by name, each with one entry per episode."""

OWN_ARGUMENTS = frozenset(
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
"""What every reward function may ask for; a field of an environment never hides one of them."""

_log = logging.getLogger(__name__)


def check_columns(functions: Sequence[str], columns: Sequence[str], section: str) -> None:
    """Check that data whose columns are known has those that reward functions ask for.

    Args:
        functions: module:callable each.
        section: that of the environment in the configuration.

    Raises:
        ConfigError: a function asks for another one; the message names those there are.
    """
    hidden = sorted(OWN_ARGUMENTS.intersection(columns))
    if hidden and functions:
        _log.warning(
            "%s: reward functions get an argument of the trainer's own under %s; they do not see "
            "the data's column of that name",
            *(section, ", ".join(hidden)),
        )
    for path in functions:
        needed = Arguments.of(import_object(path, f"{section}.rewards")).required
        for name in sorted(needed - OWN_ARGUMENTS - frozenset(columns)):
            hint = did_you_mean(name, columns)
            raise ConfigError(
                f"{section}.rewards: function '{path}' asks for '{name}', and the data has the "
                f"columns {', '.join(columns)}"
                + (f"; {hint}" if hint else "; give its argument the name of one, or a default")
            )


@dataclass(frozen=True, slots=True)
class Arguments:
    """Which keyword arguments a function takes."""

    named: frozenset[str]
    required: frozenset[str]
    """Those of them without a default."""
    takes_all: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Arguments:
        """What the function's signature says."""
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            named=frozenset(p.name for p in named),
            required=frozenset(p.name for p in named if p.default is p.empty),
            takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )


class RewardFunction:
    """One imported function, and which arguments it takes."""

    def __init__(self, path: str, threads: ThreadPoolExecutor) -> None:
        self._path = path
        self._threads = threads
        self._function: Callable[..., Any] = import_object(path, "environment.rewards.function")
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004 - its coroutine, if it is one
        )
        self._takes = Arguments.of(self._function)
        parameters = inspect.signature(self._function).parameters.values()
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ConfigError(
                f"environment.rewards.function = '{path}' expected keyword arguments, got "
                "positional-only ones; remove the '/' from its signature"
            )

    async def values(
        self, name: str, columns: Columns, num_episodes: int, timeout_s: float
    ) -> list[float | None]:
        """[num_episodes] what the function says of each episode."""
        arguments = self._arguments(columns)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                returned = await self._call(arguments)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the boundary to the run's own code
            if isinstance(error, TimeoutError) and limit.expired():
                raise RewardFunctionError(
                    f"reward function '{self._path}' expected to end within "
                    f"rollout.group_timeout_s = {timeout_s:g} s, still running; make it faster or "
                    "raise the limit"
                ) from None
            raise RewardFunctionError(
                f"reward function '{self._path}' (term '{name}') raised {describe(error)}"
            ) from error
        return self._checked(returned, num_episodes)

    async def _call(self, arguments: Columns) -> Any:
        if self._is_async:
            return await self._function(**arguments)
        # A long computation must not keep the other episodes waiting.
        loop = asyncio.get_running_loop()
        returned = await loop.run_in_executor(self._threads, partial(self._function, **arguments))
        return await returned if inspect.isawaitable(returned) else returned

    def _arguments(self, columns: Columns) -> Columns:
        missing = sorted(self._takes.required - columns.keys())
        if missing:
            raise RewardFunctionError(
                f"reward function '{self._path}' asks for '{missing[0]}', which no episode of the "
                f"group has; expected arguments out of {sorted(columns)}"
            )
        if self._takes.takes_all:
            return columns
        return {key: value for key, value in columns.items() if key in self._takes.named}

    def _checked(self, returned: Any, num_episodes: int) -> list[float | None]:
        listed = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(listed, (list, tuple)) or len(listed) != num_episodes:
            got = f"{len(listed)}" if isinstance(listed, (list, tuple)) else repr(listed)[:100]
            raise RewardFunctionError(
                f"reward function '{self._path}' expected to return a list of {num_episodes} "
                f"numbers or None, one per episode, got {got}"
            )
        return [self._number(value, index) for index, value in enumerate(listed)]

    def _number(self, value: Any, index: int) -> float | None:
        if value is None:
            return None
        if hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardFunctionError(
                f"reward function '{self._path}' expected a finite number or None for episode "
                f"{index}, got {value!r:.100}; return None for an episode that cannot be scored"
            )
        return float(value)
