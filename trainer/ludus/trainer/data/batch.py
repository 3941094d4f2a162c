"""Conversion of groups to a batch: an advantage for each token, with equal sequences shared.

    groups --+-- grpo        advantages against the group        --> samples --> Batch
             +-- reinforce   token returns, whitened                  one per sequence
             +-- ppo         rewards only; the learner's critic       of an episode
                             computes the advantages

A batch may mix groups of several environments. Baselines belong to a group, and scale = "batch"
to all groups of an environment. An episode without a reward (None) does not count in any mean and
has no sample.

The learned reward is `Rollout.reward`. Each turn's reward is placed on its last token, unless the
environment gave a reward to each token. The rest of the learned reward (other terms, weights) is
placed on the last turn.

A function of the user (`algorithm.advantages`) gets the scored episodes of a group and returns one
advantage for each, which all tokens of the episode get.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from ludus.proto.config import AlgorithmConfig, GrpoConfig, ReinforceConfig
from ludus.proto.errors import ConfigError, UserError
from ludus.trainer.algorithms.advantages import (
    discounted_returns,
    group_advantages,
    moments,
    turn_advantages,
    whiten,
)
from ludus.trainer.core.functions import import_object
from ludus.trainer.core.ragged import Ragged
from ludus.trainer.core.types import (
    Batch,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    TokenSequence,
    TrainingSample,
    TurnSpan,
)
from ludus.trainer.data.failures import describe

_FUNCTION_FIELD = "algorithm.advantages"


def make_batch(groups: Sequence[RolloutGroup], algorithm: AlgorithmConfig) -> Batch:
    """Return the batch of all scored episodes of `groups`.

    Advantages of GRPO and REINFORCE++ are final, unless the divergence is part of the reward. In
    that case the learner adds the divergence (`kl_penalty`), and whitens for REINFORCE++. For PPO
    the advantages are 0.

    Raises:
        ValueError: turns overlap, or are outside their sequence.
    """
    if isinstance(algorithm, GrpoConfig):
        samples = list(_samples(groups, _turn_credits(groups, algorithm), gamma=1.0))
    elif isinstance(algorithm, ReinforceConfig):
        samples = list(_samples(_subtract_baseline(groups, algorithm), None, algorithm.gamma))
        samples = _assign_returns(samples, algorithm)
    else:
        samples = list(_samples(groups, None, algorithm.gamma))
    return collate(samples)


def collate(samples: Sequence[TrainingSample]) -> Batch:
    """Return the batch of `samples`; samples with equal tokens and mask share one sequence."""
    row_by_content: dict[tuple[bytes, bytes], int] = {}
    distinct_samples: list[TrainingSample] = []
    sequence_of_sample: list[int] = []
    for sample in samples:
        token_ids = np.asarray(sample.token_ids, dtype=np.int64)
        mask = np.asarray(sample.loss_mask, dtype=np.bool_)
        content = (token_ids.tobytes(), mask.tobytes())
        row = row_by_content.setdefault(content, len(distinct_samples))
        if row == len(distinct_samples):
            distinct_samples.append(sample)
        sequence_of_sample.append(row)
    return Batch(
        sequences=Ragged.from_rows((sample.token_ids for sample in distinct_samples), np.int64),
        sequence_of_sample=np.array(sequence_of_sample, dtype=np.int64),
        loss_masks=Ragged.from_rows((sample.loss_mask for sample in distinct_samples), np.bool_),
        rollout_logprobs=Ragged.from_rows((s.rollout_logprobs for s in samples), np.float32),
        advantages=Ragged.from_rows((s.advantages for s in samples), np.float32),
        rewards=Ragged.from_rows((s.rewards for s in samples), np.float32),
        terminated=np.array([s.terminated for s in samples], dtype=bool),
    )


def shuffle_rewards(groups: Sequence[RolloutGroup], generator: random.Random) -> list[RolloutGroup]:
    """Permute the rewards of each environment at random: the negative control.

    The rewards keep their distribution, so only learning is affected. The rewards of single turns
    are removed, because they would still distinguish good turns from bad ones.
    """
    shuffled: dict[str, Iterator[float]] = {}
    for name, rows in _rows_by_environment(groups).items():
        rewards = [r.reward for row in rows for r in groups[row].rollouts if r.reward is not None]
        generator.shuffle(rewards)
        shuffled[name] = iter(rewards)
    return [
        replace(
            group,
            rollouts=tuple(
                r if r.reward is None else _reward_at_end(r, next(shuffled[group.environment]))
                for r in group.rollouts
            ),
        )
        for group in groups
    ]


def _turn_credits(
    groups: Sequence[RolloutGroup], algorithm: GrpoConfig
) -> list[list[Iterable[float]]]:
    """Return the advantages of the turns of each episode of each group."""
    if algorithm.advantages is not None:
        path = algorithm.advantages
        return [[repeat(a) for a in _call_advantage_function(path, group)] for group in groups]
    credits_by_group: dict[int, list[Iterable[float]]] = {}
    for rows in _rows_by_environment(groups).values():
        members = [groups[row] for row in rows]
        baseline, scale = algorithm.baseline, algorithm.scale
        if algorithm.credit == "turn":
            table = turn_advantages(_turn_reward_table(members), baseline, scale, algorithm.gamma)
            credits = [list(group) for group in table.tolist()]
        else:
            table = group_advantages(_reward_table(members), baseline, scale)
            credits = [[repeat(advantage) for advantage in group] for group in table.tolist()]
        credits_by_group.update(zip(rows, credits, strict=True))
    return [credits_by_group[row] for row in range(len(groups))]


def _call_advantage_function(path: str, group: RolloutGroup) -> list[float]:
    """Return [G] the user's advantages of the group's episodes; 0 for unscored episodes.

    Raises:
        ConfigError: the function fails, or does not return one finite number per episode.
    """
    scored_rollouts = [rollout for rollout in group.rollouts if rollout.reward is not None]
    if not scored_rollouts:
        return [0.0] * len(group.rollouts)
    try:
        result = import_object(path, _FUNCTION_FIELD)(list(scored_rollouts))
        if inspect.isawaitable(result):
            result = asyncio.run(_await(result))
        advantages = [float(value) for value in result]
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # code of the user
        raise ConfigError(
            f"{_FUNCTION_FIELD} = '{path}' raised {describe(error)}; it must be a function of a "
            "list of episodes, each with its `reward`, that returns one number for each"
        ) from error
    if len(advantages) != len(scored_rollouts) or not all(map(math.isfinite, advantages)):
        raise ConfigError(
            f"{_FUNCTION_FIELD} = '{path}' must return {len(scored_rollouts)} finite numbers, one "
            f"for each episode, got {advantages!r:.100}"
        )
    scored_advantages = iter(advantages)
    return [0.0 if r.reward is None else next(scored_advantages) for r in group.rollouts]


async def _await(result: Awaitable[Iterable[float]]) -> Iterable[float]:
    return await result


def _subtract_baseline(
    groups: Sequence[RolloutGroup], algorithm: ReinforceConfig
) -> Sequence[RolloutGroup]:
    if algorithm.baseline == "none":
        return groups
    return [replace(group, rollouts=_subtract_mean(group.rollouts)) for group in groups]


def _subtract_mean(rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    mean = sum(rewards) / max(len(rewards), 1)
    return tuple(r if r.reward is None else replace(r, reward=r.reward - mean) for r in rollouts)


def _assign_returns(
    samples: Sequence[TrainingSample], algorithm: ReinforceConfig
) -> list[TrainingSample]:
    """Return the samples with discounted returns as advantages, whitened over all samples."""
    masks = _pad([sample.loss_mask for sample in samples]).bool()
    rewards = _pad([sample.rewards for sample in samples])
    advantages = discounted_returns(rewards, masks, algorithm.gamma)
    if algorithm.kl_placement == "loss":
        advantages = whiten(advantages, masks, moments(advantages, masks))
    return [
        replace(sample, advantages=row[: len(sample.token_ids)])
        for sample, row in zip(samples, advantages.numpy(), strict=True)
    ]


def _samples(
    groups: Sequence[RolloutGroup],
    credits_of_groups: Sequence[Sequence[Iterable[float]]] | None,
    gamma: float,
) -> Iterator[TrainingSample]:
    """Yield a sample for each sequence with a sampled token; without credits, advantages are 0."""
    for index, group in enumerate(groups):
        for number, rollout in enumerate(group.rollouts):
            if rollout.reward is not None:
                credit = credits_of_groups[index][number] if credits_of_groups else repeat(0.0)
                yield from _rollout_samples(rollout, iter(credit), gamma)


def _rollout_samples(
    rollout: Rollout, credit: Iterator[float], gamma: float
) -> Iterator[TrainingSample]:
    sequences = [sequence for sequence in rollout.sequences if sequence.turns]
    for sequence in sequences:
        _check_turns(sequence)
    rewards = _token_rewards(sequences, _turn_rewards(rollout), gamma)
    for sequence, row in zip(sequences, rewards, strict=True):
        advantages = np.zeros(len(sequence.token_ids))
        for turn in sequence.turns:
            advantages[turn.start : turn.end] = next(credit)
        truncated = rollout.status is RolloutStatus.TRUNCATED and sequence is sequences[-1]
        yield TrainingSample(
            sequence.token_ids,
            sequence.loss_mask,
            sequence.logprobs,
            advantages,
            row,
            terminated=not truncated,
        )


def _turn_rewards(rollout: Rollout) -> list[float]:
    """Return [K] the share of each turn in the learned reward; the shares sum up to it."""
    rewards = [turn.reward for sequence in rollout.sequences for turn in sequence.turns]
    if rewards and rollout.reward is not None:
        rewards[-1] += rollout.reward - sum(rewards)
    return rewards


def _token_rewards(
    sequences: Sequence[TokenSequence], turn_rewards: Sequence[float], gamma: float
) -> list[np.ndarray]:
    """Return [T] the rewards of the tokens of each sequence.

    The learner processes each sequence separately. So the last turn of a sequence also gets the
    return of the following sequence of the episode, discounted per sampled token.
    """
    rows: list[np.ndarray] = []
    remaining_rewards = list(turn_rewards)
    next_return = 0.0
    for sequence in reversed(sequences):
        row = np.zeros(len(sequence.token_ids))
        for turn in reversed(sequence.turns):
            rewards = _turn_token_rewards(turn, remaining_rewards.pop())
            row[turn.start : turn.end] = rewards
            if turn is sequence.turns[-1]:
                row[turn.end - 1] += gamma * next_return
            discounts = gamma ** np.arange(len(rewards) + 1)
            next_return = float(discounts @ [*rewards, next_return])
        rows.append(row)
    return rows[::-1]


def _turn_token_rewards(turn: TurnSpan, reward: float) -> np.ndarray:
    """Return [end - start] the rewards of the turn's tokens, which sum up to `reward`."""
    rewards = np.zeros(turn.end - turn.start)
    if turn.token_rewards:
        rewards[:] = turn.token_rewards
    rewards[-1] += reward - sum(turn.token_rewards)
    return rewards


def _reward_at_end(rollout: Rollout, reward: float) -> Rollout:
    """Return the rollout with a different reward, all of it on the last turn."""
    sequences = tuple(
        replace(
            sequence,
            turns=tuple(replace(turn, reward=0.0, token_rewards=()) for turn in sequence.turns),
        )
        for sequence in rollout.sequences
    )
    return replace(rollout, reward=reward, sequences=sequences)


def _rows_by_environment(groups: Sequence[RolloutGroup]) -> dict[str, list[int]]:
    """Return the indices of the groups of each environment."""
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group.environment, []).append(row)
    return rows


def _reward_table(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return [num_groups, G] rewards, NaN if missing. In float64, equal rewards stay equal."""
    return _pad(
        [[np.nan if reward is None else reward for reward in group.rewards] for group in groups],
        np.nan,
    )


def _turn_reward_table(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return [num_groups, G, K] rewards of the turns, NaN if missing."""
    rewards = [
        [[] if r.reward is None else _turn_rewards(r) for r in group.rollouts] for group in groups
    ]
    group_size = max(map(len, rewards))
    num_turns = max((len(turns) for group in rewards for turns in group), default=0)
    table = np.full((len(groups), group_size, num_turns), np.nan)
    for row, group in zip(table, rewards, strict=True):
        for padded_row, turns in zip(row, group, strict=False):
            padded_row[: len(turns)] = turns
    return torch.from_numpy(table)


def _pad(rows: Sequence[Sequence[float] | np.ndarray], filler: float = 0.0) -> Tensor:
    """Return [N, T] the rows in float64, padded with `filler`."""
    table = np.full((len(rows), max(map(len, rows), default=0)), filler)
    for padded_row, row in zip(table, rows, strict=True):
        padded_row[: len(row)] = row
    return torch.from_numpy(table)


def _check_turns(sequence: TokenSequence) -> None:
    last_end, num_tokens = 1, len(sequence.token_ids)  # The first token has no prediction.
    for turn in sequence.turns:
        if not last_end <= turn.start < turn.end <= num_tokens:
            raise ValueError(
                f"turn {turn.start}..{turn.end} must start at {last_end} or later, contain a "
                f"token, and end by {num_tokens}, the sequence's length; build sequences "
                "with join_turns"
            )
        last_end = turn.end
