"""Ends a run that gets nowhere: no groups come, or none that can be trained on.

Four ways to get nowhere, all seen in the counts since the last batch:

- groups whose rewards are all equal are replaced without end: the policy is certain, or lost
- groups whose episodes are void are replaced without end: an environment is away, or fails
- nothing of an environment was ever scored, and two batches of it have failed: it never worked,
  and a few seconds have shown that it is not one worker's engine, or a judge that wakes up
- no group comes to its end at all, for training.idle_timeout_s: whatever is waited for is named

A reason for which episodes are void is logged when it is new, and named when it ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import EpisodesFailedError, TrainingStalledError, UnavailableError
from ludus.trainer.data.counts import RolloutCounts, total
from ludus.trainer.data.failures import Failures, commonest

_log = logging.getLogger(__name__)

_MAX_DEAD_BATCHES = 100
_MAX_FAILED_BATCHES_AT_FIRST = 2
_PATIENCE_AT_FIRST_S = 10.0
_NEARLY_ALL = 0.9
_MAX_LOGGED = 20
_SAY_EVERY_S = 60.0


@dataclass(slots=True)
class _Environment:
    """What was seen of one environment."""

    void_since_s: float = 0.0
    """When the first of its newest groups was void, of which nearly all were."""
    num_void: int = 0
    """Groups of these."""
    num_good: int = 0
    num_failed_at_first: int = 0
    """Episodes, before any was scored."""
    failed_since_s: float = 0.0
    """When the first of these failed."""
    was_scored: bool = False


@dataclass(slots=True)
class _Wait:
    """A wait for a batch."""

    since_s: float
    told_s: float
    """When it was last spoken of."""
    num_groups: int
    """That have ended since the batch before."""
    newest_s: float
    """When the newest of them ended, or the wait began."""


class Progress:
    """Watches the counts of a run."""

    def __init__(self, run: LanguageModelRun, in_words: Callable[[], str] = str) -> None:
        """Watch a run; `in_words` says who plays what now."""
        self._run = run
        self._in_words = in_words
        self._wait: _Wait | None = None
        self._before: dict[str, RolloutCounts] = {}
        self._environments = {name: _Environment() for name in run.environments}
        self._logged: set[tuple[str, str]] = set()
        """Kinds of failures, each with its environment."""

    def observe(self, counts: Mapping[str, RolloutCounts], now_s: float, *, taken: bool) -> None:
        """Watch the counts since the last batch; `taken` says that this is the next.

        Raises:
            TrainingStalledError: nothing that is played teaches anything any more, or nothing
                comes to its end.
            EpisodesFailedError: nearly all that is played in an environment fails.
            UnavailableError: an environment stays unavailable for longer than it may.
        """
        for name, now in counts.items():
            if name not in self._environments:
                # Played before the run was resumed with others.
                continue
            self._log_new_failures(name, now.failures)
            before = self._before.get(name, RolloutCounts())
            self._refuse_what_never_worked(name, before, now, now_s)
            self._refuse_what_stays_void(name, before, now, now_s)
        self._before = {} if taken else dict(counts)
        if taken:
            self._wait = None
            return
        self._refuse_to_stall(total(counts.values()))
        self._refuse_to_stand_still(total(counts.values()).num_groups, now_s)

    def _refuse_to_stand_still(self, num_groups: int, now_s: float) -> None:
        wait = self._wait = self._wait or _Wait(now_s, now_s, num_groups, now_s)
        if num_groups != wait.num_groups:
            wait.num_groups, wait.newest_s = num_groups, now_s
        idle_s, training = now_s - wait.newest_s, self._run.training
        if idle_s >= training.idle_timeout_s:
            raise TrainingStalledError(
                f"no group has ended for {idle_s:.0f} s, longer than training.idle_timeout_s = "
                f"{training.idle_timeout_s:g}: {self._in_words()}; see trainer.log for what was "
                "done last, and raise the limit if a group needs longer"
            )
        if now_s - wait.told_s >= _SAY_EVERY_S:
            wait.told_s = now_s
            _log.info(
                "waiting for a batch of %d groups, %.0f s so far; %d have ended since the last "
                "batch, the newest %.0f s ago; %s",
                training.groups_per_step,
                now_s - wait.since_s,
                num_groups,
                idle_s,
                self._in_words(),
            )

    def _log_new_failures(self, name: str, failures: Failures) -> None:
        for kind, count in failures.items():
            if (name, kind) in self._logged or len(self._logged) >= _MAX_LOGGED:
                continue
            self._logged.add((name, kind))
            _log.warning("an episode of environment '%s' is void: %s", name, count.example)
            if len(self._logged) == _MAX_LOGGED:
                _log.warning("further reasons are counted, and not logged")

    def _refuse_what_never_worked(
        self, name: str, before: RolloutCounts, now: RolloutCounts, now_s: float
    ) -> None:
        seen, run = self._environments[name], self._run
        seen.was_scored |= now.num_scored > 0
        if seen.was_scored:
            return
        num_failed = now.num_failed - before.num_failed
        if not seen.num_failed_at_first and num_failed:
            seen.failed_since_s = now_s
        seen.num_failed_at_first += num_failed
        of_a_batch = run.training.groups_per_step * run.rollout.group_size
        is_many = seen.num_failed_at_first >= _MAX_FAILED_BATCHES_AT_FIRST * of_a_batch
        allowed_s = min(_PATIENCE_AT_FIRST_S, run.environments[name].reconnect_timeout_s)
        if is_many and now_s - seen.failed_since_s >= allowed_s:
            raise EpisodesFailedError(
                f"environment '{name}': all of its first {seen.num_failed_at_first} episodes have "
                f"failed, most often: {_reason_of(now)}"
            )

    def _refuse_what_stays_void(
        self, name: str, before: RolloutCounts, now: RolloutCounts, now_s: float
    ) -> None:
        seen = self._environments[name]
        num_void = now.num_void_groups - before.num_void_groups
        num_good = now.num_groups - before.num_groups - num_void
        if not seen.num_void and num_void:
            seen.void_since_s = now_s
        seen.num_void += num_void
        seen.num_good += num_good
        share = seen.num_void / max(1, seen.num_void + seen.num_good)
        # It works again where most of the newest groups are good, however many were void before.
        if share < _NEARLY_ALL or num_good > max(1, num_void):
            seen.num_void = seen.num_good = 0
            return
        void_s = now_s - seen.void_since_s
        allowed_s = self._run.environments[name].reconnect_timeout_s
        if not num_void or num_good or void_s < allowed_s:
            return
        text = (
            f"environment '{name}': for {void_s:.0f} s (nearly) every group was void, most often: "
            f"{_reason_of(now)}"
        )
        if now.num_lost <= now.num_failed:
            raise EpisodesFailedError(text)
        raise UnavailableError(
            f"{text}; its server may stay away for reconnect_timeout_s = {allowed_s:g}: see that "
            "it answers, or raise it"
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


def _reason_of(counts: RolloutCounts) -> str:
    """The commonest; where nothing failed, it is the reward that said nothing."""
    return commonest(counts.failures) or "a term of the reward is None for them"
