"""The two loops of a run.

                     admits at most (version + S + 1) * B groups in all
    rollout slot --------------------------------------------------------+
      consumes   places of Admission            (waits; unblocked by a   |
      produces   finished groups, to the buffer  new version, or a group |
                                                 that must be replaced)  v
                                                                      buffer
    training loop <-------------------------------------------------------
      consumes   B groups                       (waits; unblocked by the rollout slots)
      produces   weights version + 1, to every rollout worker

    environment watch: restarts a local server that died; nobody waits for it, sessions of the
    dead server are lost, clients reconnect by themselves.

Neither loop waits for the other except through Admission (sampling must not run further ahead
than S versions) and the buffer (training needs B groups). A group that will not be trained on
(dead, void, too old) gives its place back, so the buffer always fills again: no deadlock.

Between two steps the run stands still for a checkpoint: what trained is in the learner, what
waits is in the buffer, what is being played is a list of group numbers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, field

from ludus.env.local_server import LocalServer
from ludus.proto.config import RunConfig
from ludus.proto.errors import CanaryError, TrainingStalledError
from ludus.proto.runs import Phase
from ludus.trainer.actors.buffer import TakenGroups
from ludus.trainer.actors.groups import Buffer, LearnerGroup, RolloutWorkers
from ludus.trainer.checkpoint import CheckpointFolder, RunState, learner_folder, model_folder
from ludus.trainer.data.admission import Admission
from ludus.trainer.data.batch import make_batch, shuffle_rewards
from ludus.trainer.data.buffer import RolloutCounts
from ludus.trainer.evaluation import Evaluator
from ludus.trainer.learner.learner import StepMetrics
from ludus.trainer.metrics import StepTimes, train_values
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.rollout.group import group_seeds
from ludus.trainer.run_folder import RunFolder
from ludus.trainer.schedule import coefficients
from ludus.trainer.types import GroupSpec, Probe

_log = logging.getLogger(__name__)

_SLOTS_PER_WORKER = 4
_TAKE_TIMEOUT_S = 1.0
_WATCH_INTERVAL_S = 0.2
_MAX_DEAD_BATCHES = 100


@dataclass(slots=True)
class Parts:
    """What a run is made of; every choice was made when these were built."""

    run: RunConfig
    folder: RunFolder
    checkpoints: CheckpointFolder
    learners: LearnerGroup
    workers: RolloutWorkers
    buffer: Buffer
    evaluator: Evaluator
    chat: ChatTokenizer
    probe: Probe
    server: LocalServer | None
    """The environment server that this run owns."""


@dataclass(slots=True)
class Controller:
    """Runs both loops from `state` to the last step, or until `stop` is called."""

    parts: Parts
    state: RunState
    _admission: Admission = field(init=False)
    _waiting: deque[int] = field(init=False)
    """Groups to begin before new ones: those an earlier process had not finished."""
    _playing: set[int] = field(init=False, default_factory=set)
    _changed: asyncio.Condition = field(init=False, default_factory=asyncio.Condition)
    _stopping: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        training = self.parts.run.training
        num_admitted = self.state.step * training.groups_per_step + len(self.state.buffered_groups)
        self._admission = Admission(training.groups_per_step, training.max_staleness, num_admitted)
        self._waiting = deque(self.state.unfinished_groups)

    def stop(self) -> None:
        """Nothing; the run ends after the step it is in, with a checkpoint."""
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
        """Nothing; the run has ended well, or was stopped.

        Raises:
            WeightSyncError: weights did not arrive, or a canary failed.
            Exception: a failed step or an environment that stays away ends the run.
        """
        await self._sync_weights()
        await self.parts.buffer.put(self.state.buffered_groups)
        if self.state.step == 0:
            await self._evaluate()
        self.parts.folder.start_clock()
        self.parts.folder.phase(Phase.TRAIN, self.state.step)
        background = [asyncio.create_task(self._watch_environment())]
        for worker in range(len(self.parts.workers)):
            background += [
                asyncio.create_task(self._rollout_slot(worker)) for _ in range(_SLOTS_PER_WORKER)
            ]
        try:
            await _first_failure(self._training_loop(), background)
        finally:
            self.parts.folder.stop_clock()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        await self._save_checkpoint()

    async def _rollout_slot(self, worker: int) -> None:
        """One of a worker's places for a chunk of groups: admit, play, repeat."""
        rollout = self.parts.run.rollout
        chunk = max(1, rollout.num_groups_in_flight // _SLOTS_PER_WORKER)
        while True:
            specs = await self._admit(chunk)
            num_refused = await self.parts.workers.play(worker, specs)
            self._playing.difference_update(spec.index for spec in specs)
            await self._give_back(num_refused)

    async def _training_loop(self) -> None:
        training = self.parts.run.training
        while not self.finished:
            started = time.monotonic()
            taken = await self._take_batch()
            if taken is None:
                return
            waited = time.monotonic()
            metrics, num_games = await self._train_step(taken)
            trained = time.monotonic()
            self.state.step += 1
            num_bytes = await self._sync_weights()
            self._record(
                taken,
                metrics,
                num_games,
                StepTimes(
                    wait_s=waited - started,
                    train_s=trained - waited,
                    sync_s=time.monotonic() - trained,
                    sync_bytes=num_bytes,
                ),
            )
            if self._is_due(self.parts.run.eval.every_steps):
                await self._evaluate()
            if self._is_due(training.checkpoint_every_steps):
                await self._save_checkpoint()
                self.parts.folder.phase(Phase.TRAIN, self.state.step)
            if self._stopping.is_set():
                return

    async def _take_batch(self) -> TakenGroups | None:
        """The next batch's groups; None when the run is to stop.

        Raises:
            TrainingStalledError: nothing that is played teaches anything any more.
        """
        training = self.parts.run.training
        while not self._stopping.is_set():
            taken = await self.parts.buffer.take(
                training.groups_per_step, self.state.step, _TAKE_TIMEOUT_S
            )
            if taken.num_stale:
                await self._give_back(taken.num_stale)
            if taken.groups:
                return taken
            _check_progress(taken.counts, training.groups_per_step)
        return None

    async def _train_step(self, taken: TakenGroups) -> tuple[StepMetrics, int]:
        """What the step did, and the number of games it learned from."""
        run, step = self.parts.run, self.state.step
        groups = taken.groups
        if run.training.shuffle_rewards:
            groups = shuffle_rewards(groups, seed=run.seed * 1_000_003 + step)
        batch = make_batch(groups, run.algorithm)
        metrics = await self.parts.learners.train_step(batch, coefficients(run, step))
        return metrics, batch.num_samples

    async def _sync_weights(self) -> int:
        """The bytes of the version that every worker now samples from."""
        parts, state = self.parts, self.state
        published = await parts.learners.publish(state.step, parts.probe)
        try:
            reports = await parts.workers.load_weights(published, parts.run.weights.timeout_s)
        except CanaryError:
            state.canary_failures += 1
            raise
        state.weight_syncs += 1
        state.canary_max_error = max(state.canary_max_error, *(r.error for r in reports))
        async with self._changed:
            self._changed.notify_all()
        return published.manifest.num_bytes

    async def _admit(self, most: int) -> list[GroupSpec]:
        """Between one and `most` groups that may begin now."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._admission.capacity(self.state.step) > 0)
            number = min(most, self._admission.capacity(self.state.step))
            self._admission.admit(number)
            indices = [self._next_index() for _ in range(number)]
        self._playing.update(indices)
        run = self.parts.run
        shared = run.rollout.group_seed == "shared"
        name = next(iter(run.environments))
        return [
            GroupSpec(i, name, group_seeds(run.seed, i, run.rollout.group_size, shared=shared))
            for i in indices
        ]

    def _next_index(self) -> int:
        if self._waiting:
            return self._waiting.popleft()
        self.state.next_group += 1
        return self.state.next_group - 1

    async def _give_back(self, num_groups: int) -> None:
        async with self._changed:
            self._admission.give_back(num_groups)
            self._changed.notify_all()

    async def _watch_environment(self) -> None:
        server = self.parts.server
        while server is not None:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            if not server.is_running:
                _log.warning("the environment server died; starting it again")
                self.state.environment_restarts += 1
                await asyncio.to_thread(server.restart)

    def _is_due(self, every_steps: int) -> bool:
        return not self.finished and self.state.step % every_steps == 0

    async def _evaluate(self) -> None:
        run, step = self.parts.run, self.state.step
        if run.eval.num_games_during == 0:
            return
        self.parts.folder.phase(Phase.EVALUATE, step)
        report = await self.parts.evaluator.judge(run.eval.num_games_during)
        if step == 0:
            self.state.start = report.policy
        self.parts.folder.evaluated(step, self.state.games_trained, report)
        self.parts.folder.phase(Phase.TRAIN, step)

    def _record(
        self, taken: TakenGroups, metrics: StepMetrics, num_games: int, times: StepTimes
    ) -> None:
        state = self.state
        # The groups were trained on by the weights before this step's update.
        staleness = [state.step - 1 - group.policy_version for group in taken.groups]
        state.games_trained += num_games
        state.games_played += taken.counts.num_episodes
        state.episodes_lost += taken.counts.num_lost
        state.max_staleness_seen = max(state.max_staleness_seen, *staleness)
        values = train_values(taken, metrics, staleness, times, state.canary_max_error)
        self.parts.folder.trained(state.step, state.games_trained, values)

    async def _save_checkpoint(self) -> None:
        parts, state = self.parts, self.state
        parts.folder.phase(Phase.SAVE_CHECKPOINT, state.step)
        playing = sorted(self._playing | set(self._waiting))
        state.buffered_groups = list(await parts.buffer.groups())
        # A group that reached the buffer in between is not played again.
        buffered = {group.index for group in state.buffered_groups}
        state.unfinished_groups = [index for index in playing if index not in buffered]
        aside = parts.checkpoints.begin(state.step)
        await parts.learners.save(learner_folder(aside), model_folder(aside))
        parts.checkpoints.commit(aside, state)


def _check_progress(counts: RolloutCounts, groups_per_step: int) -> None:
    """Nothing; ends a run that would replace groups without end."""
    if counts.num_dead_groups < _MAX_DEAD_BATCHES * groups_per_step:
        return
    num_scored = max(1, counts.num_episodes - counts.num_lost)
    raise TrainingStalledError(
        f"the last {counts.num_dead_groups} groups had equal rewards within each group (mean "
        f"{counts.reward_sum / num_scored:.3g}, {counts.num_invalid / num_scored:.0%} of the "
        "episodes ended in text that was no action), so there is nothing to learn from; lower "
        "learner.learning_rate or algorithm.entropy_coef if the policy collapsed, raise "
        "rollout.group_size or rollout.temperature if it became certain"
    )


async def _first_failure(main: Awaitable[None], background: list[asyncio.Task[None]]) -> None:
    """Nothing, when `main` has ended; a background task that fails ends it with its error."""
    task = asyncio.ensure_future(main)
    waiting: set[asyncio.Future[None]] = {task, *background}
    try:
        # A background task may also end well, and early: nothing is watched for a remote server.
        while not task.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for ended in done - {task}:
                await ended
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
