"""Advantages of a group, as Forge's tutorial computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
        """One advantage for each episode of the group, which has a `reward`."""
        rewards = torch.tensor([[float(one.reward) for one in group]], dtype=torch.float64)
        advantages: list[float] = group_advantages(rewards, "mean", "group")[0].tolist()
        return advantages
