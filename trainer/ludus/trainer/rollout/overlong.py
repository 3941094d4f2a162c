"""Treatment of episodes that a limit on tokens or turns cut off: `rollout.overlong`.

train      trained on as they are
mask       not trained on, but their rewards count in the baselines of their groups
penalise   the reward falls over the last fifth of the allowed length (arXiv 2503.14476, eq. 13)
"""

from __future__ import annotations

from dataclasses import replace

from ludus.proto.config import RolloutConfig
from ludus.trainer.core.types import Rollout

PENALTY_TERM = "length_penalty"
"""Name of the penalty among the terms of a reward."""
PENALIZED_SHARE = 0.2
"""Share of the maximum length over which the penalty falls from 0 to -1."""


def judge_length(
    rollout: Rollout, limits: RolloutConfig, *, num_tokens: int, is_overlong: bool
) -> Rollout:
    """Return the rollout with its mask or penalty for its length.

    Args:
        num_tokens: number of tokens of the longest completion.
        is_overlong: whether a limit cut a completion or ended the episode.
    """
    match limits.overlong:
        case "mask":
            return replace(rollout, is_masked=is_overlong)
        case "penalise":
            penalty = compute_length_penalty(num_tokens, limits.max_completion_tokens)
            return replace(rollout, length_penalty=-1.0 if is_overlong else penalty)
        case "train":
            return rollout


def compute_length_penalty(num_tokens: int, max_tokens: int) -> float:
    """Return the penalty of a completion, from 0 to -1."""
    num_penalized = PENALIZED_SHARE * max_tokens
    return min(0.0, max(-1.0, (max_tokens - num_penalized - num_tokens) / num_penalized))
