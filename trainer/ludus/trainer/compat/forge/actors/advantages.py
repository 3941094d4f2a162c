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
    """Computes A_i = (r_i - mean) / (std + 1e-4), std with n - 1; 0 if all rewards are equal.

    A custom class with a `compute` method can replace it in a run; see
    `setup_forge_training(compute_advantages=...)`.
    """

    @endpoint
    def compute(self, group: Sequence[Any]) -> list[float]:
        """Return an advantage for each episode of the group, from its `reward`.

        Raises:
            ConfigError: the group is empty, or a reward is missing or not finite.
        """
        rewards: list[Any] = [getattr(episode, "reward", None) for episode in group]
        if not rewards or not all(map(_is_finite, rewards)):
            raise ConfigError(
                f"each episode of a group must have a finite reward, got {rewards!r:.100}"
            )
        values = torch.tensor([[float(reward) for reward in rewards]], dtype=torch.float64)
        advantages: list[float] = group_advantages(values, "mean", "group")[0].tolist()
        return advantages


def _is_finite(reward: Any) -> bool:
    try:
        return math.isfinite(reward)
    except TypeError:
        return False
