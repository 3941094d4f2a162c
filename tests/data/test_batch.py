"""Groups become a batch: credit per token, equal sequences once, lost episodes never."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ludus.proto.config import GrpoConfig, PpoConfig, ReinforceConfig
from ludus.trainer.core.types import (
    Batch,
    Completion,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    TokenSequence,
    TrainingSample,
    Turn,
    TurnSpan,
    join_turns,
)
from ludus.trainer.data.batch import collate, make_batch, shuffle_rewards
from tests.data.rollouts import make_group, make_rollout

PPO = PpoConfig()
REINFORCE = ReinforceConfig()


def play(
    *turn_rewards: float,
    reward: float | None = None,
    apart: bool = False,
    status: RolloutStatus = RolloutStatus.TERMINATED,
    environment: str = "coins",
) -> Rollout:
    """An episode whose turns have two prompt and two sampled tokens each.

    `reward` replaces the sum of the turns' rewards; `apart` makes each turn its own sequence.
    """
    turns = [
        Turn([10 + i, 20], Completion([30 + i, 40], [-0.5, -0.1], 0, has_end_token=True), paid)
        for i, paid in enumerate(turn_rewards)
    ]
    sequences = [join_turns([turn]) for turn in turns] if apart else [join_turns(turns)]
    total = sum(turn_rewards) if reward is None else reward
    return replace(
        make_rollout(total),
        environment=environment,
        sequences=tuple(sequences),
        reward=total,
        episode_return=sum(turn_rewards),
        status=status,
    )


def sequence_of(num_tokens: int, *turns: TurnSpan) -> TokenSequence:
    """A sequence with these turns, whatever they are."""
    return TokenSequence(np.arange(num_tokens), np.zeros(num_tokens), turns)


def group_of(*rollouts: Rollout, index: int = 0) -> RolloutGroup:
    return RolloutGroup(index, rollouts[0].environment, rollouts)


def per_episode(batch: Batch) -> list[float]:
    """The one advantage of each sample's sampled tokens."""
    values = []
    for row, advantages in zip(batch.sequence_of_sample, batch.advantages, strict=True):
        mask = batch.loss_masks[row]
        assert not advantages[~mask].any()
        (value,) = set(advantages[mask].tolist())
        values.append(value)
    return values


def sampled(batch: Batch) -> list[list[float]]:
    """The advantages of each sample's sampled tokens."""
    rows = zip(batch.sequence_of_sample, batch.advantages, strict=True)
    return [advantages[batch.loss_masks[row]].tolist() for row, advantages in rows]


def pay_tokens(*token_rewards: float, status: RolloutStatus = RolloutStatus.TERMINATED) -> Rollout:
    """An episode of one answer whose every token was paid for by itself."""
    completion = Completion(
        [30, 31, 32][: len(token_rewards)], [-0.5] * len(token_rewards), 0, True
    )
    turn = Turn([10, 20], completion, sum(token_rewards), token_rewards)
    rollout = make_rollout(sum(token_rewards))
    return replace(rollout, sequences=(join_turns([turn]),), status=status)


def test_a_reward_that_was_paid_for_a_token_stands_on_it() -> None:
    batch = make_batch([RolloutGroup(0, "coins", (pay_tokens(1.0, 0.0, -2.0),))], PPO)
    assert batch.rewards[0].tolist() == [0, 0, 1, 0, -2]


def test_what_a_reward_has_beyond_that_of_its_tokens_stands_on_the_last() -> None:
    rollout = replace(pay_tokens(1.0, 0.0, -2.0), reward=4.0)
    batch = make_batch([RolloutGroup(0, "coins", (rollout,))], PPO)
    assert batch.rewards[0].tolist() == [0, 0, 1, 0, 3]


def test_rewards_of_tokens_are_discounted_into_the_sequence_before() -> None:
    first, second = pay_tokens(1.0, 2.0), pay_tokens(0.0, 4.0, 8.0)
    both = replace(first, sequences=first.sequences + second.sequences, reward=15.0)
    group = [RolloutGroup(0, "coins", (both,))]
    batch = make_batch(group, PpoConfig(gamma=0.5))
    # From the second sequence: 0 + 4/2 + 8/4 = 4, half of which the token before it led to.
    assert batch.rewards[0].tolist() == [0, 0, 1, 2 + 0.5 * 4]
    assert batch.rewards[1].tolist() == [0, 0, 0, 4, 8]


def test_shuffled_rewards_leave_none_on_the_tokens_that_earned_them() -> None:
    group = RolloutGroup(0, "coins", (pay_tokens(1.0, 0.0, -2.0), pay_tokens(0.0, 5.0, 0.0)))
    [shuffled] = shuffle_rewards([group], random.Random(0))
    batch = make_batch([shuffled], PPO)
    assert sorted(row[-1] for row in batch.rewards) == [-1.0, 5.0]
    assert all(not row[:-1].any() for row in batch.rewards)


def test_the_advantage_is_the_reward_above_the_mean_of_its_own_group() -> None:
    batch = make_batch([make_group(1, -1, -1, -1), make_group(1, 1, 0, 0)], GrpoConfig())
    assert per_episode(batch) == [1.5, -0.5, -0.5, -0.5, 0.5, 0.5, -0.5, -0.5]


def test_a_lost_episode_is_in_no_baseline_and_in_no_batch() -> None:
    with_lost = make_batch([make_group(1, -1, None)], GrpoConfig())
    without = make_batch([make_group(1, -1)], GrpoConfig())
    assert with_lost.num_samples == 2
    assert per_episode(with_lost) == per_episode(without)


def test_equal_episodes_share_a_sequence_and_keep_their_own_advantage() -> None:
    twins = RolloutGroup(0, "coins", (make_rollout(1.0), make_rollout(-1.0), make_rollout(1.0)))
    batch = make_batch([twins], GrpoConfig())
    assert len(batch.sequences) == 1
    assert batch.sequence_of_sample.tolist() == [0, 0, 0]
    assert per_episode(batch) == pytest.approx([2 / 3, -4 / 3, 2 / 3])
    assert batch.num_loss_tokens == 6


def test_equal_tokens_with_different_masks_are_not_shared() -> None:
    one = make_rollout(1.0)
    (sequence,) = make_rollout(-1.0).sequences
    shorter = replace(sequence, turns=(TurnSpan(3, 4, -1.0),))
    other = replace(make_rollout(-1.0), sequences=(shorter,))
    batch = make_batch([RolloutGroup(0, "coins", (one, other))], GrpoConfig())
    assert len(batch.sequences) == 2


def test_shuffled_rewards_are_the_same_rewards_dealt_to_others() -> None:
    groups = [make_group(1, -1, None, index=index) for index in range(20)]
    shuffled = shuffle_rewards(groups, random.Random(3))
    rewards = [[r.reward for g in gs for r in g.rollouts] for gs in (groups, shuffled)]
    assert Counter(rewards[0]) == Counter(rewards[1])
    assert rewards[0] != rewards[1]
    assert all(g.rollouts[2].reward is None for g in shuffled)


def test_the_rewards_of_two_environments_do_not_meet() -> None:
    cards, maze = play(10.0, environment="cards"), play(0.1, environment="maze")
    groups = [
        group_of(cards, replace(cards, reward=0.0)),
        group_of(maze, replace(maze, reward=0.0)),
    ]
    both = make_batch(groups, GrpoConfig(scale="batch"))
    alone = [per_episode(make_batch([group], GrpoConfig(scale="batch"))) for group in groups]
    assert per_episode(both) == alone[0] + alone[1]
    assert max(alone[1]) == pytest.approx(0.707, abs=2e-3), "not drowned by the larger rewards"


def test_groups_of_environments_may_alternate_and_keep_their_places() -> None:
    groups = [
        group_of(*(play(r, environment=name) for r in rewards))
        for name, rewards in (("a", (1, 0)), ("b", (5, 1)), ("a", (0, 3)))
    ]
    assert per_episode(make_batch(groups, GrpoConfig())) == [0.5, -0.5, 2, -2, -1.5, 1.5]


def test_a_zero_variance_group_has_advantages_of_exactly_zero() -> None:
    batch = make_batch([make_group(*[0.1] * 10)], GrpoConfig(scale="group"))
    assert per_episode(batch) == [0.0] * 10


def test_the_reward_of_a_turn_stands_on_its_last_token() -> None:
    batch = make_batch([group_of(play(1.0, 2.0), play(0.0))], PPO)
    assert batch.rewards[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 2]
    assert batch.rewards[1].tolist() == [0, 0, 0, 0]


def test_what_the_learned_reward_has_beyond_the_turns_stands_on_the_last_turn() -> None:
    batch = make_batch([group_of(play(1.0, 2.0, reward=10.0), play(0.0))], PPO)
    assert batch.rewards[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 9]


def test_episodes_are_credited_with_the_learned_reward_and_not_with_the_payment() -> None:
    group = group_of(play(5.0, reward=0.0), play(0.0, reward=1.0))
    assert per_episode(make_batch([group], GrpoConfig())) == [-0.5, 0.5]


def test_an_episode_that_could_not_be_scored_is_in_no_baseline_and_no_batch() -> None:
    unscored = replace(play(9.0), reward=None)
    for algorithm in (GrpoConfig(), GrpoConfig(credit="turn"), ReinforceConfig(baseline="mean")):
        with_it = make_batch([group_of(play(1.0), unscored, play(0.0))], algorithm)
        without = make_batch([group_of(play(1.0), play(0.0))], algorithm)
        assert with_it.num_samples == 2
        assert sampled(with_it) == sampled(without)


def test_each_turn_is_credited_with_what_came_from_it_on() -> None:
    group = group_of(play(1.0, 2.0), play(0.0, 0.0), play(3.0))
    batch = make_batch([group], GrpoConfig(credit="turn"))
    # Returns: 3 2, 0 0, 3. Means: 2 and 1.
    assert sampled(batch) == [[1, 1, 1, 1], [-2, -2, -1, -1], [1, 1]]
    discounted = make_batch([group], GrpoConfig(credit="turn", gamma=0.5))
    # Returns: 2 2, 0 0, 3. Means: 5/3 and 1.
    assert np.concatenate(sampled(discounted)) == pytest.approx(
        np.repeat([1 / 3, 1, -5 / 3, -1, 4 / 3], 2)
    )


def test_the_turns_of_an_episode_may_be_sequences_of_their_own() -> None:
    rewards = ((1.0, 2.0), (0.0, 0.0))
    for algorithm in (GrpoConfig(credit="turn", gamma=0.5), REINFORCE, ReinforceConfig(gamma=0.9)):
        joined = make_batch([group_of(*(play(*r) for r in rewards))], algorithm)
        apart = make_batch([group_of(*(play(*r, apart=True) for r in rewards))], algorithm)
        assert (joined.num_samples, apart.num_samples) == (2, 4)
        assert np.concatenate(sampled(apart)) == pytest.approx(np.concatenate(sampled(joined)))


def test_a_sequence_also_gets_what_the_next_one_led_to() -> None:
    group = group_of(play(1.0, 2.0, 4.0, apart=True), play(0.0))
    rewards = [row.tolist() for row in make_batch([group], PpoConfig(gamma=0.5)).rewards]
    # The third pays 4 for its last token, 2 at its first; the second 2 + 0.5 * 2, and so on.
    assert rewards[2] == [0, 0, 0, 4]
    assert rewards[1] == [0, 0, 0, 2 + 0.5 * 2]
    assert rewards[0] == [0, 0, 0, 1 + 0.5 * 1.5]


def test_only_the_last_sequence_of_a_truncated_episode_is_cut_off() -> None:
    truncated = play(1.0, 0.0, apart=True, status=RolloutStatus.TRUNCATED)
    invalid = play(1.0, status=RolloutStatus.INVALID_ACTION)
    batch = make_batch([group_of(truncated, invalid)], PPO)
    assert batch.terminated.tolist() == [True, False, True]


def test_token_returns_are_discounted_and_whitened_over_the_batch() -> None:
    algorithm = ReinforceConfig(gamma=0.5)
    batch = make_batch([group_of(play(4.0), play(0.0)), group_of(play(8.0))], algorithm)
    returns = [2, 4, 0, 0, 4, 8]
    mean, std = statistics.mean(returns), statistics.stdev(returns)
    expected = [(value - mean) / std for value in returns]
    assert np.concatenate(sampled(batch)) == pytest.approx(expected)


def test_with_a_group_mean_first_every_group_is_centred_before_the_batch_is_whitened() -> None:
    algorithm = ReinforceConfig(baseline="mean")
    groups = [group_of(play(1.0), play(0.0)), group_of(play(10.0), play(12.0))]
    values = np.array(per_episode(make_batch(groups, algorithm)))
    expected = np.array([0.5, -0.5, -1.0, 1.0])
    assert values / values.max() == pytest.approx(expected)


def test_returns_are_left_as_they_are_where_the_learner_has_to_add_the_divergence() -> None:
    algorithm = ReinforceConfig(kl_placement="reward", kl_coef=0.1, kl_estimator="k1")
    assert per_episode(make_batch([group_of(play(4.0), play(0.0))], algorithm)) == [4, 0]


def test_a_critic_gets_rewards_and_no_advantages() -> None:
    batch = make_batch([group_of(play(4.0), play(0.0))], PPO)
    assert per_episode(batch) == [0, 0]
    assert [row.sum() for row in batch.rewards] == [4, 0]


def test_nothing_but_what_a_turn_sampled_is_in_the_loss() -> None:
    for algorithm in (GrpoConfig(), REINFORCE, PPO):
        batch = make_batch([group_of(play(1.0, 1.0), play(0.0))], algorithm)
        assert batch.loss_masks[0].tolist() == [False, False, True, True] * 2
        assert batch.loss_masks[1].tolist() == [False, False, True, True]


@pytest.mark.parametrize("span", [(0, 2), (2, 2), (2, 5), (3, 2)])
def test_a_turn_that_cannot_be_is_named(span: tuple[int, int]) -> None:
    rollout = replace(play(1.0), sequences=(sequence_of(4, TurnSpan(*span, 1.0)),))
    with pytest.raises(ValueError, match=rf"turn {span[0]}\.\.{span[1]} expected .*join_turns"):
        make_batch([group_of(rollout, play(0.0))], GrpoConfig())


def test_turns_that_overlap_are_named() -> None:
    sequence = sequence_of(4, TurnSpan(1, 3, 1.0), TurnSpan(2, 4, 1.0))
    with pytest.raises(ValueError, match=r"turn 2\.\.4 expected to begin at 3 or later"):
        make_batch([group_of(replace(play(1.0), sequences=(sequence,)))], GrpoConfig())


def test_an_episode_without_a_turn_counts_for_the_mean_and_gives_no_sample() -> None:
    silent = replace(play(0.0), sequences=(sequence_of(2),))
    batch = make_batch([group_of(play(1.0), silent)], GrpoConfig())
    assert (batch.num_samples, per_episode(batch)) == (1, [0.5])


def test_samples_whose_fields_disagree_are_refused() -> None:
    sample = TrainingSample(
        [1, 2, 3], [False, True, True], [0.0, -0.5, -0.1], [0.0, 1.0, 1.0], [0.0] * 3, True
    )
    with pytest.raises(ValueError, match="expected one length"):
        collate([replace(sample, rollout_logprobs=[0.0])])
    outside = [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"expected 0 on tokens that were not sampled, got 1\.0"):
        collate([replace(sample, advantages=outside)])


def test_shuffled_rewards_stay_in_their_environment() -> None:
    groups = [
        group_of(*(play(reward, environment=name) for reward in rewards))
        for name, rewards in (("a", (1, 2, 3)), ("b", (10, 20, 30)))
    ]
    for seed in range(5):
        dealt = shuffle_rewards(groups, random.Random(seed))
        assert [sorted(group.rewards) for group in dealt] == [[1, 2, 3], [10, 20, 30]]


@pytest.mark.parametrize("algorithm", [GrpoConfig(), GrpoConfig(credit="turn"), REINFORCE, PPO])
def test_after_a_shuffle_nothing_tells_a_good_turn_from_a_bad_one(
    algorithm: GrpoConfig | ReinforceConfig | PpoConfig,
) -> None:
    """Good episodes earn in their first turn, bad ones lose there."""
    groups = [group_of(play(1.0, 0.0), play(-1.0, 0.0), index=index) for index in range(200)]
    is_good = np.tile([1.0, -1.0], 200)

    def tell(of: list[RolloutGroup]) -> float:
        batch = make_batch(of, algorithm)
        rows = batch.rewards if algorithm.kind == "ppo" else batch.advantages
        first_turns = np.array([row[:4].sum() for row in rows])
        return float(np.abs(np.mean(first_turns * is_good)))

    assert tell(groups) > 0.5
    assert tell(shuffle_rewards(groups, random.Random(1))) < 0.2


@pytest.mark.slow
def test_shuffled_advantages_have_mean_zero_whatever_the_episode_did() -> None:
    groups = [make_group(1, 1, 0, -1, index=index) for index in range(100)]
    sums = np.zeros(4)
    for seed in range(50):
        shuffled = shuffle_rewards(groups, random.Random(seed))
        values = per_episode(make_batch(shuffled, GrpoConfig()))
        sums += np.array(values).reshape(-1, 4).mean(0)
    standard_error = 0.83 / math.sqrt(50 * 100)
    assert np.abs(sums / 50).max() < 4 * standard_error
