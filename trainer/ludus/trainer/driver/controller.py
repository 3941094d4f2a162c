"""The two loops of a run, and what keeps it going.

                     at most (held version + S + 1) * B groups in all
    sampling loop -------------------------------------------------------+
      consumes   capacity of Admission          (waits; unblocked by a   |
      produces   finished groups, to the buffer  delivery, or a group    |
                                                 that must be replaced)  v
                                                                      buffer
    training loop <-------------------------------------------------------
      consumes   B groups                       (waits; unblocked by finished groups)
      produces   weights version + 1            (waits for the delivery before)
                          |
    delivery <------------+
      brings the version to every rollout worker while the next step trains; then it is the
      held version

    environment watch: restarts local servers that died; nobody waits for it, sessions of the
    dead server are lost, clients reconnect by themselves.

With S = 1, beside each other:

    learner    | step t     |pub| step t + 1   |pub| step t + 2
    delivery   |            |   | t + 1 ....|  |   | t + 2 ....|
    workers    | play groups of version t      | t + 1 ........     batch t + 1 is there already

With S = 0, batch t + 1 is played by version t + 1 alone: learner and workers take turns.

Neither loop waits for the other except through Admission (sampling must not run further ahead
than S versions) and the buffer (training needs B groups). A group that will not be trained on
gives its place back, so the buffer always fills again: no deadlock. A delivery that no worker
comes to hold is the failure of a task, and ends the run with its error at once; a worker that
alone does not come to hold it gets no traffic.

When the learner is lost, everything above ends, its ranks are restarted from the newest
checkpoint, and everything begins again as after a resume, in the same process: what had begun
since is not trained on (`GroupBuffer.restore` holds what the checkpoint held, and refuses late
comers), and no group index is given twice. Versions repeat with other contents; no group that an
old one sampled can be in the buffer, and workers tell contents apart by their hash.

When anything else ends the run, the step that the learner is in is brought to its end, and there is
a checkpoint of it if the learner lives; without what waited in the buffer, where that is lost. What
is raised is what was wrong first, whatever else goes wrong over the checkpoint.

Between two steps the run stands still for a checkpoint: what trained is in the learner, what
waits or is played is listed, and what is listed as played is played again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace

from ludus.proto.errors import (
    BufferLostError,
    CheckpointError,
    LearnerLostError,
    TrainingStalledError,
)
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import EvalReport, Phase
from ludus.trainer.core.tasks import Tasks
from ludus.trainer.data.buffer import TakenBatch
from ludus.trainer.data.counts import total
from ludus.trainer.data.mixture import Mixture
from ludus.trainer.data.progress import Progress
from ludus.trainer.data.seeds import GroupSeeds
from ludus.trainer.driver.delivery import Delivered, Delivery
from ludus.trainer.driver.parts import BetweenSteps, Parts, Step, go_on
from ludus.trainer.driver.sampling import SamplingLoop
from ludus.trainer.learner.learner import StepMetrics
from ludus.trainer.run.checkpoint import (
    RunState,
    check_whole,
    learner_folder,
    model_folder,
    read_state,
    step_of,
)
from ludus.trainer.run.metrics import StepTimes, train_values
from ludus.trainer.run.schedule import coefficients

_log = logging.getLogger(__name__)

_TAKE_TIMEOUT_S = 1.0
_WATCH_INTERVAL_S = 0.2
_MAX_SKIPPED_UPDATES = 10
"""In a row: after so many the policy or the data is broken, and no further batch mends it."""
_LEARNER_ANSWERS_WITHIN_S = 60.0
_LAST_CHECKPOINT_TIMEOUT_S = 900.0
"""For the step that the learner is in when the run fails, and the checkpoint after it."""


@dataclass(eq=False, slots=True)
class _StepUnderWay:
    """A step of the learner, from its batch to its row; it cannot be stopped half-way."""

    taken: TakenBatch
    wait_s: float
    """For its batch."""
    metrics: StepMetrics | None = None
    """None while it trains, or where it failed."""
    train_s: float = 0.0
    training: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Controller:
    """Runs both loops from `state` to the last step, or until `stop` is called."""

    parts: Parts
    state: RunState
    between_steps: BetweenSteps = go_on
    _mixture: Mixture = field(init=False)
    _sampling: SamplingLoop = field(init=False)
    _delivery: Delivery = field(init=False)
    _deliver_s: float = field(init=False, default=0.0)
    """Of the deliveries that ended since the last step."""
    _step: _StepUnderWay | None = field(init=False, default=None)
    """None between two steps."""
    _saved_step: int = field(init=False)
    """Of the newest checkpoint, or where the run began."""
    _num_breaches: int = field(init=False, default=0)
    """Of the workers, as far as they are counted in the state."""
    _clock_runs: bool = field(init=False, default=False)
    _stopping: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._saved_step = self.state.step
        run = self.parts.run
        seeds = GroupSeeds(
            run_seed=run.seed,
            group_size=run.rollout.group_size,
            shared=run.rollout.group_seed == "shared",
            num_tasks=self.parts.num_tasks,
        )
        self._mixture = Mixture(run, self.state.mixture, seeds)

    def stop(self) -> None:
        """End the run after the step it is in, with a checkpoint."""
        self._stopping.set()

    @property
    def is_stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    @property
    def finished(self) -> bool:
        """True when the last step has been trained."""
        return self.state.step >= self.parts.run.training.num_steps

    async def run(self) -> None:
        """Run both loops until the last step is trained, or `stop` is called.

        Raises:
            WeightSyncError: weights did not arrive, or a canary failed.
            LearnerLostError: the learner was lost once too often.
            TrainingStalledError: no update is taken any more, or nothing played teaches anything.
            BufferLostError: the buffer died.
            EpisodesFailedError: nearly all that is played in an environment fails.
            Exception: a failed step or an environment that stays unavailable ends the run. A note
                on what is raised says what to continue from.
        """
        try:
            await self._run_and_start_again()
        except Exception as error:
            self._count_breaches()
            _log.warning("the run ends: %s", error)
            error.add_note(await self._save_at_the_end())
            raise
        finally:
            self._forget_step()
            self.parts.folder.stop_clock()

    async def _run_and_start_again(self) -> None:
        """Do what `run` does, with one learner after the other."""
        lost = False
        while True:
            try:
                if lost:
                    await self._start_learner_again()
                return await self._run_until_lost()
            except LearnerLostError as error:
                self._count_loss(error)
                lost = True

    async def _run_until_lost(self) -> None:
        """Do what `run` does, with the learner that is there."""
        parts = self.parts
        self._sampling = SamplingLoop(parts.run, self._mixture, parts.workers, parts.buffer)
        self._delivery = Delivery(
            parts.learners,
            parts.workers,
            parts.canary,
            parts.run.weights.timeout_s,
            self._note_delivery,
        )
        async with Tasks() as tasks:
            tasks.start(self._watch_environments())
            await self._run_loops(tasks)

    async def _run_loops(self, tasks: Tasks) -> None:
        folder, state = self.parts.folder, self.state
        await self._delivery.publish(state.step, tasks)
        await self._delivery.settled()
        await self._sampling.restore(state)
        state.forget_under_way()
        if not self._clock_runs:
            await self.between_steps(None)
        if state.step == 0 and not state.start:
            await self._evaluate()
        if not self._clock_runs:
            folder.start_clock()
            self._clock_runs = True
        folder.phase(Phase.TRAIN, state.step)
        tasks.start(self._sampling.run(tasks))
        await self._training_loop(tasks)
        await self.save_checkpoint()

    async def _training_loop(self, tasks: Tasks) -> None:
        training = self.parts.run.training
        progress = Progress(self.parts.run, self._sampling.in_words)
        while not self.finished:
            started = time.monotonic()
            taken = await self._take_batch(progress)
            if taken is None:
                return
            step = await self._train(taken, time.monotonic() - started, tasks)
            if self._is_due(self.parts.run.eval.every_steps):
                step = replace(step, evaluation=await self._evaluate())
            if self._is_due(training.checkpoint_every_steps):
                await self.save_checkpoint()
                self.parts.folder.phase(Phase.TRAIN, self.state.step)
            await self.between_steps(step)
            if self._stopping.is_set():
                return

    async def _train(self, taken: TakenBatch, wait_s: float, tasks: Tasks) -> Step:
        """What training on the batch came to; the new weights are on their way."""
        step = self._step = _StepUnderWay(taken, wait_s)
        step.training = asyncio.create_task(self._train_on(step))
        # When something else fails meanwhile, the learner is in this step all the same.
        await asyncio.shield(step.training)
        trained = time.monotonic()
        num_bytes = await self._delivery.publish(self.state.step, tasks)
        done = self._record(step, publish_s=time.monotonic() - trained, sync_bytes=num_bytes)
        assert step.metrics is not None
        self._judge_updates(step.metrics)
        return done

    async def _train_on(self, step: _StepUnderWay) -> None:
        begun = time.monotonic()
        coefs = coefficients(self.parts.run, self.state.step)
        step.metrics = await self.parts.learners.train_step(step.taken.batch, coefs)
        step.train_s = time.monotonic() - begun
        self.state.step += 1

    async def _take_batch(self, progress: Progress) -> TakenBatch | None:
        """The next batch; None when the run is to stop.

        Raises:
            TrainingStalledError: nothing that is played teaches anything any more.
            EpisodesFailedError: nearly all that is played in an environment fails.
            UnavailableError: an environment stays unavailable for longer than it may.
        """
        while not self._stopping.is_set():
            taken = await self.parts.buffer.take(self.state.step, _TAKE_TIMEOUT_S)
            progress.observe(taken.counts, time.monotonic(), taken=bool(taken.groups))
            if taken.groups:
                return taken
        return None

    async def _note_delivery(self, delivered: Delivered) -> None:
        parts, state = self.parts, self.state
        state.weight_syncs += 1
        state.canary_max_error = max(state.canary_max_error, delivered.worst_error)
        self._deliver_s += delivered.duration_s
        self._count_breaches()
        parts.folder.delivered(delivered.version, parts.workers.held_weights)
        await self._sampling.hold(delivered.version)

    def _count_breaches(self) -> None:
        """Count the canary prompts that were answered wrongly since the last time."""
        while self._num_breaches < self.parts.workers.num_breaches:
            self._num_breaches += 1
            self.state.canary_failures += 1
            self.parts.folder.happened(self.state.step, TrainMetric.NUM_CANARY_FAILURES)

    async def _watch_environments(self) -> None:
        while self.parts.servers:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            for name, server in self.parts.servers.items():
                if not server.is_running:
                    _log.warning("the server of environment '%s' died; starting it again", name)
                    self.state.environment_restarts += 1
                    self.parts.folder.happened(
                        self.state.step, TrainMetric.NUM_ENVIRONMENT_RESTARTS
                    )
                    await asyncio.to_thread(server.restart)

    def _is_due(self, every_steps: int) -> bool:
        return not self.finished and self.state.step % every_steps == 0

    async def _evaluate(self) -> dict[str, EvalReport] | None:
        run, state, folder = self.parts.run, self.state, self.parts.folder
        if run.eval.num_games_during == 0:
            return None
        # It is this step's weights that are judged, and not on some workers those before.
        await self._delivery.settled()
        folder.phase(Phase.EVALUATE, state.step)
        reports = await self.parts.evaluator.judge(run.eval.num_games_during)
        if state.step == 0:
            state.start = {name: report.policy for name, report in reports.items()}
            self._mixture.expect_success(state.start)
        for name, report in reports.items():
            folder.evaluated(state.step, state.games_trained, name, report)
        folder.phase(Phase.TRAIN, state.step)
        # The workers were not idle: they played the evaluation's games.
        self._sampling.take_idle_s()
        return reports

    def _record(self, step: _StepUnderWay, *, publish_s: float = 0.0, sync_bytes: int = 0) -> Step:
        """The step, which has been trained, counted and written down."""
        assert step.metrics is not None
        self._step = None
        state, taken = self.state, step.taken
        counts = total(taken.counts.values())
        state.games_trained += sum(group.num_scored for group in taken.groups)
        state.games_played += counts.num_episodes
        state.episodes_lost += counts.num_lost
        state.episodes_failed += counts.num_failed
        state.num_groups_rolled_back += counts.num_rolled_back_groups
        staleness = [group.staleness for group in taken.groups]
        state.max_staleness_seen = max(state.max_staleness_seen, *staleness)
        opened = self._mixture.observe(taken.counts)
        times = StepTimes(
            wait_s=step.wait_s,
            train_s=step.train_s,
            publish_s=publish_s,
            deliver_s=self._deliver_s,
            rollout_idle_s=self._sampling.take_idle_s(),
            sync_bytes=sync_bytes,
        )
        self._deliver_s = 0.0
        values = train_values(
            taken, step.metrics, times, state.canary_max_error, self._mixture.num_open
        )
        self.parts.folder.trained(state.step, state.games_trained, values)
        if opened is not None:
            self.parts.folder.opened(state.step, state.games_trained, opened)
        said = self.parts.folder.said(
            state.step, [one for group in taken.groups for one in group.transcripts]
        )
        return Step(state.step, values.run, values.environments, said, evaluation=None)

    def _judge_updates(self, metrics: StepMetrics) -> None:
        """Say that updates were skipped.

        Raises:
            TrainingStalledError: none is taken any more.
        """
        if metrics.num_skipped_updates:
            _log.warning(
                "step %d: %d of its updates skipped, their gradients were not finite",
                self.state.step,
                metrics.num_skipped_updates,
            )
        if metrics.num_skipped_in_a_row >= _MAX_SKIPPED_UPDATES:
            raise TrainingStalledError(
                f"the gradients of {metrics.num_skipped_in_a_row} updates in a row were not "
                "finite, so none of them was taken; lower learner.learning_rate or "
                "learner.max_grad_norm, and look at mismatch_kl in metrics.jsonl"
            )

    async def settled(self) -> None:
        """Wait until all workers sample from the newest weights; to be called between two steps."""
        await self._delivery.settled()

    async def save_checkpoint(self) -> None:
        """Write a checkpoint; to be called between two steps."""
        await self._delivery.settled()
        await self._write_checkpoint()

    async def _write_checkpoint(self) -> None:
        parts = self.parts
        parts.folder.phase(Phase.SAVE_CHECKPOINT, self.state.step)
        begun = time.monotonic()
        state = await self._state_to_save()
        with parts.checkpoints.writing(state.step) as aside:
            written = await parts.learners.save(learner_folder(aside), model_folder(aside))
            await parts.checkpoints.commit(aside, state, written)
        self._saved_step = state.step
        parts.folder.saved(state.step, time.monotonic() - begun)

    async def _state_to_save(self) -> RunState:
        """A copy of the state, with all that is under way: sampling goes on while it is written."""
        try:
            under_way = await self._sampling.under_way()
        except BufferLostError:
            outside = self._sampling.outside_buffer()
            state = self.state.model_copy(deep=True)
            state.unfinished_groups += outside
            return state
        state = self.state.model_copy(deep=True)
        state.unfinished_groups = under_way.unfinished
        state.buffered_groups = under_way.finished
        state.counts = under_way.counts
        return state

    async def _save_at_the_end(self) -> str:
        """What a run that has failed continues from: a checkpoint of now, if the learner lives.

        The tasks of the run have ended. A batch that was taken and not begun is lost.
        """
        try:
            async with asyncio.timeout(_LAST_CHECKPOINT_TIMEOUT_S):
                await self._end_step()
                if self.state.step > self._saved_step:
                    async with asyncio.timeout(_LEARNER_ANSWERS_WITHIN_S):
                        await self.parts.learners.ping()
                    await self._write_checkpoint()
        except Exception as failure:  # noqa: BLE001 - the run ends with what was wrong first
            reason = str(getattr(failure, "cause", None) or failure) or type(failure).__name__
            _log.warning("no checkpoint of step %d can be written: %s", self.state.step, reason)
        checkpoints = self.parts.checkpoints.newest_first()
        if not checkpoints:
            return "there is no checkpoint to continue from"
        step = step_of(checkpoints[0])
        return f"continue with --resume from step {step}, of which there is a checkpoint"

    async def _end_step(self) -> None:
        """Bring the step that the learner is in to its end."""
        step = self._step
        if step is not None and step.training is not None:
            await asyncio.shield(step.training)
            self._record(step)

    def _forget_step(self) -> None:
        """Wait for no step any more."""
        step, self._step = self._step, None
        if step is not None and step.training is not None:
            step.training.cancel()

    def _count_loss(self, error: LearnerLostError) -> None:
        """Count a lost learner; raise when it may not be started once more."""
        allowed = self.parts.run.training.max_learner_restarts
        # An error that crossed a Ray actor carries its traceback in the text.
        reason = getattr(error, "cause", None) or error
        if self.state.learner_restarts >= allowed:
            raise LearnerLostError(
                f"{reason}; it was restarted {self.state.learner_restarts} times, and "
                f"training.max_learner_restarts = {allowed}; see trainer.log for what the ranks "
                "died of, and continue with --resume"
            ) from error
        self.state.learner_restarts += 1
        _log.warning("the learner is lost (%s); restarting it", reason)

    async def _start_learner_again(self) -> None:
        """Take learner and state back to the newest checkpoint that can be read."""
        parts, state = self.parts, self.state
        self._forget_step()
        # Until it stands there again: what it holds meanwhile belongs to no step.
        self._saved_step = state.step
        earlier = await self._restarted_learner()
        self._saved_step = earlier.step
        trained_since = state.step - earlier.step
        state.num_groups_rolled_back += trained_since * parts.run.training.groups_per_step
        self._mixture.go_back_to(earlier.mixture)
        state.go_back_to(earlier)
        # Late comers of the old index must not be taken for the group that is played again.
        state.unfinished_groups = [self._mixture.renewed(s) for s in earlier.unfinished_groups]
        parts.folder.rewind(state.step)
        parts.folder.happened(state.step, TrainMetric.NUM_LEARNER_RESTARTS)
        _log.warning("training continues from step %d", state.step)

    async def _restarted_learner(self) -> RunState:
        """Where the run stood when the learner, which is started again, was saved.

        Raises:
            CheckpointError: there are checkpoints, but none can be read.
        """
        learners, failure = self.parts.learners, None
        for checkpoint in self.parts.checkpoints.newest_first():
            try:
                check_whole(checkpoint)
                earlier = read_state(checkpoint)
                await learners.restart(learner_folder(checkpoint))
            except CheckpointError as error:
                _log.warning("%s", getattr(error, "cause", None) or error)
                failure = error
            else:
                return earlier
        if failure is not None:
            raise failure
        await learners.restart(None)
        return RunState()
