"""What a controller works with, and what it tells of its steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ludus.env.serving.subprocess import LocalServer
from ludus.proto.config import LanguageModelRun
from ludus.proto.runs import EvalReport, Transcript
from ludus.trainer.actors.processes import Buffer, Learners, Workers
from ludus.trainer.core.types import ScoringRequest
from ludus.trainer.driver.evaluation import Evaluator
from ludus.trainer.models.chat import ChatTokenizer
from ludus.trainer.run.checkpoint import CheckpointFolder
from ludus.trainer.run.folder import RunFolder


@dataclass(slots=True)
class Parts:
    """What a run is made of; every choice was made when these were built."""

    run: LanguageModelRun
    folder: RunFolder
    checkpoints: CheckpointFolder
    learners: Learners
    workers: Workers
    buffer: Buffer
    evaluator: Evaluator
    chat: ChatTokenizer
    canary: Sequence[ScoringRequest]
    servers: Mapping[str, LocalServer]
    """The environment servers that this run owns."""
    num_tasks: Mapping[str, int] = field(default_factory=dict)
    """Of the environments that say how many they have, by name."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a training step came to."""

    number: int
    """Steps trained so far."""
    values: Mapping[str, float]
    """Of the whole run, by TrainMetric (docs/metrics.md)."""
    environments: Mapping[str, Mapping[str, float]]
    """By environment, what each has of its own; by reward term, too."""
    transcripts: tuple[Transcript, ...]
    """Some of the episodes that it learned from, word for word."""
    evaluation: Mapping[str, EvalReport] | None
    """By environment, where this step was one after which the policy is judged."""


BetweenSteps = Callable[[Step | None], Awaitable[None]]
"""Called before the first step (None) and after each; training stands still until it returns."""


async def go_on(step: Step | None) -> None:
    """Return at once: nobody wants training to stand still."""
