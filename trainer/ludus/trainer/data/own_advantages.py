"""Advantages of a group by a function of the run's own, `algorithm.advantages`.

group -- scored episodes --> function --> one advantage each --> all tokens of the episode
      -- the others ------------------------------------- 0, and they are in no sample
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludus.proto.errors import ConfigError, UserError
from ludus.trainer.core.functions import import_object
from ludus.trainer.core.types import Rollout, RolloutGroup
from ludus.trainer.data.failures import describe

_FIELD = "algorithm.advantages"


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Calls the function named `path`; to be used where no event loop runs."""

    path: str

    def __call__(self, group: RolloutGroup) -> list[float]:
        """[G] advantages of the group's episodes; 0 where one could not be scored.

        Raises:
            ConfigError: the function fails, or does not return one finite number per episode.
        """
        scored = [rollout for rollout in group.rollouts if rollout.reward is not None]
        found = iter(self._of(scored) if scored else ())
        return [0.0 if rollout.reward is None else next(found) for rollout in group.rollouts]

    def _of(self, scored: Sequence[Rollout]) -> list[float]:
        try:
            said = import_object(self.path, _FIELD)(list(scored))
            if inspect.isawaitable(said):
                said = asyncio.run(_awaited(said))
            advantages = [float(one) for one in said]
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the boundary to the run's own function
            raise ConfigError(
                f"{_FIELD} = '{self.path}' raised {describe(error)}; expected a function of a list "
                "of episodes, each with its `reward`, that returns one number for each"
            ) from error
        if len(advantages) != len(scored) or not all(map(math.isfinite, advantages)):
            raise ConfigError(
                f"{_FIELD} = '{self.path}' expected to return {len(scored)} finite numbers, one "
                f"for each episode, got {advantages!r:.100}"
            )
        return advantages


async def _awaited(said: Any) -> Any:
    return await said
