"""Environments get their share of the groups, and new ones when the old are mastered."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.env.evaluation import EpisodeOutcome, summarize
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.data.mixture import Mixture, MixtureState
from ludus.trainer.data.seeds import GroupSeeds
from ludus.trainer.run.checkpoint import RunState


def make_run(weights: dict[str, float], **rest: object) -> LanguageModelRun:
    """A run that mixes environments of these weights."""
    environments = {name: {"weight": weight} for name, weight in weights.items()}
    return LanguageModelRun.model_validate({"environments": environments, **rest})


def make_mixture(run: LanguageModelRun, state: MixtureState | None = None) -> Mixture:
    """The mixture of a run, at its beginning unless it stands at `state`."""
    return Mixture(run, state or MixtureState(), GroupSeeds(run.seed, 2, shared=True))


def play(mixture: Mixture, num_groups: int) -> Counter[str]:
    """How many of the next groups each environment gets."""
    return Counter(mixture.next_group().environment for _ in range(num_groups))


def won(num_wins: int, num_games: int, num_groups: int = 8) -> RolloutCounts:
    """Counts of groups with so many games won."""
    return RolloutCounts(
        num_groups=num_groups,
        num_scored=num_games,
        num_terminated=num_games,
        num_judged=num_games,
        num_wins=num_wins,
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 300))
def test_counts_follow_the_weights_at_every_moment(weights: list[int], num_groups: int) -> None:
    run = make_run({f"e{number}": weight for number, weight in enumerate(weights)})
    counts = play(make_mixture(run), num_groups)
    for name, environment in run.environments.items():
        share = environment.weight / sum(weights) * num_groups
        assert abs(counts[name] - share) < len(weights)


def test_proportions_are_exact_over_whole_rounds() -> None:
    mixture = make_mixture(make_run({"a": 3, "b": 1, "c": 2}))
    for _ in range(50):
        assert play(mixture, 6) == {"a": 3, "b": 1, "c": 2}


def test_two_runs_of_the_same_configuration_deal_the_same_groups() -> None:
    run = make_run({"a": 3, "b": 1})
    one, other = make_mixture(run), make_mixture(run)
    assert [one.next_group() for _ in range(50)] == [other.next_group() for _ in range(50)]


def test_one_environment_alone_counts_its_groups_from_zero() -> None:
    mixture = make_mixture(make_run({"a": 1}))
    assert [mixture.next_group().index for _ in range(4)] == [0, 1, 2, 3]


def test_what_an_environment_plays_does_not_depend_on_the_others_replacements() -> None:
    run = make_run({"a": 1, "b": 1})
    calm, troubled = make_mixture(run), make_mixture(run)
    of_b: dict[str, list[int]] = {"calm": [], "troubled": []}
    for _ in range(20):
        spec = calm.next_group()
        of_b["calm"] += [spec.index] * (spec.environment == "b")
        spec = troubled.next_group()
        if spec.environment == "a":
            assert troubled.replacement(spec).environment == "a"
        of_b["troubled"] += [spec.index] * (spec.environment == "b")
    assert of_b["calm"] == of_b["troubled"]


def test_no_index_is_ever_given_twice() -> None:
    mixture = make_mixture(make_run({"a": 2, "b": 1}))
    specs = [mixture.next_group() for _ in range(30)]
    specs += [mixture.replacement(spec) for spec in specs]
    earlier = MixtureState(names=["a", "b"], num_begun={"a": 3, "b": 1}, credits={"a": 0, "b": 0})
    mixture.go_back_to(earlier)
    specs += [mixture.next_group() for _ in range(30)]
    assert len({spec.index for spec in specs}) == len(specs)


def test_a_place_whose_groups_keep_teaching_nothing_goes_to_any_environment() -> None:
    mixture = make_mixture(make_run({"mastered": 1, "open": 1}))
    spec = mixture.next_group()
    played = []
    while len(played) < 20:
        played.append(spec.environment)
        spec = mixture.replacement(spec)
    assert played[:9] == ["mastered"] * 9
    assert "open" in played


def test_it_continues_exactly_where_a_checkpoint_says() -> None:
    run = make_run({"a": 3, "b": 2, "c": 1}, curriculum={"window_groups": 4})
    mixture = make_mixture(run)
    for number in range(7):
        mixture.next_group()
        mixture.observe({"a": won(number, 8, num_groups=1)})
    saved = RunState(mixture=mixture.state).model_dump_json()
    resumed = make_mixture(run, RunState.model_validate_json(saved).mixture)
    for number in range(30):
        assert resumed.next_group() == mixture.next_group()
        for one in (resumed, mixture):
            one.observe({"a": won(8, 8, num_groups=1), "b": won(number % 8, 8)})
    assert resumed.weights == mixture.weights


def test_a_run_resumed_with_another_environment_gives_no_index_again() -> None:
    mixture = make_mixture(make_run({"a": 1, "b": 1}))
    before = {mixture.next_group().index for _ in range(9)}
    more = make_mixture(make_run({"a": 1, "b": 1, "c": 1}), mixture.state)
    after = [more.next_group() for _ in range(30)]
    assert before.isdisjoint(spec.index for spec in after)
    assert Counter(spec.environment for spec in after) == {"a": 10, "b": 10, "c": 10}


CURRICULUM = {"unlock_at": 0.75, "window_groups": 16, "mastered_weight": 0.25}


def test_a_curriculum_begins_with_its_first_environment_alone() -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    assert play(mixture, 10) == {"easy": 10}


def test_the_next_environment_opens_at_the_win_rate_over_a_whole_window() -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    mixture.observe({"easy": won(64, 64)})
    assert play(mixture, 10) == {"easy": 10}, "half a window"
    mixture.observe({"easy": won(31, 64)})
    assert play(mixture, 10) == {"easy": 10}, "95 of 128 are less than 0.75"
    mixture.observe({"easy": won(64, 64)})
    assert play(mixture, 10) == {"easy": 10}, "the best half has left the window"
    mixture.observe({"easy": won(64, 64)})
    assert play(mixture, 50) == {"easy": 10, "hard": 40}, "mastered: a quarter of its weight"


def test_zero_variance_groups_count_for_the_win_rate_since_what_is_always_won_is_dead() -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    dead = RolloutCounts(num_groups=16, num_zero_variance_groups=16, num_scored=64, num_wins=64)
    mixture.observe({"easy": dead})
    assert mixture.weights == {"easy": 0.25, "hard": 1}


def test_it_says_which_environment_it_has_opened_and_how_many_are_open() -> None:
    mixture = make_mixture(make_run({"a": 1, "b": 1, "c": 1}, curriculum=CURRICULUM))
    assert (mixture.observe({"a": won(0, 64, num_groups=16)}), mixture.num_open) == (None, 1)
    assert (mixture.observe({"a": won(64, 64, num_groups=16)}), mixture.num_open) == ("b", 2)
    assert (mixture.observe({"b": won(64, 64, num_groups=16)}), mixture.num_open) == ("c", 3)
    assert mixture.observe({"c": won(64, 64, num_groups=16)}) is None
    assert make_mixture(make_run({"a": 1, "b": 1})).num_open is None


@pytest.mark.parametrize("num_scored", [0, 64])
def test_an_environment_without_wins_opens_nothing(num_scored: int) -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    mixture.observe({"easy": won(0, num_scored, num_groups=32), "hard": won(64, 64)})
    assert list(mixture.weights) == ["easy"]


def test_an_environment_that_never_says_what_succeeded_is_refused_at_once() -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    silent = RolloutCounts(num_groups=1, num_episodes=4, num_scored=4, num_terminated=4)
    with pytest.raises(ConfigError) as refused:
        mixture.observe({"easy": silent})
    assert str(refused.value) == (
        "curriculum.unlock_at expected environment 'easy' to say whether its episodes succeed, got "
        "4 that ended without a word; set success in its last transition (a rollout function "
        "passes it on in Ended), or take section curriculum out"
    )


def test_an_environment_that_opens_nothing_need_not_say_what_succeeded() -> None:
    silent = RolloutCounts(num_groups=8, num_scored=64, num_terminated=64)
    alone = make_mixture(make_run({"easy": 1, "hard": 1}))
    alone.observe({"easy": silent})
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    mixture.observe({"easy": won(64, 64, num_groups=16)})
    mixture.observe({"easy": silent, "hard": silent})
    assert mixture.weights == {"easy": 0.25, "hard": 1}


def test_episodes_that_did_not_come_to_their_end_say_nothing_about_their_environment() -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    cut_off = RolloutCounts(num_groups=16, num_scored=64, num_truncated=32, num_invalid=32)
    mixture.observe({"easy": cut_off})
    assert list(mixture.weights) == ["easy"]


def test_an_evaluation_without_a_single_verdict_is_told_before_training(caplog) -> None:
    silent = summarize([EpisodeOutcome(seed, 17.0, 17) for seed in range(4)])
    judged = summarize([EpisodeOutcome(seed, 0.0, 1, success=False) for seed in range(4)])
    played = {"easy": judged, "middle": silent, "hard": silent}
    weights = dict.fromkeys(played, 1.0)
    make_mixture(make_run(weights)).expect_success(played)
    assert not caplog.messages
    make_mixture(make_run(weights, curriculum=CURRICULUM)).expect_success(played)
    assert caplog.messages == [
        "environment 'middle' said of none of 4 evaluated games whether it succeeded; "
        "curriculum.unlock_at counts successes to open the next environment"
    ]
