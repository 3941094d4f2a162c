"""The result of an evaluation of models, computed from the rows that the trainer has written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from ludus.env.evaluation import (
    EpisodeOutcome,
    measure_difference,
    measure_gap_closed,
    measure_win_difference,
    read_outcome,
    summarize,
)
from ludus.proto.config import LanguageModelRun
from ludus.proto.config.environment import RANDOM_POLICY
from ludus.proto.evaluations import (
    EvaluatedEpisode,
    EvaluationPlan,
    EvaluationRow,
    ModelDifference,
    ModelEvaluation,
    ModelResult,
)
from ludus.proto.runs import PolicyResult


@dataclass
class CollectedRows:
    """The rows of an evaluation so far."""

    plan: EvaluationPlan | None = None
    activity: str = ""
    """Text that says what the trainer does."""
    newest_policy: str = ""
    """Policy that played the newest episode."""
    _episodes: dict[tuple[str, int], EvaluatedEpisode] = field(default_factory=dict)
    """Newest episode of each policy and seed: void episodes are played again."""

    def add(self, rows: Iterable[EvaluationRow]) -> None:
        """Add new rows."""
        for row in rows:
            self.plan = row.plan or self.plan
            self.activity = row.activity or self.activity
            if row.episode is not None:
                self._episodes[row.episode.policy, row.episode.seed] = row.episode
                self.newest_policy = row.episode.policy

    @property
    def episodes(self) -> tuple[EvaluatedEpisode, ...]:
        """All episodes, by policy in the order of playing, then by seed."""
        policies = list(dict.fromkeys(policy for policy, _ in self._episodes))
        ordered_keys = sorted(self._episodes, key=lambda key: (policies.index(key[0]), key[1]))
        return tuple(self._episodes[key] for key in ordered_keys)

    def select_outcomes(self, policy: str) -> list[EpisodeOutcome]:
        """Return the outcomes of a policy in the order of the seeds."""
        seeds = sorted(seed for name, seed in self._episodes if name == policy)
        return [read_outcome(self._episodes[policy, seed]) for seed in seeds]


def make_evaluation(
    rows: CollectedRows,
    plan: EvaluationPlan,
    run: LanguageModelRun,
    *,
    seed: int,
    endpoint: str | None,
    is_finished: bool,
) -> ModelEvaluation:
    """Return the result of all policies with a valid episode."""
    outcomes = _count_unreported(
        {
            policy: policy_outcomes
            for policy in (*plan.baselines, *plan.models)
            if has_valid(policy_outcomes := rows.select_outcomes(policy))
        }
    )
    baselines = {name: summarize(outcomes[name]) for name in plan.baselines if name in outcomes}
    best_baseline = _find_best(baselines)
    models = {
        name: _make_result(name, outcomes, best_baseline, rows.episodes)
        for name in plan.models
        if name in outcomes
    }
    differences = [_compare(first, second, outcomes) for first, second in combinations(models, 2)]
    return ModelEvaluation(
        environment=plan.environment,
        options=plan.options,
        is_game=plan.is_game,
        endpoint=endpoint,
        generator=None if endpoint else run.generator.kind,
        temperature=run.eval.temperature,
        seed=seed,
        first_seed=run.eval.seed,
        max_completion_tokens=run.rollout.max_completion_tokens,
        num_episodes_requested=run.eval.num_games,
        num_episodes=plan.num_episodes,
        is_finished=is_finished,
        models=models,
        baselines=baselines,
        best_baseline=best_baseline,
        differences=tuple(filter(None, differences)),
        episodes=rows.episodes,
    )


def has_valid(outcomes: Iterable[EpisodeOutcome]) -> bool:
    """Return whether an episode is valid."""
    return any(outcome.episode_return is not None for outcome in outcomes)


def _count_unreported(
    outcomes: Mapping[str, Sequence[EpisodeOutcome]],
) -> Mapping[str, Sequence[EpisodeOutcome]]:
    """Return the outcomes, in which an unknown success is none if the environment reports success.

    A model whose episodes all end with invalid actions has no success, although the environment has
    reported nothing.
    """
    all_outcomes = [outcome for episodes in outcomes.values() for outcome in episodes]
    if all(outcome.success is None for outcome in all_outcomes):
        return outcomes
    return {
        policy: [replace(outcome, success=bool(outcome.success)) for outcome in episodes]
        for policy, episodes in outcomes.items()
    }


def _find_best(baselines: Mapping[str, PolicyResult]) -> str | None:
    """Return the fixed policy with the highest return, or None if there is only the random one."""
    names = [name for name in baselines if name != RANDOM_POLICY]
    return max(names, key=lambda name: baselines[name].expected_return, default=None)


def _make_result(
    name: str,
    outcomes: Mapping[str, Sequence[EpisodeOutcome]],
    best_baseline: str | None,
    episodes: Sequence[EvaluatedEpisode],
) -> ModelResult:
    own_episodes = [episode for episode in episodes if episode.policy == name]
    gap_closed = None
    if best_baseline is not None and RANDOM_POLICY in outcomes:
        gap_closed = _measure_gap(outcomes[name], outcomes[RANDOM_POLICY], outcomes[best_baseline])
    return ModelResult(
        result=summarize(outcomes[name]),
        truncations=_count(episode.truncation for episode in own_episodes),
        failures=_count(episode.failure for episode in own_episodes),
        gap_closed=gap_closed[0] if gap_closed else None,
        gap_closed_ci95=gap_closed[1] if gap_closed else None,
    )


def _measure_gap(
    policy: Sequence[EpisodeOutcome],
    random_policy: Sequence[EpisodeOutcome],
    best_policy: Sequence[EpisodeOutcome],
) -> tuple[float, tuple[float, float]] | None:
    """Return the share of the gap that a policy closes; None if the gap may be zero."""
    gap = measure_difference(best_policy, random_policy)
    if gap is None or gap[1][0] <= 0 or measure_difference(policy, random_policy) is None:
        return None
    try:
        return measure_gap_closed(policy, random_policy, best_policy)
    except ValueError:  # no task was played by all three
        return None


def _count(reasons: Iterable[str]) -> dict[str, int]:
    return dict(Counter(filter(None, reasons)).most_common())


def _compare(
    first: str, second: str, outcomes: Mapping[str, Sequence[EpisodeOutcome]]
) -> ModelDifference | None:
    returns = measure_difference(outcomes[first], outcomes[second])
    if returns is None:
        return None
    successes = measure_win_difference(outcomes[first], outcomes[second])
    return ModelDifference(
        first=first,
        second=second,
        num_tasks=returns[2],
        return_difference=returns[0],
        return_difference_ci95=returns[1],
        win_rate_difference=successes[0] if successes else None,
        win_rate_difference_ci95=successes[1] if successes else None,
    )
