"""Which tasks a group is played on.

    every seed is another task     seeds follow from the run's seed and the group's index
    tasks are counted              the k-th group of the environment is played on its k-th task

Where an environment says how many tasks it has (`TaskSet`, rows of a data set), seed k is the k-th
of them, and each is shown once before one is shown again. Its groups therefore take the places 0,
1, 2, ... in the order in which they begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ludus.proto.seeds import FIRST_WARM_START_SEED
from ludus.trainer.core.streams import training_seed


@dataclass(frozen=True, slots=True)
class GroupSeeds:
    """The seeds of a run's groups."""

    run_seed: int
    group_size: int
    shared: bool
    """Whether the episodes of a group have one task."""
    num_tasks: Mapping[str, int] = field(default_factory=dict)
    """Of the environments whose tasks are counted, by name."""

    def are_counted(self, environment: str) -> bool:
        """Whether its groups are played on one task after the other."""
        return environment in self.num_tasks

    def of(self, environment: str, index: int, place: int) -> tuple[int, ...]:
        """[G] the seeds of the run's group `index`, which is the `place`-th on a new task."""
        if not self.are_counted(environment):
            return group_seeds(self.run_seed, index, self.group_size, shared=self.shared)
        first = place if self.shared else place * self.group_size
        places = [first + (0 if self.shared else number) for number in range(self.group_size)]
        # The largest number of whole epochs below the seeds of the warm start.
        epochs = max(1, FIRST_WARM_START_SEED // self.num_tasks[environment])
        end = epochs * self.num_tasks[environment]
        return tuple(one % end for one in places)


def group_seeds(run_seed: int, index: int, group_size: int, *, shared: bool) -> tuple[int, ...]:
    """[G] the seeds of group `index`, never those of the warm start or of an evaluation."""
    if shared:
        return (training_seed(run_seed, index, 0),) * group_size
    return tuple(training_seed(run_seed, index, number) for number in range(group_size))
