"""The limit on how far sampling may run ahead of training.

With B groups in a batch and the staleness bound S, group number n (from 0) may start under
version v only if n < (v + S + 1) * B. It then enters the batch of step v + S at the latest.
S = 0 is exactly on-policy. (This is the capacity rule of AReaL, arXiv 2505.24298, counted in
groups.) A group that will not be trained on releases its admission, and another group replaces it.

A run over whole passes of a data set trains on a fixed number of groups. Only that number may
start, because an extra group would use up a row without training on it.

v is the oldest version that any rollout worker may sample from. A group that starts now is
sampled by version v or newer on every worker, even while a newer version is being delivered.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GroupAdmission:
    """A counter of the groups that have started and will be trained on."""

    groups_per_step: int
    max_staleness: int
    num_groups: int | None = None
    """Number of groups that the whole run trains on; None if more groups may start."""
    num_admitted: int = 0
    """Number of groups that were trained on, wait in the buffer, or are being played."""

    def capacity(self, version: int) -> int:
        """Return the number of groups that may start now, at policy version `version`."""
        limit = (version + self.max_staleness + 1) * self.groups_per_step
        if self.num_groups is not None:
            limit = min(limit, self.num_groups)
        return max(0, limit - self.num_admitted)

    def admit(self, num_groups: int) -> None:
        """Count groups that start."""
        self.num_admitted += num_groups

    def release(self, num_groups: int) -> None:
        """Stop counting groups that will not be trained on."""
        self.num_admitted -= num_groups
