"""Detection of a run that makes no progress: no groups arrive, or none can be trained on.

A run stops for one of four reasons, all visible in the counts since the last batch:

- Groups have equal rewards without end, over steps in which no group has variance: the policy is
  certain, or has collapsed. Groups are counted only if the run replaces such groups.
- Void groups are replaced without end: an environment is unavailable, or fails.
- No episode of an environment was ever scored, and at least two batches of its episodes failed over
  several seconds. So the environment never worked, and the cause is not one slow engine or judge.
- No group finishes for training.idle_timeout_s; the message names what the run waits for.

A new kind of reason for void episodes is logged when it first occurs. The most common reason is
part of the error that stops the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import EpisodesFailedError, TrainingStalledError, UnavailableError
from ludus.trainer.data.counts import RolloutCounts, sum_counts
from ludus.trainer.data.failures import Failures, find_most_common_reason

_log = logging.getLogger(__name__)

_MAX_ZERO_VARIANCE_BATCHES = 100
_MAX_INITIAL_FAILED_BATCHES = 2
_INITIAL_PATIENCE_S = 10.0
_MIN_VOID_SHARE = 0.9
_MAX_LOGGED_KINDS = 20
_LOG_INTERVAL_S = 60.0


@dataclass(slots=True)
class _EnvironmentProgress:
    """The recent groups of one environment."""

    void_since_s: float = 0.0
    """Time of the first void group of the current series, in which nearly all groups are void."""
    num_void: int = 0
    """Number of void groups in the series."""
    num_valid: int = 0
    """Number of groups in the series that are not void."""
    num_initial_failures: int = 0
    """Number of episodes that failed before any episode was scored."""
    failed_since_s: float = 0.0
    """Time of the first of these failures."""
    was_scored: bool = False


@dataclass(slots=True)
class _BatchWait:
    """A wait for a batch."""

    start_s: float
    last_log_s: float
    """Time of the last log message about the wait."""
    num_groups: int
    """Number of groups that have finished since the previous batch."""
    last_finish_s: float
    """Time when the latest of them finished, or when the wait started."""


class ProgressMonitor:
    """A monitor that stops a run whose counts show no progress."""

    def __init__(
        self,
        run: LanguageModelRun,
        describe_work: Callable[[], str] = str,
        num_zero_variance_groups: int = 0,
    ) -> None:
        """Create a monitor that has observed nothing.

        Args:
            describe_work: function that returns a text that says which workers are playing now.
            num_zero_variance_groups: number of groups since the last step with variance.
        """
        self._run = run
        self._describe_work = describe_work
        self.num_zero_variance_groups = num_zero_variance_groups
        """Number of groups of steps without variance, since the last step with variance."""
        self._wait: _BatchWait | None = None
        self._previous_counts: dict[str, RolloutCounts] = {}
        self._progress_by_environment = {name: _EnvironmentProgress() for name in run.environments}
        self._logged_kinds: set[tuple[str, str]] = set()
        """Pairs of environment and kind of failure."""

    def observe(
        self,
        counts: Mapping[str, RolloutCounts],
        now_s: float,
        *,
        is_taken: bool,
        has_variance: bool = True,
    ) -> None:
        """Check the counts since the last batch, by environment.

        `is_taken` says whether the next batch was taken, so that the counts start again, and
        `has_variance` whether a group of that batch has variance.

        Raises:
            TrainingStalledError: nothing can be learned from the groups, or none finishes.
            EpisodesFailedError: nearly all episodes of an environment fail.
            UnavailableError: an environment stays unavailable for longer than it may.
        """
        for name, current_counts in counts.items():
            if name not in self._progress_by_environment:
                # The group was played before the run was resumed with other environments.
                continue
            self._log_new_failures(name, current_counts.failures)
            previous_counts = self._previous_counts.get(name, RolloutCounts())
            self._check_initial_failures(name, previous_counts, current_counts, now_s)
            self._check_void_groups(name, previous_counts, current_counts, now_s)
        self._previous_counts = {} if is_taken else dict(counts)
        all_counts = sum_counts(counts.values())
        is_replacing = self._run.algorithm.zero_variance_groups == "replace"
        if is_replacing and not (is_taken and has_variance):
            self._check_zero_variance(all_counts)
        if is_taken:
            self._wait = None
            self._count_step_without_variance(all_counts, has_variance)
            return
        self._check_idle_time(all_counts, now_s)

    def _check_idle_time(self, counts: RolloutCounts, now_s: float) -> None:
        num_groups = counts.num_groups
        wait = self._wait = self._wait or _BatchWait(now_s, now_s, num_groups, now_s)
        if num_groups != wait.num_groups:
            wait.num_groups, wait.last_finish_s = num_groups, now_s
        idle_s, training = now_s - wait.last_finish_s, self._run.training
        if idle_s >= training.idle_timeout_s:
            raise TrainingStalledError(
                f"no group has finished for {idle_s:.0f} s, longer than training.idle_timeout_s = "
                f"{training.idle_timeout_s:g}: {self._describe_work()}; see trainer.log for the "
                "last activity, and raise the limit if a group needs more time"
            )
        if now_s - wait.last_log_s >= _LOG_INTERVAL_S:
            wait.last_log_s = now_s
            _log.info(
                "waiting for a batch of %d groups for %.0f s; %d have finished since the last "
                "batch (%d were replaced because of equal rewards), the latest %.0f s ago; %s",
                training.groups_per_step,
                now_s - wait.start_s,
                counts.num_groups,
                counts.num_replaced_groups,
                idle_s,
                self._describe_work(),
            )

    def _log_new_failures(self, name: str, failures: Failures) -> None:
        for kind, count in failures.items():
            if (name, kind) in self._logged_kinds or len(self._logged_kinds) >= _MAX_LOGGED_KINDS:
                continue
            self._logged_kinds.add((name, kind))
            _log.warning("an episode of environment '%s' is void: %s", name, count.example)
            if len(self._logged_kinds) == _MAX_LOGGED_KINDS:
                _log.warning("further reasons are counted, but not logged")

    def _check_initial_failures(
        self, name: str, previous_counts: RolloutCounts, current_counts: RolloutCounts, now_s: float
    ) -> None:
        progress, run = self._progress_by_environment[name], self._run
        progress.was_scored |= current_counts.num_scored > 0
        if progress.was_scored:
            return
        num_failed = current_counts.num_failed - previous_counts.num_failed
        if not progress.num_initial_failures and num_failed:
            progress.failed_since_s = now_s
        progress.num_initial_failures += num_failed
        batch_size = run.training.groups_per_step * run.rollout.group_size
        if progress.num_initial_failures < _MAX_INITIAL_FAILED_BATCHES * batch_size:
            return
        max_failing_s = min(_INITIAL_PATIENCE_S, run.environments[name].reconnect_timeout_s)
        if now_s - progress.failed_since_s >= max_failing_s:
            raise EpisodesFailedError(
                f"environment '{name}': all of its first {progress.num_initial_failures} episodes "
                f"failed, most often: {_find_most_common_cause(current_counts)}"
            )

    def _check_void_groups(
        self, name: str, previous_counts: RolloutCounts, current_counts: RolloutCounts, now_s: float
    ) -> None:
        progress = self._progress_by_environment[name]
        num_void = current_counts.num_void_groups - previous_counts.num_void_groups
        num_valid = current_counts.num_groups - previous_counts.num_groups - num_void
        if not progress.num_void and num_void:
            progress.void_since_s = now_s
        progress.num_void += num_void
        progress.num_valid += num_valid
        void_share = progress.num_void / max(1, progress.num_void + progress.num_valid)
        # The environment works again if most of the latest groups are valid.
        if void_share < _MIN_VOID_SHARE or num_valid > max(1, num_void):
            progress.num_void = progress.num_valid = 0
            return
        void_s = now_s - progress.void_since_s
        max_void_s = self._run.environments[name].reconnect_timeout_s
        if not num_void or num_valid or void_s < max_void_s:
            return
        message = (
            f"environment '{name}': (nearly) every group was void for {void_s:.0f} s, most often: "
            f"{_find_most_common_cause(current_counts)}"
        )
        if current_counts.num_lost <= current_counts.num_failed:
            raise EpisodesFailedError(message)
        raise UnavailableError(
            f"{message}; its server may be unavailable for reconnect_timeout_s = {max_void_s:g}: "
            "check that the server responds, or raise the limit"
        )

    def _count_step_without_variance(self, counts: RolloutCounts, has_variance: bool) -> None:
        if has_variance:
            self.num_zero_variance_groups = 0
        else:
            self.num_zero_variance_groups += counts.num_zero_variance_groups

    def _check_zero_variance(self, counts: RolloutCounts) -> None:
        max_groups = _MAX_ZERO_VARIANCE_BATCHES * self._run.training.groups_per_step
        num_groups = self.num_zero_variance_groups + counts.num_zero_variance_groups
        if num_groups < max_groups:
            return
        num_scored = max(1, counts.num_scored)
        raise TrainingStalledError(
            f"the last {num_groups} groups had equal rewards within each "
            f"group (mean {counts.reward_sum / num_scored:.3g}, "
            f"{counts.num_invalid / num_scored:.0%} of the episodes ended with an invalid action), "
            "so there is nothing to learn from; lower learner.learning_rate or "
            "algorithm.entropy_coef if the policy collapsed, raise rollout.group_size or "
            "rollout.temperature if it became certain"
        )


def _find_most_common_cause(counts: RolloutCounts) -> str:
    """Return the most common reason; without failures, rewards or trained tokens are missing."""
    return find_most_common_reason(counts.failures) or (
        "a term of the reward is None for their episodes, or rollout.overlong = 'mask' masks all "
        "of them; then raise rollout.max_completion_tokens"
    )
