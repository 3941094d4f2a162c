"""Factories for small rollouts and groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ludus.trainer.core.types import (
    Rollout,
    RolloutGroup,
    RolloutStatus,
    ScoredTerm,
    TokenSequence,
    TurnSpan,
)


def make_rollout(
    reward: float | None, *, token_ids: Sequence[int] = (5, 6, 7, 8), version: int = 0
) -> Rollout:
    """Return a one-turn rollout with two sampled tokens. If `reward` is None, it is lost."""
    status = RolloutStatus.LOST if reward is None else RolloutStatus.TERMINATED
    num_prompt_tokens = len(token_ids) - 2
    sequence = TokenSequence(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array([0.0] * num_prompt_tokens + [-0.5, -0.1], dtype=np.float32),
        turns=(TurnSpan(num_prompt_tokens, len(token_ids), reward or 0.0),),
    )
    return Rollout(
        environment="coins",
        seed=1,
        sequences=(sequence,),
        reward=reward,
        episode_return=reward,
        terms=(ScoredTerm("environment", reward),),
        status=status,
        policy_version=version,
        success=None if reward is None else reward > 0,
    )


def make_group(*rewards: float | None, index: int = 0, version: int = 0) -> RolloutGroup:
    """Return a group with one rollout per reward, each with different tokens."""
    rollouts = [
        make_rollout(reward, token_ids=(5, 6, 7 + number, 8), version=version)
        for number, reward in enumerate(rewards)
    ]
    return RolloutGroup(index, "coins", tuple(rollouts))
