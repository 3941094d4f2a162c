"""How far sampling may run ahead of training.

With B groups in a batch and the staleness bound S, group number n (from 0) may begin under
version v only when n < (v + S + 1) * B: it then enters the batch of step v + S at the latest.
S = 0 is exactly on-policy. (The capacity rule of AReaL, arXiv 2505.24298, counted in groups.)
A group that will not be trained on gives its place back, so it is replaced. Where a run trains on
so many groups and no more, those alone are begun: in whole passes over a data set a row that is
played for nothing would be a row that is missing.

v is the version that all rollout workers hold: a group that begins now is sampled by that
version or a newer one, on whichever worker it is played, also while a newer version is on its way.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Admission:
    """Counts the groups that have begun and will be trained on."""

    groups_per_step: int
    max_staleness: int
    num_groups: int | None = None
    """Groups that the whole run trains on; None where more may begin than it will."""
    num_admitted: int = 0
    """Groups that were trained on, wait in the buffer, or are being played."""

    def capacity(self, version: int) -> int:
        """Groups that may begin now, at policy version `version`."""
        limit = (version + self.max_staleness + 1) * self.groups_per_step
        if self.num_groups is not None:
            limit = min(limit, self.num_groups)
        return max(0, limit - self.num_admitted)

    def admit(self, num_groups: int) -> None:
        """Count `num_groups` more."""
        self.num_admitted += num_groups

    def give_back(self, num_groups: int) -> None:
        """Count groups no longer: they will not be trained on."""
        self.num_admitted -= num_groups
