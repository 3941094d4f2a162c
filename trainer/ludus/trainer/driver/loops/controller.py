"""The two loops of a run, and its recovery from failures.

                     at most (delivered version + S + 1) * B groups
    sampling loop -------------------------------------------------------+
      consumes   capacity of GroupAdmission     (waits; unblocked by a   |
      produces   finished groups, to the buffer  delivery, or a group    |
                                                 that must be replaced)  v
                                                                      buffer
    training loop <-------------------------------------------------------
      consumes   B groups                       (waits; unblocked by finished groups)
      produces   weights version + 1            (waits for the previous delivery)
                          |
    delivery <------------+
      brings the version to every rollout worker during the next training step; the version is then
      the delivered version

    environment watch: restarts local servers that died. Nothing waits for it: the sessions of a
      dead server are lost, and clients reconnect automatically.

With a staleness limit S = 1, learner and workers run at the same time:

    learner    | step t     |pub| step t + 1   |pub| step t + 2
    delivery   |            |   | t + 1 ....|  |   | t + 2 ....|
    workers    | play groups of version t      | t + 1 ........     batch t + 1 is there already

With S = 0, batch t + 1 is played only with version t + 1: learner and workers take turns.

Each loop waits for the other only through GroupAdmission and the buffer. GroupAdmission keeps
sampling at most S versions ahead. Training waits for B groups in the buffer. A group that
will not be trained on gives its capacity back, so the buffer always fills again and there is no
deadlock. If no worker loads the delivered weights, the run ends with an error at once. If only some
workers fail to load them, these workers get no groups.

When the learner is lost, all tasks above end. Its ranks restart from the latest checkpoint, and the
tasks start again as after a resume, in the same process. Groups that started after it are not
trained on: `GroupBuffer.restore` keeps only the groups of the checkpoint and refuses late ones. No
group index is used twice. Version numbers are used again with different weights. But no group of an
old version can be in the buffer, and workers distinguish weights by their hash.

When anything else ends the run, the learner finishes its current step. If the learner is alive, the
controller then saves a checkpoint, without the buffer's groups if the buffer is lost. It raises the
first error, even if the checkpoint fails too.

Training pauses for a checkpoint between two steps. The checkpoint contains the learner's state and
the waiting groups, and lists the groups being played, which a resumed run plays again.

A stop request lets the current step or evaluation finish within its grace period, and then abandons
it: the learner returns to the state before the step, and the step's groups return to the buffer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from ludus.proto.errors import LearnerLostError
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import DeliverySpan, EvalReport, Phase
from ludus.trainer.core.output import warn_user
from ludus.trainer.core.stopping import StopRequest, check_skipped_updates
from ludus.trainer.core.tasks import CancellingTaskGroup, wait_for_first
from ludus.trainer.data.buffer import TakenBatch
from ludus.trainer.data.mixture import Mixture
from ludus.trainer.data.progress import ProgressMonitor
from ludus.trainer.driver.loops.checkpointing import Checkpointing
from ludus.trainer.driver.loops.components import Components
from ludus.trainer.driver.loops.delivery import Delivery
from ludus.trainer.driver.loops.sampling import SamplingLoop
from ludus.trainer.driver.loops.step_values import (
    StepTimes,
    compute_step_values,
    count_batch,
    make_trace,
)
from ludus.trainer.driver.loops.step_warnings import StepWarnings
from ludus.trainer.driver.loops.steps import Step, StepGate
from ludus.trainer.learner.abandonment import AbandonedStep
from ludus.trainer.learner.step_metrics import StepMetrics
from ludus.trainer.run.checkpoint import RunState
from ludus.trainer.run.schedule import compute_coefficients

_log = logging.getLogger(__name__)

_TAKE_TIMEOUT_S = 1.0
_WATCH_INTERVAL_S = 0.2


@dataclass(eq=False, slots=True)
class _RunningStep:
    """A training step from its batch to its row of metrics; it cannot be interrupted."""

    batch: TakenBatch
    times: StepTimes
    metrics: StepMetrics | None = None
    """Metrics of the step; None until the learner has trained on the batch."""
    abandonment: AbandonedStep | None = None
    """Outcome of the step if it was abandoned."""
    training_task: asyncio.Task[None] | None = None


class Controller:
    """Runs the loops of a run until its last step, or until a stop is requested.

    Args:
        state: state from which the run starts; updated in place.
        gate: gate at which training waits before the first step and after each step.
    """

    learner_ping_timeout_s = 60.0
    last_checkpoint_timeout_s = 900.0
    """Time limit after a failure for the learner's current step and the checkpoint after it."""

    def __init__(
        self,
        components: Components,
        state: RunState,
        stop_request: StopRequest | None = None,
        gate: StepGate | None = None,
    ) -> None:
        self.components = components
        self.state = state
        self.stop_request = stop_request or StopRequest()
        self._gate = gate or StepGate(is_open=True)
        self._mixture = Mixture(components.run, state.mixture, components.num_tasks)
        self._step: _RunningStep | None = None
        """The learner's current step; None between two steps."""
        self._checkpointing = Checkpointing(components, state.step)
        self._train_s = 0.0
        """Duration of the learner's latest step."""
        self.is_step_abandoned = False
        """True if the run stopped in the middle of a step."""
        self._is_state_lost = False
        """True if the learner's state is useless, because a step was abandoned without a copy."""
        self._deliveries: list[DeliverySpan] = []
        """Deliveries that finished since the last step."""
        self._warnings = StepWarnings(components.run)
        self._num_recorded_breaches = 0
        """Number of failed canary checks that `state` already counts."""
        self._has_started = False

    @property
    def is_finished(self) -> bool:
        """True after the last step was trained."""
        return self.state.step >= self.components.run.training.num_steps

    async def run(self) -> None:
        """Run both loops until the last step is trained, or a stop is requested.

        Raises:
            WeightSyncError: weights did not arrive, or a canary failed.
            LearnerLostError: the learner was lost more often than allowed.
            TrainingStalledError: all updates are skipped, or no group is useful for training.
            BufferLostError: the buffer died.
            EpisodesFailedError: nearly all episodes in an environment fail.
            Exception: a step failed, or an environment stayed unavailable. A note on the exception
                says from which checkpoint the run can continue.
        """
        try:
            await self._run_with_restarts()
        except Exception as error:
            self._record_breaches()
            _log.warning("the run stops: %s", error)
            error.add_note(await self._save_after_failure())
            raise
        finally:
            self._discard_step()
            self.components.metrics.clock.stop()

    async def wait_for_delivery(self) -> None:
        """Wait until all workers sample from the newest weights; call it between two steps."""
        await self._delivery.wait()

    async def save_checkpoint(self) -> None:
        """Write a checkpoint; call it between two steps."""
        await self._wait_unless_overdue(asyncio.create_task(self._delivery.wait()))
        await self._checkpointing.save(self.sampling, self.state)

    async def _run_with_restarts(self) -> None:
        is_learner_lost = False
        while True:
            try:
                if is_learner_lost:
                    await self._restart_from_checkpoint()
                return await self._run_loops()
            except LearnerLostError as error:
                self._count_learner_loss(error)
                is_learner_lost = True

    async def _run_loops(self) -> None:
        components, metrics, state = self.components, self.components.metrics, self.state
        run, learners, workers = components.run, components.learners, components.workers
        self.sampling = SamplingLoop(run, self._mixture, workers, components.buffer)
        self._delivery = Delivery(
            learners, workers, components.canary, run.weights.timeout_s, self._record_delivery
        )
        async with CancellingTaskGroup() as tasks:
            tasks.start(self._watch_environments())
            await self._delivery.publish(state.step, tasks)
            await self._wait_unless_overdue(asyncio.create_task(self._delivery.wait()))
            await self.sampling.restore(state)
            state.clear_groups()
            if not self._has_started:
                await self._gate.wait(None)
            if state.step == 0 and not state.start_results:
                state.is_evaluation_due = True
            await self._evaluate_if_due()
            if not self._has_started:
                metrics.clock.start()
                self._has_started = True
            metrics.log_phase(Phase.TRAIN, state.step)
            tasks.start(self.sampling.run(tasks))
            await self._run_training_loop(tasks)
            if not (self._is_state_lost or self._checkpointing.has_saved(state.step)):
                await self.save_checkpoint()

    async def _run_training_loop(self, tasks: CancellingTaskGroup) -> None:
        run = self.components.run
        num_groups = self.state.num_zero_variance_groups
        progress = ProgressMonitor(run, self.sampling.describe, num_groups)
        while not self.is_finished:
            start_s = time.monotonic()
            batch = await self._take_batch(progress)
            if batch is None:
                return
            step = await self._train(batch, time.monotonic() - start_s, tasks)
            if step is None:
                return
            self._checkpointing.schedule.end_step()
            if not self.is_finished:
                self.state.is_evaluation_due = self.state.step % run.eval.every_steps == 0
            step = replace(step, evaluation=await self._evaluate_if_due())
            if not self.is_finished and self._checkpointing.is_due(self.state.step):
                await self.save_checkpoint()
                self.components.metrics.log_phase(Phase.TRAIN, self.state.step)
            await self._gate.wait(step)
            if self.stop_request.is_set:
                return

    async def _take_batch(self, progress: ProgressMonitor) -> TakenBatch | None:
        """Return the next batch; None if a stop is requested."""
        while not self.stop_request.is_set:
            batch = await self.components.buffer.take(self.state.step, _TAKE_TIMEOUT_S)
            progress.observe(
                batch.counts,
                time.monotonic(),
                is_taken=bool(batch.groups),
                has_variance=batch.has_variance,
            )
            if batch.groups:
                self.state.num_zero_variance_groups = progress.num_zero_variance_groups
                return batch
        return None

    async def _train(
        self, batch: TakenBatch, wait_s: float, tasks: CancellingTaskGroup
    ) -> Step | None:
        """Train on a batch and start the delivery of the new weights.

        Returns:
            the step; None if it was abandoned.
        """
        step = self._step = _RunningStep(batch, StepTimes(wait_s))
        step.training_task = asyncio.create_task(self._train_on_batch(step))
        await self._abandon_when_overdue(step.training_task)
        # If something else fails now, the learner still finishes this step.
        await asyncio.shield(step.training_task)
        if step.abandonment is not None:
            await self._put_back(step)
            return None
        start_s, num_bytes = time.monotonic(), 0
        if self.is_finished or not self.stop_request.is_set:
            num_bytes = await self._delivery.publish(self.state.step, tasks)
        publish_s = time.monotonic() - start_s
        step.times = replace(step.times, publish_s=publish_s, sync_bytes=num_bytes)
        recorded_step = self._record_step(step)
        assert step.metrics is not None
        self._check_updates(step.metrics)
        return recorded_step

    async def _train_on_batch(self, step: _RunningStep) -> None:
        start_s, batch = time.monotonic(), step.batch.batch
        run, state, learners = self.components.run, self.state, self.components.learners
        assert batch is not None
        is_step_long = self._train_s > run.training.stop_grace_s
        outcome = await learners.train_step(
            batch,
            compute_coefficients(run, state.step, state.entropy),
            keeps_restore_point=is_step_long and state.step != self._checkpointing.saved_step,
            wait_for_fetches=self._delivery.wait,
        )
        state.reduced_max_tokens = learners.reduced_max_tokens
        if isinstance(outcome, AbandonedStep):
            step.abandonment = outcome
            return
        step.metrics, self._train_s = outcome, time.monotonic() - start_s
        step.times = replace(step.times, train_s=self._train_s)
        state.end_step(run.algorithm, outcome.entropy)

    async def _abandon_when_overdue(self, training_task: asyncio.Task[None]) -> None:
        """Wait until the learner's step has ended; after a stop request, end it early."""
        learners, request = self.components.learners, self.stop_request
        if await self._wait_unless_overdue(training_task):
            return
        # A step whose start is the latest checkpoint can be trained again from there.
        await learners.abandon_step(
            discards_state=request.is_hurried or self.state.step == self._checkpointing.saved_step
        )
        if await wait_for_first(training_task, request.wait_until_hurried()):
            return
        await learners.abandon_step(discards_state=True)

    async def _wait_unless_overdue(self, task: asyncio.Task[Any]) -> bool:
        """Wait for a task until a stop is overdue; return whether the task is done."""
        return await wait_for_first(task, self.stop_request.wait_until_overdue())

    async def _put_back(self, step: _RunningStep) -> None:
        """Return the groups of an abandoned step to the buffer, for the checkpoint."""
        assert step.abandonment is not None
        self._step, self.is_step_abandoned = None, True
        self._is_state_lost = not step.abandonment.is_restored
        await self.components.buffer.put_back(step.batch.counts)

    def _record_step(self, step: _RunningStep) -> Step:
        """Count a trained step, write its metrics, and return it."""
        assert step.metrics is not None
        self._step = None
        state, batch, metrics = self.state, step.batch, self.components.metrics
        count_batch(state, batch)
        self._mixture.start_step()
        new_environment = self._mixture.observe(batch.counts)
        deliveries, self._deliveries = self._deliveries, []
        idle_s = self.sampling.take_idle_s()
        times = replace(step.times, deliveries=tuple(deliveries), rollout_idle_s=idle_s)
        run_values, environment_values = compute_step_values(
            batch, step.metrics, times, state.canary_max_error, self._mixture.num_open
        )
        self._warnings.observe(state.step, batch)
        metrics.log_step(state.step, state.games_trained, run_values, environment_values)
        metrics.log_trace(make_trace(state.step, times, self.sampling.take_plays()))
        if new_environment is not None:
            _log.info("step %d: the curriculum opens environment '%s'", state.step, new_environment)
            metrics.log_event(
                state.step,
                {TrainMetric.NUM_UNLOCKS: 1},
                num_games_trained=state.games_trained,
                environment=new_environment,
            )
        batch_transcripts = [text for group in batch.groups for text in group.transcripts]
        transcripts = metrics.log_transcripts(state.step, batch_transcripts)
        return Step(state.step, run_values, environment_values, transcripts, evaluation=None)

    def _check_updates(self, metrics: StepMetrics) -> None:
        """Log skipped updates; fail after too many in a row."""
        if metrics.num_skipped_updates:
            _log.warning(
                "step %d: %d updates were skipped, because their gradients were not finite",
                self.state.step,
                metrics.num_skipped_updates,
            )
        check_skipped_updates(
            metrics.num_skipped_in_a_row,
            "lower learner.learning_rate or learner.max_grad_norm, and check mismatch_kl in "
            "metrics.jsonl",
        )

    async def _record_delivery(self, delivery: DeliverySpan, max_error: float) -> None:
        self.state.weight_syncs += 1
        self.state.canary_max_error = max(self.state.canary_max_error, max_error)
        self._deliveries.append(delivery)
        self._record_breaches()
        weights = self.components.workers.weights_by_worker
        self.components.metrics.log_delivery(delivery.version, weights)
        await self.sampling.set_delivered_version(delivery.version)

    def _record_breaches(self) -> None:
        """Record the canary checks that failed since the last call."""
        while self._num_recorded_breaches < self.components.workers.num_breaches:
            self._num_recorded_breaches += 1
            self.state.canary_failures += 1
            self.components.metrics.log_event(self.state.step, {TrainMetric.NUM_CANARY_FAILURES: 1})

    async def _watch_environments(self) -> None:
        servers, state, metrics = self.components.servers, self.state, self.components.metrics
        while servers:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            for name, server in servers.items():
                if not server.is_running:
                    _log.warning("the server of environment '%s' died; restarting it", name)
                    state.environment_restarts += 1
                    metrics.log_event(state.step, {TrainMetric.NUM_ENVIRONMENT_RESTARTS: 1})
                    await asyncio.to_thread(server.restart)

    async def _evaluate_if_due(self) -> dict[str, EvalReport] | None:
        """Evaluate the policy if that is due or was prevented by a stop; else return None."""
        state, metrics = self.state, self.components.metrics
        num_games = self.components.run.eval.num_games_during
        if num_games == 0:
            state.is_evaluation_due = False
        if not state.is_evaluation_due or self.stop_request.is_set:
            return None
        await self._delivery.wait()  # all workers must use this step's weights
        metrics.log_phase(Phase.EVALUATE, state.step)
        evaluation_task = asyncio.create_task(self._evaluate(num_games))
        try:
            if not await self._wait_unless_overdue(evaluation_task):
                return None
            reports = evaluation_task.result()
        finally:
            evaluation_task.cancel()
        state.is_evaluation_due = False
        if state.step == 0:
            state.start_results = {name: report.policy for name, report in reports.items()}
            self._mixture.warn_if_success_is_missing(state.start_results)
        for name, report in reports.items():
            metrics.log_evaluation(state.step, state.games_trained, name, report)
        metrics.log_phase(Phase.TRAIN, state.step)
        # The workers were not idle: they played the episodes of the evaluation.
        self.sampling.take_idle_s()
        return reports

    async def _evaluate(self, num_games: int) -> dict[str, EvalReport]:
        evaluator, step = self.components.evaluator, self.state.step
        with self.components.metrics.clock.pause():
            reports = await evaluator.evaluate(num_games)
            if step == 0:
                self.components.metrics.log_samples(step, await evaluator.play_samples())
        return reports

    async def _save_after_failure(self) -> str:
        """Save a checkpoint if the learner is alive; return a note on how to continue the run.

        The tasks of the run have ended. A batch that was taken but not started is lost.
        """
        try:
            async with asyncio.timeout(self.last_checkpoint_timeout_s):
                await self._finish_step()
                if self.state.step > self._checkpointing.saved_step and not self._is_state_lost:
                    async with asyncio.timeout(self.learner_ping_timeout_s):
                        await self.components.learners.ping()
                    await self._checkpointing.save(self.sampling, self.state)
        except Exception as failure:  # noqa: BLE001 - the run must raise its first error
            reason = str(getattr(failure, "cause", None) or failure) or type(failure).__name__
            _log.warning("no checkpoint of step %d can be written: %s", self.state.step, reason)
        return self._checkpointing.describe_newest()

    async def _finish_step(self) -> None:
        """Wait until the learner has finished its current step, and record the step."""
        step = self._step
        if step is not None and step.training_task is not None:
            await asyncio.shield(step.training_task)
            if step.abandonment is None:
                self._record_step(step)
            else:
                await self._put_back(step)

    def _discard_step(self) -> None:
        """Stop waiting for the learner's current step."""
        step, self._step = self._step, None
        if step is not None and step.training_task is not None:
            step.training_task.cancel()

    def _count_learner_loss(self, error: LearnerLostError) -> None:
        """Count a lost learner; fail if it may not restart again."""
        max_restarts = self.components.run.training.max_learner_restarts
        # Ray adds the traceback to the message of an error from an actor, but not to its cause.
        reason = getattr(error, "cause", None) or error
        if self.state.learner_restarts >= max_restarts:
            raise LearnerLostError(
                f"{reason}; the learner was restarted {self.state.learner_restarts} times, and "
                f"training.max_learner_restarts = {max_restarts}; see trainer.log for the reason "
                "why the ranks died"
            ) from error
        self.state.learner_restarts += 1
        _log.warning("the learner is lost (%s); restarting it", reason)

    async def _restart_from_checkpoint(self) -> None:
        """Restart the learner and roll the state back to the newest readable checkpoint."""
        components, state = self.components, self.state
        self._discard_step()
        # Until the restart is complete, no checkpoint may be written.
        self._checkpointing.saved_step = state.step
        checkpoint_state = await self._checkpointing.restart_learner()
        self._checkpointing.saved_step = checkpoint_state.step
        num_lost_steps = state.step - checkpoint_state.step
        state.num_groups_rolled_back += num_lost_steps * components.run.training.groups_per_step
        self._mixture.roll_back(checkpoint_state.mixture)
        state.roll_back(checkpoint_state)
        # New indices, so that late groups with old indices are not mistaken for the replayed ones.
        state.unfinished_groups = [
            self._mixture.reissue_group(spec) for spec in checkpoint_state.unfinished_groups
        ]
        components.metrics.rewind(state.step)
        components.metrics.log_event(state.step, {TrainMetric.NUM_LEARNER_RESTARTS: 1})
        warn_user(
            f"the learner was lost: training continues from the checkpoint of step {state.step}, "
            f"and trains {num_lost_steps} steps again"
        )
