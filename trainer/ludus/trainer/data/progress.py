"""Ends a run that gets nowhere: groups come, but none that can be trained on.

Two ways to get nowhere, both seen in the counts since the last batch:

- groups whose rewards are all equal are replaced without end: the policy is certain, or lost
- groups whose episodes are all lost are replaced without end: an environment is unavailable
"""

from __future__ import annotations

from collections.abc import Mapping

from ludus.proto.config import RunConfig
from ludus.proto.errors import TrainingStalledError, UnavailableError
from ludus.trainer.data.counts import RolloutCounts, total

_MAX_DEAD_BATCHES = 100


class Progress:
    """Watches the counts of a run."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._before: dict[str, RolloutCounts] = {}
        self._away_since_s: dict[str, float] = {}
        """By environment: when the first of its newest groups was lost, none of which was not."""

    def observe(self, counts: Mapping[str, RolloutCounts], now_s: float, *, taken: bool) -> None:
        """Watch the counts since the last batch; `taken` says that this is the next.

        Raises:
            TrainingStalledError: nothing that is played teaches anything any more.
            UnavailableError: an environment stays unavailable for longer than it may.
        """
        for environment, now in counts.items():
            if environment not in self._run.environments:
                # Played before the run was resumed with others.
                continue
            self._see(environment, self._before.get(environment, RolloutCounts()), now, now_s)
        self._before = {} if taken else dict(counts)
        if not taken:
            self._refuse_to_stall(total(counts.values()))

    def _see(
        self, environment: str, before: RolloutCounts, now: RolloutCounts, now_s: float
    ) -> None:
        num_void = now.num_void_groups - before.num_void_groups
        if now.num_groups - before.num_groups > num_void:
            self._away_since_s.pop(environment, None)
            return
        if num_void == 0:
            return
        away_s = now_s - self._away_since_s.setdefault(environment, now_s)
        allowed_s = self._run.environments[environment].reconnect_timeout_s
        if away_s >= allowed_s:
            raise UnavailableError(
                f"environment '{environment}': for {away_s:.0f} s every group has lost its "
                f"episodes, and its server may stay away for reconnect_timeout_s = {allowed_s:g}; "
                "see that the server answers, or raise it; if the server is up, raise "
                f"rollout.group_timeout_s = {self._run.rollout.group_timeout_s:g}"
            )

    def _refuse_to_stall(self, counts: RolloutCounts) -> None:
        if counts.num_zero_variance_groups < _MAX_DEAD_BATCHES * self._run.training.groups_per_step:
            return
        num_scored = max(1, counts.num_scored)
        raise TrainingStalledError(
            f"the last {counts.num_zero_variance_groups} groups had equal rewards within each "
            f"group (mean {counts.reward_sum / num_scored:.3g}, "
            f"{counts.num_invalid / num_scored:.0%} of the episodes ended in text that was no "
            "action), so there is nothing to learn from; lower learner.learning_rate or "
            "algorithm.entropy_coef if the policy collapsed, raise "
            "rollout.group_size or rollout.temperature if it became certain"
        )
