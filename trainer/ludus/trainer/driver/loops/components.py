"""The started components of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ludus.env.serving.subprocess import LocalServer
from ludus.proto.config import LanguageModelRun
from ludus.trainer.actors.processes import Buffer, Learners, Workers
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.driver.evaluation import Evaluator
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.run.checkpoint import CheckpointFolder
from ludus.trainer.run.metrics_writer import MetricsWriter


@dataclass(slots=True)
class Components:
    """The started components of a run."""

    run: LanguageModelRun
    metrics: MetricsWriter
    checkpoints: CheckpointFolder
    learners: Learners
    workers: Workers
    buffer: Buffer
    evaluator: Evaluator
    tokenizer: ChatTokenizer
    canary: Sequence[ScoringRequest]
    servers: Mapping[str, LocalServer] = field(default_factory=dict)
    """Environment servers that this run started, by environment."""
    num_tasks: Mapping[str, int] = field(default_factory=dict)
    """Number of tasks by environment, for the environments that report it."""
