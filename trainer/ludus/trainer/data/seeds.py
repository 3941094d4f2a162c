"""The tasks on which a group is played.

    every seed is another task     seeds follow from the run's seed and the group's index
    tasks are counted              the k-th group of the environment plays its k-th task

If an environment reports the number of its tasks (`TaskSet`, rows of a data set), seed k selects
the k-th task, and each task is played once before any is repeated. The groups of such an
environment therefore get task numbers 0, 1, 2, ... in the order in which they start.
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
    """True if all episodes of a group have the same task."""
    num_tasks: Mapping[str, int] = field(default_factory=dict)
    """Number of tasks of each environment whose tasks are counted, by name."""

    def are_counted(self, environment: str) -> bool:
        """Return whether the tasks of an environment are counted."""
        return environment in self.num_tasks

    def select(self, environment: str, index: int, task_number: int) -> tuple[int, ...]:
        """Return [G] the seeds of a group.

        Args:
            environment: name of the environment.
            index: index of the group in the run.
            task_number: number of groups of the environment that already got a new task.
        """
        if not self.are_counted(environment):
            return group_seeds(self.run_seed, index, self.group_size, shared=self.shared)
        start = task_number if self.shared else task_number * self.group_size
        numbers = [start + (0 if self.shared else episode) for episode in range(self.group_size)]
        # The largest number of whole epochs below the seeds of the warm start.
        epochs = max(1, FIRST_WARM_START_SEED // self.num_tasks[environment])
        end = epochs * self.num_tasks[environment]
        return tuple(number % end for number in numbers)


def group_seeds(run_seed: int, index: int, group_size: int, *, shared: bool) -> tuple[int, ...]:
    """Return [G] the seeds of group `index`; warm start and evaluations use other seeds."""
    if shared:
        return (training_seed(run_seed, index, 0),) * group_size
    return tuple(training_seed(run_seed, index, episode) for episode in range(group_size))
