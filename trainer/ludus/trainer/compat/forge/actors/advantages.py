"""Advantages of a group, as Forge's tutorial computes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ludus.proto.errors import ConfigError
from ludus.trainer.algorithms.advantages import group_advantages
from ludus.trainer.compat.forge.controller.actor import ForgeActor
from ludus.trainer.compat.forge.controller.endpoint import endpoint


@dataclass
class ComputeAdvantages(ForgeActor):
    """A_i = (r_i - mean) / (std + 1e-4), std with n - 1; 0 where all rewards are equal.

    A class of one's own with a `compute` takes its place in a run, too: see
    `setup_forge_training(compute_advantages=...)`.
    """

    @endpoint
    def compute(self, group: Sequence[Any]) -> list[float]:
        """One advantage for each episode of the group, which has a `reward`.

        Raises:
            ConfigError: there is none, or one is worth no finite number.
        """
        said: list[Any] = [getattr(one, "reward", None) for one in group]
        if not said or not all(map(_is_finite, said)):
            raise ConfigError(
                f"group expected episodes with a finite reward each, got the rewards {said!r:.100}"
            )
        rewards = torch.tensor([[float(one) for one in said]], dtype=torch.float64)
        advantages: list[float] = group_advantages(rewards, "mean", "group")[0].tolist()
        return advantages


def _is_finite(reward: Any) -> bool:
    try:
        return math.isfinite(reward)
    except TypeError:
        return False
