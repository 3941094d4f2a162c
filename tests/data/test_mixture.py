"""Each environment gets its share of the groups. A curriculum opens environments one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.env.evaluation import EpisodeOutcome, summarize
from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import ConfigError
from ludus.trainer.data.counts import RolloutCounts
from ludus.trainer.data.mixture import Mixture, MixtureState
from ludus.trainer.run.checkpoint import RunState


def make_run(weights: dict[str, float], **sections: object) -> LanguageModelRun:
    """Return a run with environments of these weights."""
    environments = {name: {"weight": weight} for name, weight in weights.items()}
    return LanguageModelRun.model_validate({"environments": environments, **sections})


def make_mixture(run: LanguageModelRun, state: MixtureState | None = None) -> Mixture:
    """Return the mixture of a run, in its initial state or in `state`."""
    return Mixture(run, state or MixtureState())


def take_groups(mixture: Mixture, num_groups: int) -> Counter[str]:
    """Take the next groups; return the number of groups of each environment."""
    return Counter(mixture.take_next_group().environment for _ in range(num_groups))


def make_counts(num_wins: int, num_episodes: int, num_groups: int = 8) -> RolloutCounts:
    """Return the counts of groups in which `num_wins` episodes were won."""
    return RolloutCounts(
        num_groups=num_groups,
        num_scored=num_episodes,
        num_terminated=num_episodes,
        num_judged=num_episodes,
        num_wins=num_wins,
        num_losses=num_episodes - num_wins,
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 300))
def test_group_counts_match_environment_weights_after_every_group(
    weights: list[int], num_groups: int
) -> None:
    run = make_run({f"e{number}": weight for number, weight in enumerate(weights)})
    counts = take_groups(make_mixture(run), num_groups)
    for name, environment in run.environments.items():
        expected_count = environment.weight / sum(weights) * num_groups
        assert abs(counts[name] - expected_count) < len(weights)


def test_group_proportions_are_exact_after_each_full_cycle() -> None:
    mixture = make_mixture(make_run({"a": 3, "b": 1, "c": 2}))
    for _ in range(50):
        assert take_groups(mixture, 6) == {"a": 3, "b": 1, "c": 2}


def test_equal_configurations_produce_equal_groups() -> None:
    run = make_run({"a": 3, "b": 1})
    mixture, equal_mixture = make_mixture(run), make_mixture(run)
    assert [mixture.take_next_group() for _ in range(50)] == [
        equal_mixture.take_next_group() for _ in range(50)
    ]


def test_indices_of_a_single_environment_start_at_zero() -> None:
    mixture = make_mixture(make_run({"a": 1}))
    assert [mixture.take_next_group().index for _ in range(4)] == [0, 1, 2, 3]


def test_replacements_do_not_affect_other_environments() -> None:
    run = make_run({"a": 1, "b": 1})
    plain_mixture, replacing_mixture = make_mixture(run), make_mixture(run)
    indices_of_b: dict[str, list[int]] = {"plain": [], "replacing": []}
    for _ in range(20):
        spec = plain_mixture.take_next_group()
        indices_of_b["plain"] += [spec.index] * (spec.environment == "b")
        spec = replacing_mixture.take_next_group()
        if spec.environment == "a":
            assert replacing_mixture.replace_group(spec).environment == "a"
        indices_of_b["replacing"] += [spec.index] * (spec.environment == "b")
    assert indices_of_b["plain"] == indices_of_b["replacing"]


def test_group_indices_are_unique_after_replacement_and_rollback() -> None:
    mixture = make_mixture(make_run({"a": 2, "b": 1}))
    specs = [mixture.take_next_group() for _ in range(30)]
    specs += [mixture.replace_group(spec) for spec in specs]
    earlier_state = MixtureState(
        names=["a", "b"], num_indices={"a": 3, "b": 1}, credits={"a": 0, "b": 0}
    )
    mixture.roll_back(earlier_state)
    specs += [mixture.take_next_group() for _ in range(30)]
    assert len({spec.index for spec in specs}) == len(specs)


def test_group_replaced_many_times_moves_to_any_environment() -> None:
    mixture = make_mixture(make_run({"mastered": 1, "open": 1}))
    spec = mixture.take_next_group()
    environments = []
    while len(environments) < 20:
        environments.append(spec.environment)
        spec = mixture.replace_group(spec)
    assert environments[:9] == ["mastered"] * 9
    assert "open" in environments


def test_mixture_resumes_from_a_checkpoint() -> None:
    run = make_run({"a": 3, "b": 2, "c": 1}, curriculum={"window_groups": 4})
    mixture = make_mixture(run)
    for number in range(7):
        mixture.take_next_group()
        mixture.observe({"a": make_counts(number, 8, num_groups=1)})
    text = RunState(mixture=mixture.state).model_dump_json()
    resumed_mixture = make_mixture(run, RunState.model_validate_json(text).mixture)
    for number in range(30):
        assert resumed_mixture.take_next_group() == mixture.take_next_group()
        for variant in (resumed_mixture, mixture):
            variant.observe({"a": make_counts(8, 8, num_groups=1), "b": make_counts(number % 8, 8)})
    assert resumed_mixture.weights == mixture.weights


def test_resume_with_an_added_environment_uses_new_indices() -> None:
    mixture = make_mixture(make_run({"a": 1, "b": 1}))
    used_indices = {mixture.take_next_group().index for _ in range(9)}
    extended_mixture = make_mixture(make_run({"a": 1, "b": 1, "c": 1}), mixture.state)
    specs = [extended_mixture.take_next_group() for _ in range(30)]
    assert used_indices.isdisjoint(spec.index for spec in specs)
    assert Counter(spec.environment for spec in specs) == {"a": 10, "b": 10, "c": 10}


CURRICULUM = {"unlock_at": 0.75, "window_groups": 16, "mastered_weight": 0.25}


def test_curriculum_starts_with_the_first_environment_only() -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    assert take_groups(mixture, 10) == {"easy": 10}


def test_next_environment_opens_at_the_required_win_rate_over_a_window() -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    mixture.observe({"easy": make_counts(64, 64)})
    assert take_groups(mixture, 10) == {"easy": 10}, "'hard' opened after half a window"
    mixture.observe({"easy": make_counts(31, 64)})
    assert take_groups(mixture, 10) == {"easy": 10}, "'hard' opened below the win rate"
    mixture.observe({"easy": make_counts(64, 64)})
    assert take_groups(mixture, 10) == {"easy": 10}, "'hard' opened on old groups"
    mixture.observe({"easy": make_counts(64, 64)})
    assert take_groups(mixture, 50) == {"easy": 10, "hard": 40}, "mastered_weight was not used"


def test_zero_variance_groups_count_toward_the_win_rate() -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    counts = RolloutCounts(num_groups=16, num_zero_variance_groups=16, num_scored=64, num_wins=64)
    mixture.observe({"easy": counts})
    assert mixture.weights == {"easy": 0.25, "hard": 1}


def test_observe_returns_the_opened_environment() -> None:
    mixture = make_mixture(make_run({"a": 1, "b": 1, "c": 1}, curriculum=CURRICULUM))
    lost_counts = make_counts(0, 64, num_groups=16)
    won_counts = make_counts(64, 64, num_groups=16)
    assert (mixture.observe({"a": lost_counts}), mixture.num_open) == (None, 1)
    assert (mixture.observe({"a": won_counts}), mixture.num_open) == ("b", 2)
    assert (mixture.observe({"b": won_counts}), mixture.num_open) == ("c", 3)
    assert mixture.observe({"c": won_counts}) is None
    assert make_mixture(make_run({"a": 1, "b": 1})).num_open is None


@pytest.mark.parametrize("num_scored", [0, 64])
def test_environment_without_wins_does_not_open_the_next(num_scored: int) -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    mixture.observe(
        {"easy": make_counts(0, num_scored, num_groups=32), "hard": make_counts(64, 64)}
    )
    assert list(mixture.weights) == ["easy"]


def test_win_rate_counts_finished_episodes_without_a_reward() -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    counts = replace(make_counts(32, 64, num_groups=16), num_scored=32)
    mixture.observe({"easy": counts})
    assert list(mixture.weights) == ["easy"], "half of the episodes were won"


def test_void_groups_do_not_fill_the_window() -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    mixture.observe({"easy": RolloutCounts(num_groups=15, num_void_groups=15)})
    mixture.observe({"easy": make_counts(4, 4, num_groups=1)})
    assert list(mixture.weights) == ["easy"], "only one group was scored"


def test_environment_without_reported_success_is_refused() -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    unjudged_counts = RolloutCounts(num_groups=1, num_episodes=4, num_scored=4, num_terminated=4)
    with pytest.raises(ConfigError) as error_info:
        mixture.observe({"easy": unjudged_counts})
    assert str(error_info.value) == (
        "environment 'easy' does not report success (4 episodes ended without it), which "
        "curriculum.unlock_at needs; set success in its last transition (a rollout function "
        "passes it on in Ended), or remove section curriculum"
    )


def test_last_environment_does_not_have_to_report_success() -> None:
    unjudged_counts = RolloutCounts(num_groups=8, num_scored=64, num_terminated=64)
    plain_mixture = make_mixture(make_run({"easy": 1, "hard": 1}))
    plain_mixture.observe({"easy": unjudged_counts})
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    mixture.observe({"easy": make_counts(64, 64, num_groups=16)})
    mixture.observe({"easy": unjudged_counts, "hard": unjudged_counts})
    assert mixture.weights == {"easy": 0.25, "hard": 1}


def test_truncated_episodes_do_not_have_to_report_success() -> None:
    mixture = make_mixture(make_run({"easy": 1, "hard": 1}, curriculum=CURRICULUM))
    truncated_counts = RolloutCounts(
        num_groups=16, num_scored=64, num_truncated=32, num_invalid=32, num_losses=64
    )
    mixture.observe({"easy": truncated_counts})
    assert list(mixture.weights) == ["easy"]


def test_evaluation_without_reported_success_is_logged(caplog) -> None:
    unjudged_summary = summarize([EpisodeOutcome(seed, 17.0, 17) for seed in range(4)])
    judged_summary = summarize([EpisodeOutcome(seed, 0.0, 1, success=False) for seed in range(4)])
    results = {"easy": judged_summary, "middle": unjudged_summary, "hard": unjudged_summary}
    weights = dict.fromkeys(results, 1.0)
    make_mixture(make_run(weights)).warn_if_success_is_missing(results)
    assert not caplog.messages
    make_mixture(make_run(weights, curriculum=CURRICULUM)).warn_if_success_is_missing(results)
    assert caplog.messages == [
        "environment 'middle' did not report success in any of 4 evaluated episodes; "
        "curriculum.unlock_at counts successes to open the next environment"
    ]
