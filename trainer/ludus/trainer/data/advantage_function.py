"""Advantages from a function of the user, `algorithm.advantages`.

group -- scored episodes ---> function --> one advantage each --> all tokens of the episode
      -- unscored episodes ------------------------------------> 0, and no sample
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass

from ludus.proto.errors import ConfigError, UserError
from ludus.trainer.core.functions import import_object
from ludus.trainer.core.types import Rollout, RolloutGroup
from ludus.trainer.data.failures import describe

_FIELD = "algorithm.advantages"


@dataclass(frozen=True, slots=True)
class AdvantageFunction:
    """The function named `path`; call it only in a thread without a running event loop."""

    path: str

    def __call__(self, group: RolloutGroup) -> list[float]:
        """Return [G] the advantages of the group's episodes; 0 for unscored episodes.

        Raises:
            ConfigError: the function fails, or does not return one finite number per episode.
        """
        scored_rollouts = [rollout for rollout in group.rollouts if rollout.reward is not None]
        advantages = iter(self._call_function(scored_rollouts) if scored_rollouts else ())
        return [0.0 if rollout.reward is None else next(advantages) for rollout in group.rollouts]

    def _call_function(self, scored: Sequence[Rollout]) -> list[float]:
        try:
            result = import_object(self.path, _FIELD)(list(scored))
            if inspect.isawaitable(result):
                result = asyncio.run(_await(result))
            advantages = [float(value) for value in result]
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # code of the user
            raise ConfigError(
                f"{_FIELD} = '{self.path}' raised {describe(error)}; it must be a function of a "
                "list of episodes, each with its `reward`, that returns one number for each"
            ) from error
        if len(advantages) != len(scored) or not all(map(math.isfinite, advantages)):
            raise ConfigError(
                f"{_FIELD} = '{self.path}' must return {len(scored)} finite numbers, one "
                f"for each episode, got {advantages!r:.100}"
            )
        return advantages


async def _await(result: Awaitable[Iterable[float]]) -> Iterable[float]:
    return await result
