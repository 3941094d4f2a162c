"""A run without models: real controller, buffer and checkpoints, simulated learner and workers.

    SimulatedLearner   counts its steps, and dies when `die` is called
    SimulatedWorkers   one worker that plays groups as tasks with configurable durations

The complete run uses one event loop and takes milliseconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ludus.proto.config import LanguageModelRun
from ludus.proto.errors import BufferLostError, LearnerLostError
from ludus.proto.runs import EvalReport, MetricsRow, Transcript, read_metrics
from ludus.trainer.actors.buffer import BufferActor
from ludus.trainer.core.interfaces import PublishedWeights
from ludus.trainer.core.tasks import wait_for_first
from ludus.trainer.core.types import (
    Batch,
    Coefficients,
    GroupSpec,
    RolloutGroup,
    SavedFile,
    ScoringRequest,
    WeightManifest,
    make_lost_group,
)
from ludus.trainer.data.buffer import BufferState, GroupSummary, Refusal, TakenBatch
from ludus.trainer.driver.loops.components import Components
from ludus.trainer.driver.loops.controller import Controller
from ludus.trainer.learner.abandonment import AbandonedStep
from ludus.trainer.learner.step_metrics import StepMetrics
from ludus.trainer.run.checkpoint import (
    CheckpointFolder,
    RunState,
    find_newest_checkpoint,
    read_state,
)
from ludus.trainer.run.lifecycle import RunFolder
from ludus.trainer.run.metrics_writer import MetricsWriter
from ludus.trainer.run.schedule import resolve_num_steps
from ludus.trainer.weights.canary import CanaryReport, WorkerWeights
from tests.data.rollouts import make_group

CANARY = (ScoringRequest([1], [2]),)
NUM_SLOTS = 4


class SimulatedBuffer(BufferActor):
    """A buffer in this process that records the groups of each step."""

    def __init__(self, run: LanguageModelRun, batches: dict[int, tuple[GroupSummary, ...]]) -> None:
        super().__init__(run, {})
        self._batches = batches
        self.is_alive = True

    async def begin(
        self, indices: Iterable[int], version: int, final_indices: Container[int] = ()
    ) -> None:
        if self.is_alive:
            await super().begin(indices, version, final_indices)

    async def put(self, groups: Sequence[RolloutGroup]) -> list[Refusal]:
        if not self.is_alive:
            return await asyncio.get_running_loop().create_future()
        return await super().put(groups)

    async def copy_state(self) -> BufferState:
        self._raise_if_lost()
        return await super().copy_state()

    async def take(self, version: int, timeout_s: float) -> TakenBatch:
        self._raise_if_lost()
        taken_batch, batch = await super().take(version, timeout_s)
        if taken_batch.groups:
            self._batches[version] = taken_batch.groups
        return replace(taken_batch, batch=batch)

    def die(self) -> None:
        """Simulate the death of the buffer's process."""
        self.is_alive = False

    def _raise_if_lost(self) -> None:
        if not self.is_alive:
            raise BufferLostError("the buffer died")


async def wait_one_iteration(*_: object) -> None:
    """Wait for one iteration of the event loop."""
    await asyncio.sleep(0)


@dataclass
class SimulatedLearner:
    """A learner whose weights consist of its number of steps and its number of restarts."""

    num_steps: int = 0
    is_alive: bool = True
    on_step: Callable[[int], Any] = wait_one_iteration
    """Hook of each step, called with the step's 0-based index."""
    num_restarts: int = 0
    reduced_max_tokens: int | None = None
    wait_for_fetches: Callable[[], Awaitable[None]] | None = None
    """Argument of the latest step."""
    has_several_updates: bool = False
    """True if a step that has begun can only be abandoned with a restore point."""
    has_restore_point: bool = False
    """True if the latest step has a restore point."""
    _abandon_event: asyncio.Event = field(default_factory=asyncio.Event)

    async def train_step(
        self,
        batch: Batch,
        coefficients: Coefficients,
        *,
        keeps_restore_point: bool = False,
        wait_for_fetches: Callable[[], Awaitable[None]] | None = None,
    ) -> StepMetrics | AbandonedStep:
        self._raise_if_lost()
        self.wait_for_fetches = wait_for_fetches
        self.has_restore_point = keeps_restore_point or not self.has_several_updates
        self._abandon_event.clear()
        step_task = asyncio.ensure_future(self.on_step(self.num_steps))
        if not await wait_for_first(step_task, self._abandon_event.wait()):
            step_task.cancel()
            return AbandonedStep(is_restored=self.has_restore_point)
        step_task.result()
        self._raise_if_lost()
        self.num_steps += 1
        values = {field_info.name: 0.0 for field_info in fields(StepMetrics)}
        values["entropy_coef"] = coefficients.entropy
        return StepMetrics(**values | {"value_loss": None, "explained_variance": None})

    async def abandon_step(self, *, discards_state: bool) -> None:
        if self.has_restore_point or discards_state:
            self._abandon_event.set()

    async def publish(self, version: int, canary: Sequence[ScoringRequest]) -> PublishedWeights:
        self._raise_if_lost()
        assert version == self.num_steps
        content = f"restarts {self.num_restarts} step {self.num_steps}"
        return PublishedWeights(WeightManifest(version, (), content, tuple(canary), ()), ())

    async def score_completions(self, prompts: Sequence[ScoringRequest]) -> list[list[float]]:
        self._raise_if_lost()
        return [[0.0]] * len(prompts)

    async def ping(self) -> None:
        self._raise_if_lost()

    async def save(self, state_folder: Path, model_folder: Path) -> list[SavedFile]:
        self._raise_if_lost()
        state_folder.mkdir()
        await asyncio.sleep(0.002)
        file = state_folder / "steps.json"
        file.write_text(json.dumps(self.num_steps))
        return [SavedFile.from_path(file)]

    async def restart(self, learner_folder: Path | None) -> None:
        self.load(learner_folder)
        self.is_alive = True
        self.num_restarts += 1

    def load(self, learner_folder: Path | None) -> None:
        """Load the number of steps from a checkpoint, or start at 0."""
        file = learner_folder / "steps.json" if learner_folder else None
        self.num_steps = json.loads(file.read_text()) if file else 0

    def die(self) -> None:
        """Raise LearnerLostError in every call until `restart`."""
        self.is_alive = False

    def _raise_if_lost(self) -> None:
        if not self.is_alive:
            raise LearnerLostError("a rank died")


def return_informative_rewards(spec: GroupSpec) -> tuple[float | None, ...]:
    """Return rewards with nonzero variance."""
    return (1.0, -1.0)


@dataclass(frozen=True)
class SimulatedSlot:
    """A slot of the simulated workers."""

    workers: SimulatedWorkers
    release: Callable[[], None]
    max_groups: int = 1
    worker_number: int = 0

    async def play(self, specs: Sequence[GroupSpec]) -> list[Refusal]:
        """Play the slot's group."""
        return await self.workers.play(specs)


@dataclass
class SimulatedWorkers:
    """Rollout workers with slots for one group each."""

    buffer: SimulatedBuffer
    duration_s: Callable[[GroupSpec], float] = lambda spec: 0.001
    rewards: Callable[[GroupSpec], tuple[float | None, ...]] = return_informative_rewards
    kills_worker: Callable[[GroupSpec], bool] = lambda spec: False
    """Predicate that is True if the worker dies while it plays the group."""
    on_delivery: Callable[[PublishedWeights], Any] = wait_one_iteration
    """Hook of each delivery."""
    published_weights: PublishedWeights | None = None
    num_breaches: int = 0
    num_concurrent_deliveries: int = 0
    max_concurrent_deliveries: int = 0
    started_groups: list[tuple[GroupSpec, int]] = field(default_factory=list)
    """Started groups, each with the policy version at its start."""
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(NUM_SLOTS))

    def describe(self) -> str:
        return "1 of 1 rollout workers ready"

    async def acquire_slot(self) -> SimulatedSlot:
        await self._slots.acquire()
        return SimulatedSlot(self, self._slots.release)

    async def play(self, specs: Sequence[GroupSpec]) -> list[Refusal]:
        """Play groups, send them to the buffer, and release a slot."""
        assert len(specs) == 1
        try:
            if any(self.kills_worker(spec) for spec in specs):
                await asyncio.sleep(0.001)
                return await self.buffer.put([make_lost_group(spec) for spec in specs])
            # The worker keeps playing even if the controller stops waiting.
            play_task = asyncio.create_task(self._play_and_put(specs))
            return await asyncio.shield(play_task)
        finally:
            self._slots.release()

    async def load_weights(
        self, weights: PublishedWeights, timeout_s: float
    ) -> list[WorkerWeights]:
        self.num_concurrent_deliveries += 1
        self.max_concurrent_deliveries = max(
            self.max_concurrent_deliveries, self.num_concurrent_deliveries
        )
        try:
            await self.on_delivery(weights)
        finally:
            self.num_concurrent_deliveries -= 1
        self.published_weights = weights
        return list(self.weights_by_worker.values())

    @property
    def weights_by_worker(self) -> dict[int, WorkerWeights]:
        """Weights of the only worker, whose number is 0."""
        if self.published_weights is None:
            return {}
        manifest = self.published_weights.manifest
        report = CanaryReport(manifest.version, manifest.content_hash, error=1e-6)
        return {0: WorkerWeights(report, 0.0, 0.0, 0)}

    async def _play_and_put(self, specs: Sequence[GroupSpec]) -> list[Refusal]:
        return await self.buffer.put(
            await asyncio.gather(*(self.play_group(spec) for spec in specs))
        )

    async def play_group(self, spec: GroupSpec) -> RolloutGroup:
        assert self.published_weights is not None
        version = self.published_weights.manifest.version
        self.started_groups.append((spec, version))
        await asyncio.sleep(self.duration_s(spec))
        group = make_group(*self.rewards(spec), index=spec.index, version=version)
        return RolloutGroup(group.index, spec.environment, group.rollouts)


async def play_no_samples() -> list[Transcript]:
    return []


async def return_no_reports(num_games: int) -> dict[str, EvalReport]:
    """Return the reports of an evaluation without environments."""
    return {}


@dataclass
class SimulatedRun:
    """A run in a folder. Each call of `train` simulates one trainer process."""

    folder: Path
    settings: dict[str, Any]
    learner: SimulatedLearner = field(default_factory=SimulatedLearner)
    batches: dict[int, tuple[GroupSummary, ...]] = field(default_factory=dict)
    """Groups of each step. A repeated step replaces its earlier groups."""
    prepare: Callable[[SimulatedWorkers, Controller], None] = lambda workers, controller: None
    num_tasks: dict[str, int] = field(default_factory=dict)
    """Number of tasks, by environment."""
    started_groups: list[GroupSpec] = field(default_factory=list)
    """Groups that all calls of `train` started."""
    evaluate: Callable[[int], Any] = return_no_reports
    """Replacement of the evaluator, called with the number of games."""

    @property
    def config(self) -> LanguageModelRun:
        """Validated configuration of the run."""
        defaults = {
            "name": "run",
            "output_dir": str(self.folder),
            "environments": {"coins": {}},
            "rollout": {"num_groups_in_flight": 8, "group_size": 2},
            "eval": {"num_games_during": 0},
        }
        return LanguageModelRun.model_validate(defaults | self.settings)

    @property
    def rows(self) -> list[MetricsRow]:
        """Metrics rows of the training steps."""
        return [row for row in read_metrics(self.folder / "run") if row.kind == "train"]

    @property
    def trained_indices(self) -> list[int]:
        """Indices of the trained groups, in the order of the steps."""
        return [group.index for step in sorted(self.batches) for group in self.batches[step]]

    async def train(self, *, resume: bool = False) -> RunState:
        """Run the controller and return the final state."""
        run = resolve_num_steps(self.config, self.num_tasks)
        path = self.folder / "run"
        state = RunState()
        if resume:
            checkpoint = find_newest_checkpoint(path / "checkpoints")
            state = read_state(checkpoint, RunState)
            folder = RunFolder.reopen(run)
            self.learner.load(checkpoint / "learner")
        else:
            folder = RunFolder.create(run, overwrite=True)
        metrics = MetricsWriter(run, path, resume_from=state.step if resume else None)
        metrics.num_steps = run.training.num_steps
        buffer = SimulatedBuffer(run, self.batches)
        workers = SimulatedWorkers(buffer)
        components = Components(
            run=run,
            metrics=metrics,
            checkpoints=CheckpointFolder(folder.path / "checkpoints", num_kept=2),
            learners=self.learner,
            workers=workers,
            buffer=buffer,
            evaluator=SimpleNamespace(evaluate=self.evaluate, play_samples=play_no_samples),
            tokenizer=None,
            canary=CANARY,
            servers={},
            num_tasks=self.num_tasks,
        )
        controller = Controller(components, state)
        self.prepare(workers, controller)
        try:
            await controller.run()
        finally:
            metrics.close()
            folder.close()
            self.started_groups.extend(spec for spec, _ in workers.started_groups)
        return state
