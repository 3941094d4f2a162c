"""Tests of evaluation: confidence intervals, summaries and episodes of fixed policies."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import reduce
from operator import add

import pytest

from ludus.env.evaluation import (
    EpisodeOutcome,
    compute_mean_interval,
    measure_gap_closed,
    play_policy,
    summarize,
    wilson_interval,
)
from ludus.env.types import JsonObject, StepResult
from ludus.proto.errors import (
    ConfigError,
    IllegalActionError,
    SessionLostError,
)


def make_outcomes(*returns: float | None, first_seed: int = 0) -> list[EpisodeOutcome]:
    """Return outcomes in which a positive return is a success and None means void."""
    return [
        EpisodeOutcome(seed, value, num_steps=1, success=None if value is None else value > 0)
        for seed, value in enumerate(returns, start=first_seed)
    ]


def make_outcomes_without_success(*returns: float) -> list[EpisodeOutcome]:
    """Return outcomes of an environment that does not report success."""
    return [EpisodeOutcome(seed, value, num_steps=1) for seed, value in enumerate(returns)]


@pytest.mark.parametrize(
    ("num_successes", "num_trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_matches_newcombe_1998_table_1(
    num_successes: int, num_trials: int, low: float, high: float
) -> None:
    assert wilson_interval(num_successes, num_trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_stays_within_zero_and_one() -> None:
    assert 0.9999 < wilson_interval(10, 10)[1] <= 1.0
    assert 0.0 <= wilson_interval(0, 10)[0] < 0.0001
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_mean_interval_matches_known_values() -> None:
    # The mean is 3 and the sample variance 2.5. The bounds are 3 -+ t * sqrt(2.5 / 5), with the
    # quantile t = 2.776445 of 4 degrees of freedom.
    low, high = compute_mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (low, high) == pytest.approx((1.036757, 4.963243), abs=1e-3)
    assert compute_mean_interval([0.25]) == (0.25, 0.25)
    with pytest.raises(ValueError, match="at least one value"):
        compute_mean_interval([])


def test_summary_counts_outcomes_and_excludes_void_episodes() -> None:
    result = summarize(
        [
            *make_outcomes(1.0, 1.0, 0.0, -1.0, None),
            EpisodeOutcome(seed=9, episode_return=-1.0, num_steps=1, invalid=True),
            EpisodeOutcome(seed=10, episode_return=None, num_steps=1, invalid=True),
        ]
    )
    assert result.num_games == 5
    assert result.win_rate == pytest.approx(0.4)
    assert result.draw_rate == pytest.approx(0.2)
    assert result.expected_return == pytest.approx(0.0)
    assert result.invalid_rate == pytest.approx(0.2)
    assert result.win_rate_ci95 == wilson_interval(2, 5)


def test_result_without_success_has_no_win_rate() -> None:
    result = summarize(make_outcomes_without_success(200.0, 17.0, 9.0))  # for example CartPole
    assert (result.win_rate, result.win_rate_ci95, result.draw_rate) == (None, None, None)
    assert result.expected_return == pytest.approx(226 / 3)


def test_success_does_not_depend_on_the_reward() -> None:
    episodes = [
        EpisodeOutcome(0, -13.0, 13, success=True),
        EpisodeOutcome(1, 5.0, 20, success=False),
        EpisodeOutcome(2, None, 3, failure="the server died"),
    ]
    result = summarize(episodes)
    assert (result.win_rate, result.draw_rate, result.num_games) == (0.5, 0.0, 2)


def test_rounding_errors_are_not_a_win() -> None:
    rounding_error = reduce(add, [-0.1] * 9 + [0.9])  # sum() would correct the rounding
    assert rounding_error > 0
    outcomes = [*make_outcomes_without_success(rounding_error), *make_outcomes(1.0)]
    assert summarize(outcomes).win_rate == 0.5
    failures = [
        EpisodeOutcome(0, value, 10, success=False) for value in (rounding_error, -rounding_error)
    ]
    assert summarize(failures).draw_rate == 1.0


def test_a_truncated_episode_is_not_a_success() -> None:
    truncated_outcome = EpisodeOutcome(seed=1, episode_return=0.5, num_steps=6)
    result = summarize([*make_outcomes(1.0), truncated_outcome])
    assert (result.win_rate, result.win_rate_ci95) == (0.5, wilson_interval(1, 2))


def test_summary_of_void_episodes_only_is_refused() -> None:
    void_outcomes = [EpisodeOutcome(seed, None, 1, failure="KeyError: 'ace'") for seed in range(2)]
    with pytest.raises(
        ValueError, match="all 2 episodes are void; most common reason: KeyError: 'ace'"
    ):
        summarize(void_outcomes)


def test_void_episodes_are_counted_separately() -> None:
    result = summarize(make_outcomes(1.0, None, -1.0))
    assert (result.num_games, result.num_void, result.win_rate) == (2, 1, 0.5)


def test_gap_closed_is_0_for_random_and_1_for_optimal_policy() -> None:
    rng = random.Random(7)
    random_outcomes = make_outcomes(*(rng.choice([-1.0, -1.0, 1.0]) for _ in range(999)))
    optimal_outcomes = make_outcomes(*(rng.choice([-1.0, 0.0, 1.0, 1.0]) for _ in range(999)))
    random_result = measure_gap_closed(random_outcomes, random_outcomes, optimal_outcomes)
    assert random_result == (0.0, (0.0, 0.0))
    optimal_result = measure_gap_closed(optimal_outcomes, random_outcomes, optimal_outcomes)
    assert optimal_result == (1.0, (1.0, 1.0))


def test_gap_closed_pairs_episodes_by_seed_and_excludes_void_episodes() -> None:
    policy_outcomes = make_outcomes(0.0, 1.0, None, 1.0)
    random_outcomes = make_outcomes(-1.0, -1.0, -1.0, 1.0, 5.0)
    optimal_outcomes = list(reversed(make_outcomes(1.0, 1.0, 1.0, 1.0)))
    result = measure_gap_closed(policy_outcomes, random_outcomes, optimal_outcomes)
    assert result is not None
    # Seeds 0, 1 and 3 have valid episodes of all three policies. The mean differences to the
    # random policy are (1 + 2 + 0) / 3 for the policy and (2 + 2 + 0) / 3 for the optimal policy.
    assert result[0] == pytest.approx(0.75)
    # The residuals (-0.5, 0.5, 0) have standard deviation 0.5. The half-width of the interval is
    # 4.302653 * 0.5 / (sqrt(3) * 4 / 3), with the quantile of 2 degrees of freedom.
    assert result[1] == pytest.approx((0.75 - 0.931545, 0.75 + 0.931545), abs=1e-5)


@pytest.mark.slow
def test_gap_interval_has_95_percent_coverage() -> None:
    rng = random.Random(0)
    num_repeats, num_covered = 400, 0
    for _ in range(num_repeats):
        deals = [rng.gauss(0, 1) for _ in range(200)]
        random_outcomes = make_outcomes(*(deal - 1 + rng.gauss(0, 0.5) for deal in deals))
        optimal_outcomes = make_outcomes(*(deal + 1 + rng.gauss(0, 0.5) for deal in deals))
        policy_outcomes = make_outcomes(*(deal + 0.5 + rng.gauss(0, 0.5) for deal in deals))
        result = measure_gap_closed(policy_outcomes, random_outcomes, optimal_outcomes)
        assert result is not None
        num_covered += result[1][0] <= 0.75 <= result[1][1]
    assert 0.92 <= num_covered / num_repeats <= 0.98


def test_gap_closed_is_none_if_optimal_is_not_above_random() -> None:
    assert (
        measure_gap_closed(
            make_outcomes(1.0, 1.0), make_outcomes(0.0, 0.0), make_outcomes(0.0, 0.0)
        )
        is None
    )


def test_gap_closed_without_common_seeds_is_refused() -> None:
    with pytest.raises(ValueError, match="play all three on the same seeds"):
        measure_gap_closed(make_outcomes(1.0), make_outcomes(0.0), make_outcomes(1.0, first_seed=5))


class CoinSession:
    """A session with two coin tosses, in which each correct guess has reward 1."""

    def __init__(self, client: CoinClient, seed: int) -> None:
        self._client, self._seed = client, seed
        self._tosses = [random.Random(seed * 2 + toss).random() < 0.5 for toss in range(2)]
        self._num_steps = self._num_correct = 0

    async def step(self, action: JsonObject) -> StepResult:
        self._client.num_steps += 1
        await asyncio.sleep(0.001 if self._seed % 2 else 0)
        if self._seed in self._client.lost_seeds:
            raise SessionLostError("the server died")
        if action["heads"] is None:
            raise IllegalActionError("expected heads to be true or false, got null")
        reward = float(action["heads"] == self._tosses[self._num_steps])
        self._num_steps += 1
        self._num_correct += int(reward)
        is_last_step = self._num_steps == 2
        self._client.num_sessions -= is_last_step
        success = self._num_correct == 2 if is_last_step else None
        return StepResult(
            {"toss": self._num_steps}, reward=reward, terminated=is_last_step, success=success
        )

    async def close(self) -> None:
        self._client.num_sessions -= 1


class CoinClient:
    def __init__(self, lost_seeds: tuple[int, ...] = (), max_sessions: int = 1000) -> None:
        self.lost_seeds = lost_seeds
        self.max_sessions = max_sessions
        self.num_steps = 0
        self.num_sessions = 0
        self.max_concurrent_sessions = 0

    async def open(
        self, *, seed: int | None = None, close_when_done: bool = False, wait_s: float = 0.0
    ) -> tuple[CoinSession, StepResult]:
        assert seed is not None
        assert close_when_done
        assert wait_s > 0
        await asyncio.sleep(0)
        while self.num_sessions == self.max_sessions:
            await asyncio.sleep(0)
        self.num_sessions += 1
        self.max_concurrent_sessions = max(self.max_concurrent_sessions, self.num_sessions)
        return CoinSession(self, seed), StepResult({"toss": 0})


def guess(observation: JsonObject, rng: random.Random) -> JsonObject:
    return {"heads": rng.random() < 0.5}


def play(client: CoinClient, seeds: range, **options: int) -> list[EpisodeOutcome]:
    return asyncio.run(play_policy(client, guess, seeds, **options))


def test_outcomes_do_not_depend_on_concurrency() -> None:
    concurrent_client, sequential_client = CoinClient(), CoinClient()
    seeds = range(20, 0, -1)
    assert play(concurrent_client, seeds) == play(sequential_client, seeds, num_concurrent=1)
    assert [outcome.seed for outcome in play(CoinClient(), seeds)] == list(seeds)
    assert concurrent_client.max_concurrent_sessions == 20
    assert sequential_client.max_concurrent_sessions == 1


def test_policies_and_environments_use_different_random_streams() -> None:
    # If policies used the same stream as the coins, they would guess correctly too often.
    returns = [outcome.episode_return or 0.0 for outcome in play(CoinClient(), range(500))]
    assert 0.9 < sum(returns) / len(returns) < 1.1


def test_lost_session_voids_only_one_episode() -> None:
    client = CoinClient(lost_seeds=(3,))
    results = play(client, range(6))
    assert [outcome.seed for outcome in results if outcome.episode_return is None] == [3]
    assert all(outcome.num_steps == 2 for outcome in results if outcome.seed != 3)
    assert client.num_sessions == 0


def test_failed_episode_is_void_and_the_session_is_closed() -> None:
    client = CoinClient()

    def fail_sometimes(observation: JsonObject, rng: random.Random) -> JsonObject:
        return {"heads": None if rng.random() < 0.5 else 1 / (rng.random() < 0.5)}

    results = asyncio.run(play_policy(client, fail_sometimes, range(40), num_concurrent=4))
    reasons = Counter(outcome.failure.partition(":")[0] for outcome in results)
    assert reasons.keys() == {"", "IllegalActionError", "ZeroDivisionError"}
    assert reasons[""] == sum(outcome.episode_return is not None for outcome in results)
    assert client.num_sessions == 0


@pytest.mark.parametrize("reward", [1e308, float("inf"), float("nan")])
def test_reward_that_is_too_large_to_average_voids_the_episode(
    monkeypatch: pytest.MonkeyPatch, reward: float
) -> None:
    async def step(self: CoinSession, action: JsonObject) -> StepResult:
        return StepResult({}, reward=reward if self._seed == 1 else 1.0, terminated=True)

    monkeypatch.setattr(CoinSession, "step", step)
    outcomes = play(CoinClient(), range(3))
    assert [outcome.episode_return for outcome in outcomes] == [1.0, None, 1.0]
    assert "between -1e+12 and 1e+12" in outcomes[1].failure
    assert summarize(outcomes).expected_return == 1.0


def test_config_error_of_a_policy_is_raised() -> None:
    def raise_config_error(observation: JsonObject, rng: random.Random) -> JsonObject:
        raise ConfigError("expected options.size")

    with pytest.raises(ConfigError, match=r"options\.size"):
        asyncio.run(play_policy(CoinClient(), raise_config_error, range(4)))


def test_turn_limit_preserves_earlier_rewards() -> None:
    client = CoinClient()
    full_outcomes, short_outcomes = (
        play(CoinClient(), range(50)),
        play(client, range(50), max_turns=1),
    )
    assert {outcome.num_steps for outcome in short_outcomes} == {1}
    assert client.num_steps == 50
    assert client.num_sessions == 0
    for full_outcome, short_outcome in zip(full_outcomes, short_outcomes, strict=True):
        assert short_outcome.episode_return in (0.0, 1.0)
        assert (
            0.0
            <= (full_outcome.episode_return or 0.0) - (short_outcome.episode_return or 0.0)
            <= 1.0
        )


def test_outcomes_contain_the_success_reported_by_the_environment() -> None:
    full_outcomes = play(CoinClient(lost_seeds=(3,)), range(50))
    assert {(outcome.episode_return, outcome.success) for outcome in full_outcomes} == {
        (0.0, False),
        (1.0, False),
        (2.0, True),
        (None, None),
    }
    assert {outcome.success for outcome in play(CoinClient(), range(50), max_turns=1)} == {None}


def test_episodes_wait_for_capacity_on_a_full_server() -> None:
    client = CoinClient(max_sessions=3)
    assert play(client, range(20)) == play(CoinClient(), range(20))
    assert client.max_concurrent_sessions == 3


def test_every_outcome_is_reported_once() -> None:
    episodes: list[EpisodeOutcome] = []
    results = asyncio.run(play_policy(CoinClient(), guess, range(10), on_episode=episodes.append))
    assert sorted(episodes, key=lambda outcome: outcome.seed) == results
