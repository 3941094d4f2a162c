"""A shared batch of four sequences, with 4, 2, 3 and 1 tokens, and loss inputs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ludus.trainer.algorithms.losses import LossInputs


@dataclass(frozen=True)
class RaggedBatch:
    """Four episodes of one group. `rewards` has shape [4]; all other tensors have shape [4, 4]."""

    rewards: Tensor
    mask: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor


@pytest.fixture
def ragged_batch() -> RaggedBatch:
    """Return the batch that the reference numbers belong to."""
    return RaggedBatch(
        rewards=torch.tensor([1, 0, 0, 0.5], dtype=torch.float64),
        mask=torch.arange(4) < torch.tensor([[4], [2], [3], [1]]),
        logprobs=_pad([-0.3, -1.4, -0.2, -1.5], [-0.9, -0.2], [-1, -0.3, -0.9], [-0.1]),
        old_logprobs=_pad([-0.5, -1, -0.2, -2], [-0.7, -0.3], [-1.2, -0.1, -0.9], [-0.4]),
        ref_logprobs=_pad([-0.6, -1.1, -0.3, -1.8], [-0.5, -0.4], [-1.1, -0.2, -0.7], [-0.5]),
        rollout_logprobs=_pad(
            [-0.55, -0.95, -0.25, -1.9], [-0.7, -0.35], [-1.1, -0.1, -1], [-0.45]
        ),
    )


def _pad(*rows: list[float]) -> Tensor:
    # NaN padding makes any use of the padding visible.
    return torch.tensor(
        [[*row, *[torch.nan] * (4 - len(row))] for row in rows], dtype=torch.float64
    )


def make_inputs(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropies: Tensor | None = None,
) -> LossInputs:
    """Return loss inputs.

    By default, the old policy has sampled the episodes and the mask includes all tokens.
    """
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        rollout_logprobs=old_logprobs if rollout_logprobs is None else rollout_logprobs,
        ref_logprobs=ref_logprobs,
        entropies=torch.zeros_like(logprobs) if entropies is None else entropies,
        advantages=advantages,
        mask=torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask,
    )
