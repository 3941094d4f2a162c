"""Groups to a batch: what each token is credited with, equal token sequences shared.

    groups --+-- grpo        advantages against the group        --> samples --> Batch
             +-- reinforce   token returns, whitened over all        one per sequence
             +-- ppo         rewards only; the learner's critic       of an episode
                             makes advantages of them

Groups of several environments may stand beside each other: baselines are of a group, and a
scale "batch" is of the environment's own groups. An episode without a reward (None) is in no
mean and in no sample.

What is learned from is `Rollout.reward`. Each turn's reward stands on its last token, unless the
environment has paid for each token; what the reward has beyond the turns' own (other terms,
weights) stands on the last turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from ludus.proto.config import AlgorithmConfig, GrpoConfig, ReinforceConfig
from ludus.trainer.algorithms.advantages import (
    discounted_returns,
    group_advantages,
    turn_advantages,
)
from ludus.trainer.algorithms.moments import moments, whiten
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
from ludus.trainer.data.own_advantages import GroupAdvantages


def make_batch(groups: Sequence[RolloutGroup], algorithm: AlgorithmConfig) -> Batch:
    """The batch of all scored episodes of `groups`.

    Advantages are final for GRPO and REINFORCE++, unless their divergence is in the reward:
    then the learner adds what it costs (`kl_penalty`), and whitens for REINFORCE++. For PPO
    they are 0.

    Raises:
        ValueError: turns overlap, or do not lie in their sequence.
    """
    if isinstance(algorithm, GrpoConfig):
        samples = list(_samples(groups, _group_credits(groups, algorithm), gamma=1.0))
    elif isinstance(algorithm, ReinforceConfig):
        samples = list(_samples(_with_baseline(groups, algorithm), None, algorithm.gamma))
        samples = _credited_with_returns(samples, algorithm)
    else:
        samples = list(_samples(groups, None, algorithm.gamma))
    return collate(samples)


def collate(samples: Sequence[TrainingSample]) -> Batch:
    """The batch of `samples`; those of equal tokens and mask share one sequence.

    Raises:
        ValueError: fields of different lengths, or an advantage on a token not sampled.
    """
    for sample in samples:
        _check_lengths(sample)
    row_of: dict[tuple[bytes, bytes], int] = {}
    first: list[TrainingSample] = []
    sequence_of_sample: list[int] = []
    for sample in samples:
        token_ids = np.asarray(sample.token_ids, dtype=np.int64)
        mask = np.asarray(sample.loss_mask, dtype=np.bool_)
        row = row_of.setdefault((token_ids.tobytes(), mask.tobytes()), len(first))
        if row == len(first):
            first.append(sample)
        sequence_of_sample.append(row)
    loss_masks = Ragged.from_rows((sample.loss_mask for sample in first), np.bool_)
    advantages = Ragged.from_rows((s.advantages for s in samples), np.float32)
    _check_advantages(advantages, loss_masks.take(sequence_of_sample))
    return Batch(
        sequences=Ragged.from_rows((sample.token_ids for sample in first), np.int64),
        sequence_of_sample=np.array(sequence_of_sample, dtype=np.int64),
        loss_masks=loss_masks,
        rollout_logprobs=Ragged.from_rows((s.rollout_logprobs for s in samples), np.float32),
        advantages=advantages,
        rewards=Ragged.from_rows((s.rewards for s in samples), np.float32),
        terminated=np.array([s.terminated for s in samples], dtype=bool),
    )


def shuffle_rewards(groups: Sequence[RolloutGroup], draw: random.Random) -> list[RolloutGroup]:
    """The groups with each environment's rewards dealt out at random: the negative control.

    The rewards keep their distribution, so everything but learning stays the same. The turns'
    own rewards go with them, or they would still tell good turns from bad ones.
    """
    dealt: dict[str, Iterator[float]] = {}
    for name, rows in _by_environment(groups).items():
        scored = [r.reward for row in rows for r in groups[row].rollouts if r.reward is not None]
        draw.shuffle(scored)
        dealt[name] = iter(scored)
    return [
        replace(
            group,
            rollouts=tuple(
                r if r.reward is None else _paid_at_the_end(r, next(dealt[group.environment]))
                for r in group.rollouts
            ),
        )
        for group in groups
    ]


def _group_credits(
    groups: Sequence[RolloutGroup], algorithm: GrpoConfig
) -> list[list[Iterable[float]]]:
    """For every group's every episode, the advantages of its turns."""
    if algorithm.advantages is not None:
        advantages_of = GroupAdvantages(algorithm.advantages)
        return [[repeat(advantage) for advantage in advantages_of(group)] for group in groups]
    credit_of_group: dict[int, list[Iterable[float]]] = {}
    for rows in _by_environment(groups).values():
        members = [groups[row] for row in rows]
        baseline, scale = algorithm.baseline, algorithm.scale
        if algorithm.credit == "turn":
            table = turn_advantages(_turn_reward_table(members), baseline, scale, algorithm.gamma)
            credits = [list(group) for group in table.tolist()]
        else:
            table = group_advantages(_reward_table(members), baseline, scale)
            credits = [[repeat(advantage) for advantage in group] for group in table.tolist()]
        credit_of_group.update(zip(rows, credits, strict=True))
    return [credit_of_group[row] for row in range(len(groups))]


def _with_baseline(
    groups: Sequence[RolloutGroup], algorithm: ReinforceConfig
) -> Sequence[RolloutGroup]:
    """The groups, their means taken off the rewards where the algorithm says so."""
    if algorithm.baseline == "none":
        return groups
    return [replace(group, rollouts=_centred(group.rollouts)) for group in groups]


def _centred(rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    scored = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    mean = sum(scored) / max(len(scored), 1)
    return tuple(r if r.reward is None else replace(r, reward=r.reward - mean) for r in rollouts)


def _credited_with_returns(
    samples: Sequence[TrainingSample], algorithm: ReinforceConfig
) -> list[TrainingSample]:
    """The samples, each token credited with what it led to, whitened over all of them."""
    masks = _padded([sample.loss_mask for sample in samples]).bool()
    rewards = _padded([sample.rewards for sample in samples])
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
    """One sample for each sequence with a sampled token; without credits, its advantage is 0."""
    for index, group in enumerate(groups):
        for number, rollout in enumerate(group.rollouts):
            if rollout.reward is not None:
                credit = credits_of_groups[index][number] if credits_of_groups else repeat(0.0)
                yield from _samples_of(rollout, iter(credit), gamma)


def _samples_of(
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
        cut_off = rollout.status is RolloutStatus.TRUNCATED and sequence is sequences[-1]
        yield TrainingSample(
            sequence.token_ids,
            sequence.loss_mask,
            sequence.logprobs,
            advantages,
            row,
            terminated=not cut_off,
        )


def _turn_rewards(rollout: Rollout) -> list[float]:
    """[K] what each turn adds to the reward that is learned from; they sum up to it."""
    rewards = [turn.reward for sequence in rollout.sequences for turn in sequence.turns]
    if rewards and rollout.reward is not None:
        rewards[-1] += rollout.reward - sum(rewards)
    return rewards


def _token_rewards(
    sequences: Sequence[TokenSequence], turn_rewards: Sequence[float], gamma: float
) -> list[np.ndarray]:
    """[T] for each sequence: every turn's reward on its last token, or where it was paid.

    The learner sees each sequence alone. So the last turn of one also gets what the next
    sequence of the episode led to, discounted per sampled token.
    """
    rows: list[np.ndarray] = []
    left = list(turn_rewards)
    following = 0.0
    for sequence in reversed(sequences):
        row = np.zeros(len(sequence.token_ids))
        for turn in reversed(sequence.turns):
            earned = _earned(turn, left.pop())
            row[turn.start : turn.end] = earned
            if turn is sequence.turns[-1]:
                row[turn.end - 1] += gamma * following
            discounts = gamma ** np.arange(len(earned) + 1)
            following = float(discounts @ [*earned, following])
        rows.append(row)
    return rows[::-1]


def _earned(turn: TurnSpan, reward: float) -> np.ndarray:
    """What each token of the turn has earned, [end - start], `reward` in all."""
    earned = np.zeros(turn.end - turn.start)
    if turn.token_rewards:
        earned[:] = turn.token_rewards
    earned[-1] += reward - sum(turn.token_rewards)
    return earned


def _paid_at_the_end(rollout: Rollout, reward: float) -> Rollout:
    """The rollout with another reward, none of it for a turn before the last."""
    sequences = tuple(
        replace(
            sequence,
            turns=tuple(replace(turn, reward=0.0, token_rewards=()) for turn in sequence.turns),
        )
        for sequence in rollout.sequences
    )
    return replace(rollout, reward=reward, sequences=sequences)


def _by_environment(groups: Sequence[RolloutGroup]) -> dict[str, list[int]]:
    """By environment, the rows of `groups` that were played there."""
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group.environment, []).append(row)
    return rows


def _reward_table(groups: Sequence[RolloutGroup]) -> Tensor:
    """[num_groups, G] rewards; nan where there is none. In float64: equal must mean equal."""
    return _padded(
        [[np.nan if reward is None else reward for reward in group.rewards] for group in groups],
        np.nan,
    )


def _turn_reward_table(groups: Sequence[RolloutGroup]) -> Tensor:
    """[num_groups, G, K] rewards of the turns; nan where there is none."""
    rewards = [
        [[] if r.reward is None else _turn_rewards(r) for r in group.rollouts] for group in groups
    ]
    group_size = max(map(len, rewards))
    num_turns = max((len(turns) for group in rewards for turns in group), default=0)
    table = np.full((len(groups), group_size, num_turns), np.nan)
    for row, group in zip(table, rewards, strict=True):
        for padded, turns in zip(row, group, strict=False):
            padded[: len(turns)] = turns
    return torch.from_numpy(table)


def _padded(rows: Sequence[Sequence[float] | np.ndarray], filler: float = 0.0) -> Tensor:
    """[N, T] in float64, the rows' ends filled up."""
    table = np.full((len(rows), max(map(len, rows), default=0)), filler)
    for padded, row in zip(table, rows, strict=True):
        padded[: len(row)] = row
    return torch.from_numpy(table)


def _check_turns(sequence: TokenSequence) -> None:
    last_end, num_tokens = 1, len(sequence.token_ids)  # nothing predicts the first token
    for turn in sequence.turns:
        if not last_end <= turn.start < turn.end <= num_tokens:
            raise ValueError(
                f"turn {turn.start}..{turn.end} expected to begin at {last_end} or later, to hold "
                f"a token, and to end by {num_tokens}, the sequence's length; build sequences "
                "with join_turns"
            )
        last_end = turn.end


def _check_lengths(sample: TrainingSample) -> None:
    lengths = {
        len(sample.token_ids),
        len(sample.loss_mask),
        len(sample.rollout_logprobs),
        len(sample.advantages),
        len(sample.rewards),
    }
    if len(lengths) != 1:
        raise ValueError(
            f"a sample's fields expected one length, got {sorted(lengths)}; give every token its "
            "own mask, log-prob, advantage and reward"
        )


def _check_advantages(advantages: Ragged, sampled: np.ndarray) -> None:
    outside = advantages.values[~sampled]
    if outside.any():
        raise ValueError(
            f"advantages expected 0 on tokens that were not sampled, got "
            f"{outside[outside.nonzero()][0]}; what an environment said must not be trained on"
        )
