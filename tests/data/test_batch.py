"""Batches of groups: advantages per token, shared sequences, no lost episodes."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from ludus.proto.config import AlgorithmConfig, GrpoConfig, PpoConfig, ReinforceConfig
from ludus.trainer.algorithms.advantages import gae
from ludus.trainer.core.types import (
    Batch,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    SampledCompletion,
    TokenSequence,
    Turn,
    TurnSpan,
    join_turns,
)
from ludus.trainer.data.batch import make_batch, shuffle_rewards
from tests.data.rollouts import make_group, make_rollout

PPO = PpoConfig()
REINFORCE = ReinforceConfig()


def play(
    *turn_rewards: float,
    reward: float | None = None,
    is_split: bool = False,
    status: RolloutStatus = RolloutStatus.TERMINATED,
    environment: str = "coins",
) -> Rollout:
    """Return an episode whose turns have two prompt tokens and two sampled tokens each.

    `reward` replaces the sum of the turns' rewards. `is_split` makes each turn one sequence.
    """
    turns = [
        Turn(
            [10 + index, 20],
            SampledCompletion([30 + index, 40], [-0.5, -0.1], 0, has_end_token=True),
            turn_reward,
        )
        for index, turn_reward in enumerate(turn_rewards)
    ]
    sequences = [join_turns([turn]) for turn in turns] if is_split else [join_turns(turns)]
    total_reward = sum(turn_rewards) if reward is None else reward
    return replace(
        make_rollout(total_reward),
        environment=environment,
        sequences=tuple(sequences),
        reward=total_reward,
        episode_return=sum(turn_rewards),
        status=status,
    )


def make_sequence(num_tokens: int, *turns: TurnSpan) -> TokenSequence:
    """Return a sequence with these turns, which may be invalid."""
    return TokenSequence(np.arange(num_tokens), np.zeros(num_tokens), turns)


def collect(*rollouts: Rollout, index: int = 0) -> RolloutGroup:
    return RolloutGroup(index, rollouts[0].environment, rollouts)


def list_advantages(batch: Batch) -> list[float]:
    """Return the advantage of each sample; fail if its sampled tokens have different advantages."""
    sample_advantages = []
    for row, advantages in zip(batch.sequence_of_sample, batch.advantages, strict=True):
        mask = batch.loss_masks[row]
        assert not advantages[~mask].any()
        (advantage,) = set(advantages[mask].tolist())
        sample_advantages.append(advantage)
    return sample_advantages


def list_token_advantages(batch: Batch) -> list[list[float]]:
    """Return the advantages of the sampled tokens of each sample."""
    rows = zip(batch.sequence_of_sample, batch.advantages, strict=True)
    return [advantages[batch.loss_masks[row]].tolist() for row, advantages in rows]


def play_tokens(*token_rewards: float, status: RolloutStatus = RolloutStatus.TERMINATED) -> Rollout:
    """Return an episode with one completion and one reward per sampled token."""
    completion = SampledCompletion(
        [30, 31, 32][: len(token_rewards)], [-0.5] * len(token_rewards), 0, True
    )
    turn = Turn([10, 20], completion, sum(token_rewards), token_rewards)
    rollout = make_rollout(sum(token_rewards))
    return replace(rollout, sequences=(join_turns([turn]),), status=status)


def test_token_rewards_are_assigned_to_matching_tokens() -> None:
    batch = make_batch([RolloutGroup(0, "coins", (play_tokens(1.0, 0.0, -2.0),))], PPO)
    assert batch.rewards[0].tolist() == [0, 0, 1, 0, -2]


def test_remaining_reward_is_assigned_to_the_last_token() -> None:
    rollout = replace(play_tokens(1.0, 0.0, -2.0), reward=4.0)
    batch = make_batch([RolloutGroup(0, "coins", (rollout,))], PPO)
    assert batch.rewards[0].tolist() == [0, 0, 1, 0, 3]


def test_token_rewards_are_discounted_into_the_previous_sequence() -> None:
    first_episode, second_episode = play_tokens(1.0, 2.0), play_tokens(0.0, 4.0, 8.0)
    episode = replace(
        first_episode, sequences=first_episode.sequences + second_episode.sequences, reward=15.0
    )
    groups = [RolloutGroup(0, "coins", (episode,))]
    batch = make_batch(groups, PpoConfig(gamma=0.5))
    # The return of the second sequence is 0 + 4/2 + 8/4 = 4. The preceding token gets half of it.
    assert batch.rewards[0].tolist() == [0, 0, 1, 2 + 0.5 * 4]
    assert batch.rewards[1].tolist() == [0, 0, 0, 4, 8]


def test_shuffling_removes_token_rewards() -> None:
    group = RolloutGroup(0, "coins", (play_tokens(1.0, 0.0, -2.0), play_tokens(0.0, 5.0, 0.0)))
    [shuffled_group] = shuffle_rewards([group], random.Random(0))
    batch = make_batch([shuffled_group], PPO)
    assert sorted(row[-1] for row in batch.rewards) == [-1.0, 5.0]
    assert all(not row[:-1].any() for row in batch.rewards)


def test_advantage_is_reward_minus_group_mean() -> None:
    batch = make_batch([make_group(1, -1, -1, -1), make_group(1, 1, 0, 0)], GrpoConfig())
    assert list_advantages(batch) == [1.5, -0.5, -0.5, -0.5, 0.5, 0.5, -0.5, -0.5]


def test_lost_episode_is_excluded_from_the_batch() -> None:
    batch_with_lost = make_batch([make_group(1, -1, None)], GrpoConfig())
    batch_without_lost = make_batch([make_group(1, -1)], GrpoConfig())
    assert batch_with_lost.num_samples == 2
    assert list_advantages(batch_with_lost) == list_advantages(batch_without_lost)


def test_equal_episodes_share_a_sequence_with_separate_advantages() -> None:
    group = RolloutGroup(0, "coins", (make_rollout(1.0), make_rollout(-1.0), make_rollout(1.0)))
    batch = make_batch([group], GrpoConfig())
    assert len(batch.sequences) == 1
    assert batch.sequence_of_sample.tolist() == [0, 0, 0]
    assert list_advantages(batch) == pytest.approx([2 / 3, -4 / 3, 2 / 3])
    assert int(batch.num_sampled_tokens[batch.sequence_of_sample].sum()) == 6


def test_equal_tokens_with_different_masks_remain_separate_sequences() -> None:
    rollout = make_rollout(1.0)
    (sequence,) = make_rollout(-1.0).sequences
    shorter_sequence = replace(sequence, turns=(TurnSpan(3, 4, -1.0),))
    shorter_rollout = replace(make_rollout(-1.0), sequences=(shorter_sequence,))
    batch = make_batch([RolloutGroup(0, "coins", (rollout, shorter_rollout))], GrpoConfig())
    assert len(batch.sequences) == 2


def test_shuffling_permutes_the_rewards() -> None:
    groups = [make_group(1, -1, None, index=index) for index in range(20)]
    shuffled_groups = shuffle_rewards(groups, random.Random(3))
    rewards = [
        [rollout.reward for group in variant for rollout in group.rollouts]
        for variant in (groups, shuffled_groups)
    ]
    assert Counter(rewards[0]) == Counter(rewards[1])
    assert rewards[0] != rewards[1]
    assert all(group.rollouts[2].reward is None for group in shuffled_groups)


def test_rewards_are_scaled_separately_for_each_environment() -> None:
    cards, maze = play(10.0, environment="cards"), play(0.1, environment="maze")
    groups = [
        collect(cards, replace(cards, reward=0.0)),
        collect(maze, replace(maze, reward=0.0)),
    ]
    batch = make_batch(groups, GrpoConfig(scale="batch"))
    separate_advantages = [
        list_advantages(make_batch([group], GrpoConfig(scale="batch"))) for group in groups
    ]
    assert list_advantages(batch) == separate_advantages[0] + separate_advantages[1]
    assert max(separate_advantages[1]) == pytest.approx(0.707, abs=2e-3), (
        "rewards of another environment had an effect"
    )


def test_group_order_is_preserved_across_environments() -> None:
    groups = [
        collect(*(play(reward, environment=name) for reward in rewards))
        for name, rewards in (("a", (1, 0)), ("b", (5, 1)), ("a", (0, 3)))
    ]
    assert list_advantages(make_batch(groups, GrpoConfig())) == [0.5, -0.5, 2, -2, -1.5, 1.5]


def test_zero_variance_group_has_zero_advantages() -> None:
    batch = make_batch([make_group(*[0.1] * 10)], GrpoConfig(scale="group"))
    assert list_advantages(batch) == [0.0] * 10


def test_turn_reward_is_assigned_to_the_last_token_of_the_turn() -> None:
    batch = make_batch([collect(play(1.0, 2.0), play(0.0))], PPO)
    assert batch.rewards[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 2]
    assert batch.rewards[1].tolist() == [0, 0, 0, 0]


def test_remaining_learned_reward_is_assigned_to_the_last_turn() -> None:
    batch = make_batch([collect(play(1.0, 2.0, reward=10.0), play(0.0))], PPO)
    assert batch.rewards[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 9]


def test_advantage_uses_the_learned_reward() -> None:
    group = collect(play(5.0, reward=0.0), play(0.0, reward=1.0))
    assert list_advantages(make_batch([group], GrpoConfig())) == [-0.5, 0.5]


def test_unscored_episode_is_excluded_from_the_batch() -> None:
    unscored_episode = replace(play(9.0), reward=None)
    for algorithm in (GrpoConfig(), GrpoConfig(credit="turn"), ReinforceConfig(baseline="mean")):
        mixed_batch = make_batch([collect(play(1.0), unscored_episode, play(0.0))], algorithm)
        scored_batch = make_batch([collect(play(1.0), play(0.0))], algorithm)
        assert mixed_batch.num_samples == 2
        assert list_token_advantages(mixed_batch) == list_token_advantages(scored_batch)


def test_turn_credit_uses_rewards_of_current_and_later_turns() -> None:
    group = collect(play(1.0, 2.0), play(0.0, 0.0), play(3.0))
    batch = make_batch([group], GrpoConfig(credit="turn"))
    # Returns: 3 2, 0 0, 3. Means: 2 and 1.
    assert list_token_advantages(batch) == [[1, 1, 1, 1], [-2, -2, -1, -1], [1, 1]]
    discounted_batch = make_batch([group], GrpoConfig(credit="turn", gamma=0.5))
    # Returns: 2 2, 0 0, 3. Means: 5/3 and 1.
    assert np.concatenate(list_token_advantages(discounted_batch)) == pytest.approx(
        np.repeat([1 / 3, 1, -5 / 3, -1, 4 / 3], 2)
    )


def test_turns_may_be_separate_sequences() -> None:
    rewards = ((1.0, 2.0), (0.0, 0.0))
    for algorithm in (GrpoConfig(credit="turn", gamma=0.5), REINFORCE, ReinforceConfig(gamma=0.9)):
        joined_batch = make_batch([collect(*(play(*pair) for pair in rewards))], algorithm)
        split_batch = make_batch(
            [collect(*(play(*pair, is_split=True) for pair in rewards))], algorithm
        )
        assert (joined_batch.num_samples, split_batch.num_samples) == (2, 4)
        assert np.concatenate(list_token_advantages(split_batch)) == pytest.approx(
            np.concatenate(list_token_advantages(joined_batch))
        )


def test_sequence_receives_discounted_return_of_the_next_sequence() -> None:
    group = collect(play(1.0, 2.0, 4.0, is_split=True), play(0.0))
    rewards = [row.tolist() for row in make_batch([group], PpoConfig(gamma=0.5)).rewards]
    # The first token of the third sequence has return 2, so the second gets 2 + 0.5 * 2.
    assert rewards[2] == [0, 0, 0, 4]
    assert rewards[1] == [0, 0, 0, 2 + 0.5 * 2]
    assert rewards[0] == [0, 0, 0, 1 + 0.5 * 1.5]


@pytest.mark.parametrize(
    ("algorithm", "terminated"), [(PPO, [False, False, True]), (REINFORCE, [True, False, True])]
)
def test_all_sequences_of_a_truncated_episode_continue_if_there_is_a_critic(
    algorithm: AlgorithmConfig, terminated: list[bool]
) -> None:
    truncated_episode = play(1.0, 0.0, is_split=True, status=RolloutStatus.TRUNCATED)
    invalid_episode = play(1.0, status=RolloutStatus.INVALID_ACTION)
    batch = make_batch([collect(truncated_episode, invalid_episode)], algorithm)
    assert batch.terminated.tolist() == terminated


@pytest.mark.parametrize("is_split", [False, True])
def test_truncated_episode_without_surprise_has_no_advantages(is_split: bool) -> None:
    episode = play(0.0, 0.0, is_split=is_split, status=RolloutStatus.TRUNCATED)
    batch = make_batch([collect(episode, play(0.0))], PpoConfig(gamma=1.0))
    truncated_samples = np.flatnonzero(~batch.terminated).tolist()
    assert len(truncated_samples) == 1 + is_split
    for sample in truncated_samples:
        rewards, mask = batch.rewards[sample], batch.loss_masks[batch.sequence_of_sample[sample]]
        values, mask_row = torch.full((1, len(mask)), 10.0), torch.tensor(mask)[None]
        terminated, last_values = torch.tensor([False]), torch.tensor([10.0])
        row = torch.tensor(rewards)[None]
        advantages = gae(row, values, mask_row, terminated, last_values, 1.0, 0.95)
        assert advantages[mask_row].tolist() == [0.0] * int(mask_row.sum())


def test_token_returns_are_discounted_and_whitened_over_the_batch() -> None:
    algorithm = ReinforceConfig(gamma=0.5)
    batch = make_batch([collect(play(4.0), play(0.0)), collect(play(8.0))], algorithm)
    returns = [2, 4, 0, 0, 4, 8]
    mean, std = statistics.mean(returns), statistics.stdev(returns)
    expected_advantages = [(token_return - mean) / std for token_return in returns]
    assert np.concatenate(list_token_advantages(batch)) == pytest.approx(expected_advantages)


def test_group_mean_is_subtracted_before_whitening() -> None:
    algorithm = ReinforceConfig(baseline="mean")
    groups = [collect(play(1.0), play(0.0)), collect(play(10.0), play(12.0))]
    advantages = np.array(list_advantages(make_batch(groups, algorithm)))
    expected_advantages = np.array([0.5, -0.5, -1.0, 1.0])
    assert advantages / advantages.max() == pytest.approx(expected_advantages)


def test_returns_are_not_whitened_with_a_kl_penalty() -> None:
    algorithm = ReinforceConfig(kl_placement="reward", kl_coef=0.1, kl_estimator="k1")
    assert list_advantages(make_batch([collect(play(4.0), play(0.0))], algorithm)) == [4, 0]


def test_ppo_batch_has_rewards_without_advantages() -> None:
    batch = make_batch([collect(play(4.0), play(0.0))], PPO)
    assert list_advantages(batch) == [0, 0]
    assert [row.sum() for row in batch.rewards] == [4, 0]


def test_only_sampled_tokens_are_in_the_loss() -> None:
    for algorithm in (GrpoConfig(), REINFORCE, PPO):
        batch = make_batch([collect(play(1.0, 1.0), play(0.0))], algorithm)
        assert batch.loss_masks[0].tolist() == [False, False, True, True] * 2
        assert batch.loss_masks[1].tolist() == [False, False, True, True]


@pytest.mark.parametrize("span", [(0, 2), (2, 2), (2, 5), (3, 2)])
def test_invalid_turn_is_refused(span: tuple[int, int]) -> None:
    rollout = replace(play(1.0), sequences=(make_sequence(4, TurnSpan(*span, 1.0)),))
    with pytest.raises(ValueError, match=rf"turn {span[0]}\.\.{span[1]} must start .*join_turns"):
        make_batch([collect(rollout, play(0.0))], GrpoConfig())


def test_overlapping_turns_are_refused() -> None:
    sequence = make_sequence(4, TurnSpan(1, 3, 1.0), TurnSpan(2, 4, 1.0))
    with pytest.raises(ValueError, match=r"turn 2\.\.4 must start at 3 or later"):
        make_batch([collect(replace(play(1.0), sequences=(sequence,)))], GrpoConfig())


def test_episode_without_a_turn_has_no_sample() -> None:
    silent_episode = replace(play(0.0), sequences=(make_sequence(2),))
    batch = make_batch([collect(play(1.0), silent_episode)], GrpoConfig())
    assert (batch.num_samples, list_advantages(batch)) == (1, [0.5])


def test_shuffling_permutes_rewards_only_within_an_environment() -> None:
    groups = [
        collect(*(play(reward, environment=name) for reward in rewards))
        for name, rewards in (("a", (1, 2, 3)), ("b", (10, 20, 30)))
    ]
    for seed in range(5):
        shuffled_groups = shuffle_rewards(groups, random.Random(seed))
        assert [sorted(group.rewards) for group in shuffled_groups] == [[1, 2, 3], [10, 20, 30]]


@pytest.mark.parametrize("algorithm", [GrpoConfig(), GrpoConfig(credit="turn"), REINFORCE, PPO])
def test_shuffling_removes_the_reward_signal_of_individual_turns(
    algorithm: GrpoConfig | ReinforceConfig | PpoConfig,
) -> None:
    """Only the first turn has a reward, which is 1 in even episodes and -1 in odd episodes."""
    groups = [collect(play(1.0, 0.0), play(-1.0, 0.0), index=index) for index in range(200)]
    signs = np.tile([1.0, -1.0], 200)

    def compute_first_turn_signal(groups: list[RolloutGroup]) -> float:
        batch = make_batch(groups, algorithm)
        rows = batch.rewards if algorithm.kind == "ppo" else batch.advantages
        first_turns = np.array([row[:4].sum() for row in rows])
        return float(np.abs(np.mean(first_turns * signs)))

    assert compute_first_turn_signal(groups) > 0.5
    assert compute_first_turn_signal(shuffle_rewards(groups, random.Random(1))) < 0.2


@pytest.mark.slow
def test_shuffled_advantages_have_mean_zero() -> None:
    groups = [make_group(1, 1, 0, -1, index=index) for index in range(100)]
    sums_of_means = np.zeros(4)
    for seed in range(50):
        shuffled_groups = shuffle_rewards(groups, random.Random(seed))
        advantages = list_advantages(make_batch(shuffled_groups, GrpoConfig()))
        sums_of_means += np.array(advantages).reshape(-1, 4).mean(0)
    standard_error = 0.83 / math.sqrt(50 * 100)
    assert np.abs(sums_of_means / 50).max() < 4 * standard_error


def test_sequences_say_whether_the_return_of_the_next_one_is_added() -> None:
    groups = [collect(play(1.0, 1.0, is_split=True), play(0.0))]
    for algorithm in (GrpoConfig(), REINFORCE, PPO):
        assert make_batch(groups, algorithm).adds_next_return.tolist() == [True, False, False]
