"""Conversion of groups to a batch with an advantage for each token; equal sequences are shared.

    groups --+-- grpo        advantages against the group        --> samples --> Batch
             +-- reinforce   token returns, whitened                  one per sequence
             +-- ppo         rewards only; the learner's critic       of an episode
                             computes the advantages

A batch may mix groups of several environments. Baselines are computed per group. The scale "batch"
is computed per environment. An episode without a reward (None) does not count in any mean and has
no sample.

The training reward of an episode is `Rollout.reward`. Each turn's reward is placed on its last
token, unless the environment gave a reward to each token. The rest of the training reward (other
reward terms, and weights of terms) is placed on the last turn.

A function of the user (`algorithm.advantages`) gets the scored episodes of a group and returns one
advantage for each, which all tokens of the episode get.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from ludus.proto.config import AlgorithmConfig, GrpoConfig, ReinforceConfig
from ludus.proto.errors import ConfigError, UserError
from ludus.proto.rewards import MAX_REWARD, is_valid_reward
from ludus.trainer.algorithms.advantages import (
    discounted_returns,
    group_advantages,
    moments,
    turn_advantages,
    whiten,
)
from ludus.trainer.core.functions import import_callable
from ludus.trainer.core.ragged import RaggedArray, join_rows
from ludus.trainer.core.types import (
    Batch,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    TokenSequence,
    TrainingSample,
    TurnSpan,
)
from ludus.trainer.data.counts import compute_turn_rewards
from ludus.trainer.data.failures import describe_error

_FUNCTION_FIELD = "algorithm.advantages"


def make_batch(groups: Sequence[RolloutGroup], algorithm: AlgorithmConfig) -> Batch:
    """Return the batch of all scored episodes of `groups`.

    Advantages of GRPO and REINFORCE++ are final, unless the divergence is part of the reward. In
    that case the learner adds the divergence (`kl_penalty`), and whitens the advantages for
    REINFORCE++. For PPO the advantages are 0.

    Raises:
        ValueError: turns overlap, or are outside their sequence.
    """
    if isinstance(algorithm, GrpoConfig):
        samples = list(_make_samples(groups, _compute_turn_credits(groups, algorithm), gamma=1.0))
    elif isinstance(algorithm, ReinforceConfig):
        if algorithm.baseline != "none":
            groups = [replace(group, rollouts=_subtract_mean(group.rollouts)) for group in groups]
        samples = list(_make_samples(groups, None, algorithm.gamma))
        samples = _assign_returns(samples, algorithm)
    else:
        samples = list(_make_samples(groups, None, algorithm.gamma, has_critic=True))
    return collate(samples)


def collate(samples: Sequence[TrainingSample]) -> Batch:
    """Return the batch of `samples`; samples with equal tokens and masks share one sequence.

    They must also have been restricted to the same tokens.

    Raises:
        ValueError: some samples are restricted to legal answers, and others are not.
    """
    index_by_key: dict[tuple[bytes, ...], int] = {}
    first_samples: list[TrainingSample] = []
    sequence_of_sample: list[int] = []
    for sample in samples:
        token_ids = np.asarray(sample.token_ids, dtype=np.int64)
        mask = np.asarray(sample.loss_mask, dtype=np.bool_)
        allowed_bytes = () if sample.allowed_ids is None else sample.allowed_ids.to_bytes()
        key = (token_ids.tobytes(), mask.tobytes(), *allowed_bytes)
        sequence_index = index_by_key.setdefault(key, len(first_samples))
        if sequence_index == len(first_samples):
            first_samples.append(sample)
        sequence_of_sample.append(sequence_index)
    return Batch(
        sequences=RaggedArray.from_rows((sample.token_ids for sample in first_samples), np.int64),
        sequence_of_sample=np.array(sequence_of_sample, dtype=np.int64),
        loss_masks=RaggedArray.from_rows((sample.loss_mask for sample in first_samples), np.bool_),
        rollout_logprobs=RaggedArray.from_rows(
            (sample.rollout_logprobs for sample in samples), np.float32
        ),
        advantages=RaggedArray.from_rows((sample.advantages for sample in samples), np.float32),
        rewards=RaggedArray.from_rows((sample.rewards for sample in samples), np.float32),
        terminated=np.array([sample.terminated for sample in samples], dtype=bool),
        adds_next_return=np.array([sample.adds_next_return for sample in samples], dtype=bool),
        allowed_ids=join_rows([sample.allowed_ids for sample in first_samples]),
    )


def shuffle_rewards(groups: Sequence[RolloutGroup], generator: random.Random) -> list[RolloutGroup]:
    """Permute the rewards of each environment at random, as a negative control.

    The rewards keep their distribution, so only learning is affected. The rewards of single turns
    are removed, because they would still distinguish good turns from bad ones.
    """
    shuffled_groups = list(groups)
    for indices in _index_groups_by_environment(groups).values():
        rewards = [
            reward for index in indices for reward in groups[index].rewards if reward is not None
        ]
        generator.shuffle(rewards)
        for index in indices:
            rollouts = tuple(
                rollout if rollout.reward is None else _move_reward_to_end(rollout, rewards.pop(0))
                for rollout in groups[index].rollouts
            )
            shuffled_groups[index] = replace(groups[index], rollouts=rollouts)
    return shuffled_groups


def _compute_turn_credits(
    groups: Sequence[RolloutGroup], algorithm: GrpoConfig
) -> list[list[Iterable[float]]]:
    """Return the advantages of the turns of each episode of each group."""
    if algorithm.advantages is not None:
        path = algorithm.advantages
        return [list(map(repeat, _call_advantage_function(path, group))) for group in groups]
    credits_by_group: dict[int, list[Iterable[float]]] = {}
    baseline, scale = algorithm.baseline, algorithm.scale
    for indices in _index_groups_by_environment(groups).values():
        environment_groups = [groups[index] for index in indices]
        if algorithm.credit == "turn":
            rewards = _make_turn_reward_table(environment_groups)
            turn_credits = turn_advantages(rewards, baseline, scale, algorithm.gamma).tolist()
        else:
            rewards = _make_reward_table(environment_groups)
            advantages = group_advantages(rewards, baseline, scale).tolist()
            turn_credits = [list(map(repeat, row)) for row in advantages]
        credits_by_group.update(zip(indices, turn_credits, strict=True))
    return [credits_by_group[index] for index in range(len(groups))]


def _call_advantage_function(path: str, group: RolloutGroup) -> list[float]:
    """Return the advantages [G] that the user's function computes; 0 for unscored episodes.

    Raises:
        ConfigError: the function fails, or does not return one finite number per episode.
    """
    scored_rollouts = [rollout for rollout in group.rollouts if rollout.reward is not None]
    if not scored_rollouts:
        return [0.0] * len(group.rollouts)
    try:
        advantages = import_callable(path, _FUNCTION_FIELD)(list(scored_rollouts))
        if inspect.isawaitable(advantages):
            advantages = asyncio.run(_await_advantages(advantages))
        advantages = [float(advantage) for advantage in advantages]
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # code of the user
        raise ConfigError(
            f"{_FUNCTION_FIELD} = '{path}' raised {describe_error(error)}; it must be a function "
            "that takes a list of episodes with rewards and returns one number for each of them"
        ) from error
    if len(advantages) != len(scored_rollouts) or not all(map(is_valid_reward, advantages)):
        raise ConfigError(
            f"{_FUNCTION_FIELD} = '{path}' must return {len(scored_rollouts)} finite numbers, one "
            f"for each episode, of at most {MAX_REWARD:g} in size, got {advantages!r:.100}"
        )
    scored_advantages = iter(advantages)
    return [
        0.0 if rollout.reward is None else next(scored_advantages) for rollout in group.rollouts
    ]


async def _await_advantages(advantages: Awaitable[Iterable[float]]) -> Iterable[float]:
    return await advantages


def _subtract_mean(rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    mean = sum(rewards) / max(len(rewards), 1)
    return tuple(
        rollout if rollout.reward is None else replace(rollout, reward=rollout.reward - mean)
        for rollout in rollouts
    )


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


def _make_samples(
    groups: Sequence[RolloutGroup],
    turn_credits: Sequence[Sequence[Iterable[float]]] | None,
    gamma: float,
    *,
    has_critic: bool = False,
) -> Iterator[TrainingSample]:
    """Yield a sample for each sequence with a sampled token; without credits, advantages are 0."""
    for index, group in enumerate(groups):
        group_credits = turn_credits[index] if turn_credits else repeat(repeat(0.0))
        for rollout, rollout_credits in zip(group.rollouts, group_credits, strict=False):
            if rollout.reward is not None and not rollout.is_masked:
                yield from _make_rollout_samples(
                    rollout, iter(rollout_credits), gamma, has_critic=has_critic
                )


def _make_rollout_samples(
    rollout: Rollout, turn_credits: Iterator[float], gamma: float, *, has_critic: bool
) -> Iterator[TrainingSample]:
    """Yield a sample for each sequence of an episode.

    With a critic, each sequence of a truncated episode continues with the value of its last state.
    A return without that value would look like the end of the episode.
    """
    sequences = [sequence for sequence in rollout.sequences if sequence.turns]
    for sequence in sequences:
        _check_turns(sequence)
    is_truncated = rollout.status is RolloutStatus.TRUNCATED
    adds_returns = not (is_truncated and has_critic)
    rewards_by_sequence = _compute_token_rewards(
        sequences, compute_turn_rewards(rollout), gamma, adds_returns=adds_returns
    )
    for sequence, token_rewards in zip(sequences, rewards_by_sequence, strict=True):
        advantages = np.zeros(len(sequence.token_ids))
        for turn in sequence.turns:
            advantages[turn.start : turn.end] = next(turn_credits)
        continues = is_truncated and (has_critic or sequence is sequences[-1])
        tokens = sequence.token_ids, sequence.loss_mask, sequence.logprobs
        yield TrainingSample(
            *tokens,
            advantages,
            token_rewards,
            terminated=not continues,
            adds_next_return=adds_returns and sequence is not sequences[-1],
            allowed_ids=sequence.allowed_ids,
        )


def _compute_token_rewards(
    sequences: Sequence[TokenSequence],
    turn_rewards: Sequence[float],
    gamma: float,
    *,
    adds_returns: bool,
) -> list[np.ndarray]:
    """Return the rewards [T] of the tokens of each sequence.

    The learner processes each sequence separately. So with `adds_returns`, the last turn of a
    sequence also gets the return of the following sequence of the episode, discounted per sampled
    token.
    """
    rewards_by_sequence: list[np.ndarray] = []
    remaining_rewards = list(turn_rewards)
    next_return = 0.0
    for sequence in reversed(sequences):
        sequence_rewards = np.zeros(len(sequence.token_ids))
        for turn in reversed(sequence.turns):
            turn_token_rewards = _spread_turn_reward(turn, remaining_rewards.pop())
            sequence_rewards[turn.start : turn.end] = turn_token_rewards
            if adds_returns and turn is sequence.turns[-1]:
                sequence_rewards[turn.end - 1] += gamma * next_return
            discounts = gamma ** np.arange(len(turn_token_rewards) + 1)
            next_return = float(discounts @ [*turn_token_rewards, next_return])
        rewards_by_sequence.append(sequence_rewards)
    return rewards_by_sequence[::-1]


def _spread_turn_reward(turn: TurnSpan, reward: float) -> np.ndarray:
    """Return the rewards [end - start] of the turn's tokens; their sum is `reward`."""
    rewards = np.zeros(turn.end - turn.start)
    if turn.token_rewards:
        rewards[:] = turn.token_rewards
    rewards[-1] += reward - sum(turn.token_rewards)
    return rewards


def _move_reward_to_end(rollout: Rollout, reward: float) -> Rollout:
    """Return the rollout with a different reward, all of it on the last turn."""
    sequences = []
    for sequence in rollout.sequences:
        turns = tuple(TurnSpan(turn.start, turn.end, reward=0.0) for turn in sequence.turns)
        sequences.append(replace(sequence, turns=turns))
    return replace(rollout, reward=reward, sequences=tuple(sequences))


def _index_groups_by_environment(groups: Sequence[RolloutGroup]) -> dict[str, list[int]]:
    """Return the indices of the groups of each environment."""
    indices: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        indices.setdefault(group.environment, []).append(index)
    return indices


def _make_reward_table(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return rewards [num_groups, G], NaN if missing. Float64 keeps equal rewards equal."""
    return _pad([np.array(group.rewards, dtype=np.float64) for group in groups], np.nan)


def _make_turn_reward_table(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return the rewards [num_groups, G, K] of the turns, NaN if missing."""
    group_size = max(len(group.rollouts) for group in groups)
    rows: list[list[float]] = []
    for group in groups:
        rows += [
            [] if rollout.reward is None else compute_turn_rewards(rollout)
            for rollout in group.rollouts
        ]
        rows += [[]] * (group_size - len(group.rollouts))
    return _pad(rows, np.nan).unflatten(0, (len(groups), group_size))


def _pad(rows: Sequence[Sequence[float] | np.ndarray], fill_value: float = 0.0) -> Tensor:
    """Return the rows [N, T] in float64, padded with `fill_value`."""
    table = np.full((len(rows), max(map(len, rows), default=0)), fill_value)
    for padded_row, row in zip(table, rows, strict=True):
        padded_row[: len(row)] = row
    return torch.from_numpy(table)


def _check_turns(sequence: TokenSequence) -> None:
    min_start = 1  # the first token is not predicted
    num_tokens = len(sequence.token_ids)
    for turn in sequence.turns:
        if not min_start <= turn.start < turn.end <= num_tokens:
            raise ValueError(
                f"turn {turn.start}..{turn.end} must start at {min_start} or later, contain a "
                f"token, and end by {num_tokens}, the sequence's length; build sequences "
                "with join_turns"
            )
        min_start = turn.end
