"""Fine-tuning runs in this process, with the learner of runs but without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludus.proto.config import SftRun
from ludus.proto.runs import Resume
from ludus.trainer.core.stopping import StopRequest
from ludus.trainer.core.types import Batch, Coefficients, SavedFile
from ludus.trainer.learner.abandonment import AbandonedStep
from ludus.trainer.learner.learner import Learner
from ludus.trainer.learner.step_metrics import StepMetrics
from ludus.trainer.run.checkpoint import LEARNER_FOLDER
from ludus.trainer.run.lifecycle import open_run
from ludus.trainer.run.metrics_writer import MetricsWriter
from ludus.trainer.sft.preparation import prepare_run
from ludus.trainer.sft.training import SftLoop, SftState


class LocalLearners:
    """The learner of this process, which requests a stop after some steps."""

    def __init__(self, learner: Learner, stop_request: StopRequest, stop_after: int | None) -> None:
        self.learner, self._stop_request, self._stop_after = learner, stop_request, stop_after
        self.num_steps = 0
        self.validation_losses: list[float] = []
        """Losses to report instead of the true ones, in order; empty to report the true ones."""

    async def train_step(
        self, batch: Batch, coefficients: Coefficients
    ) -> StepMetrics | AbandonedStep:
        self.num_steps += 1
        if self.num_steps == self._stop_after:
            self._stop_request.set()
        return self.learner.train_step(batch, coefficients)

    async def abandon_step(self, *, discards_state: bool) -> None:
        raise AssertionError("no step is abandoned")

    async def compute_mean_loss(self, batch: Batch) -> float:
        if self.validation_losses:
            return self.validation_losses.pop(0)
        return self.learner.compute_mean_loss(batch)

    async def save(self, state_folder: Path, model_folder: Path) -> Sequence[SavedFile]:
        model_folder.mkdir()
        return self.learner.save(state_folder) + self.learner.export_model(model_folder)

    async def export_model(self, folder: Path) -> None:
        self.learner.export_model(folder)


def make_run(model_path: str, data_path: str, folder: Path, **sections: Any) -> SftRun:
    """Return a run of small batches; `sections` are merged into its sections."""
    tree: dict[str, Any] = {
        "name": "run",
        "output_dir": str(folder),
        "model": {"path": model_path},
        "data": {"path": data_path, "max_tokens": 128},
        "validation": {"size": 0.25, "every_steps": 2},
        "training": {"batch_size": 4, "num_steps": 6},
        "learner": {"learning_rate": 1e-2, "max_tokens_per_micro_batch": 256},
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields} if isinstance(fields, dict) else fields
    return SftRun.model_validate(tree)


def train_in_process(
    run: SftRun,
    resume: Resume = Resume.NEVER,
    *,
    stop_after: int | None = None,
    validation_losses: Sequence[float] = (),
) -> tuple[SftState, dict[str, Tensor]]:
    """Train a run; return its final state and weights."""
    prepared, stop_request = prepare_run(run), StopRequest()
    run = prepared.run
    with open_run(run, SftState, 2, resume=resume, overwrite=False) as storage:
        prepared.check_fingerprint(storage.state)
        storage.state.fingerprint = prepared.data.compute_fingerprint()
        learner = Learner(run.make_learner_run(), run.model.path)
        resume_from = None
        if storage.checkpoint is not None:
            learner.load(storage.checkpoint / LEARNER_FOLDER)
            resume_from = storage.state.step
        learners = LocalLearners(learner, stop_request, stop_after)
        learners.validation_losses = list(validation_losses)
        with closing(MetricsWriter(run, run.folder, resume_from=resume_from)) as metrics:
            loop = SftLoop(run, prepared.data, learners, storage, metrics, stop_request)
            asyncio.run(loop.run())
        assert loop.is_finished == (stop_after is None)
        return storage.state, learner.gather_weights()


def assert_equal_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Assert that two models have exactly the same weights."""
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
