"""The checkpoints of a language-model run: schedule, writing, and the learner's restart."""

from __future__ import annotations

import asyncio
import logging
import time

from ludus.proto.errors import CheckpointError
from ludus.proto.runs import Phase
from ludus.trainer.core.option_names import name_option
from ludus.trainer.driver.loops.components import Components
from ludus.trainer.driver.loops.sampling import SamplingLoop
from ludus.trainer.run import checkpoint
from ludus.trainer.run.checkpoint import LEARNER_FOLDER, MODEL_FOLDER, RunState
from ludus.trainer.run.schedule import CheckpointSchedule

_log = logging.getLogger(__name__)


class Checkpointing:
    """Writes the checkpoints of a run, and restarts its learner from them.

    Args:
        step: step from which the run starts.
    """

    def __init__(self, components: Components, step: int) -> None:
        self._components = components
        self.saved_step = step
        """Step of the latest checkpoint, or the first step."""
        training = components.run.training
        self.schedule = CheckpointSchedule(
            training.checkpoint_every_steps, training.checkpoint_every_s
        )

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint must follow this step.

        It must if the policy after the step is the best so far.
        """
        components = self._components
        return self.schedule.is_due(step) or components.checkpoints.is_best(
            step, components.metrics.evaluations
        )

    async def save(self, sampling: SamplingLoop, state: RunState) -> None:
        """Write a checkpoint; call it between two steps.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        components, metrics = self._components, self._components.metrics
        metrics.log_phase(Phase.SAVE_CHECKPOINT, state.step)
        start_s = time.monotonic()
        # A copy, because sampling continues during the save.
        state = await sampling.copy_state(state)
        with components.checkpoints.prepare(state.step) as folder:
            files = await components.learners.save(folder / LEARNER_FOLDER, folder / MODEL_FOLDER)
            await components.checkpoints.commit(folder, state, files, metrics.evaluations)
        self.saved_step = state.step
        duration_s = time.monotonic() - start_s
        self.schedule.end_checkpoint(duration_s)
        metrics.log_checkpoint(state.step, duration_s)

    def has_saved(self, step: int) -> bool:
        """Return whether the newest checkpoint is of this step."""
        return self.saved_step == step == self._find_newest_step()

    def describe_newest(self) -> str:
        """Return a note on how to continue the run."""
        step = self._find_newest_step()
        if step is None:
            return "there is no checkpoint to continue from"
        return f"continue with {name_option('resume')} from step {step}"

    async def restart_learner(self) -> RunState:
        """Restart the learner from the newest readable checkpoint; return that run state.

        Raises:
            CheckpointError: there are checkpoints, but none is readable.
        """
        learners, failure = self._components.learners, None
        for folder in self._components.checkpoints.list_newest_first():
            try:
                await asyncio.to_thread(checkpoint.check_complete, folder)
                state = checkpoint.read_state(folder, RunState)
                await learners.restart(folder / LEARNER_FOLDER)
            except CheckpointError as error:
                _log.warning("%s", getattr(error, "cause", None) or error)
                failure = error
            else:
                return state
        if failure is not None:
            raise failure
        await learners.restart(None)
        return RunState()

    def _find_newest_step(self) -> int | None:
        for folder in self._components.checkpoints.list_newest_first():
            return checkpoint.parse_checkpoint_step(folder)
        return None
