"""The writer of a run's metrics and transcripts, and the clock that times the run.

training loop --log_step, log_evaluation, ...--> MetricsRow --+-- metrics.jsonl
                                                              +-- sinks
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from ludus.env.types import JsonObject
from ludus.proto.config import LanguageModelRun, RunConfig
from ludus.proto.metrics import TrainMetric
from ludus.proto.runs import (
    METRICS_FILE,
    TRANSCRIPTS_FILE,
    EvalReport,
    MetricsRow,
    Phase,
    RowKind,
    Transcript,
    WorkerWeightsRow,
    read_metrics,
    read_transcripts,
)
from ludus.trainer.core.output import write_atomically
from ludus.trainer.run.metrics import (
    compute_delivery_values,
    compute_eval_values,
    make_weights_row,
)
from ludus.trainer.run.sinks import open_sinks
from ludus.trainer.weights.canary import WorkerWeights

_log = logging.getLogger(__name__)


class Clock:
    """A stopwatch for the time that a run has spent training."""

    def __init__(self, elapsed_s: float = 0.0) -> None:
        self._elapsed_s = elapsed_s
        self._start_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far."""
        running_s = 0.0 if self._start_s is None else time.monotonic() - self._start_s
        return self._elapsed_s + running_s

    def start(self) -> None:
        """Start or restart the clock."""
        self._start_s = time.monotonic()

    def stop(self) -> None:
        """Stop the clock; `elapsed_s` keeps its value."""
        self._elapsed_s, self._start_s = self.elapsed_s, None


class MetricsWriter:
    """Writes the metrics and transcripts of a run to its folder and its sinks."""

    def __init__(
        self,
        run: RunConfig,
        path: Path,
        *,
        resume_from: int | None = None,
        job_log: TextIO | None = None,
    ) -> None:
        """Open the files and the sinks.

        Args:
            path: the run's folder.
            resume_from: step from which the run resumes. Rows of later steps are dropped.
            job_log: stream that also receives the rows. Default: none.

        Raises:
            ConfigError: a sink cannot start as configured.
        """
        self._path = path
        rows = [] if resume_from is None else _drop_later_rows(path, resume_from)
        self.clock = Clock(max((row.elapsed_s for row in rows), default=0.0))
        has_epochs = isinstance(run, LanguageModelRun) and run.training.num_epochs is not None
        self.num_steps = None if has_epochs else run.training.num_steps
        """Length of the run in steps; None until the size of the data set is known."""
        self._sinks = open_sinks(run, path, resume_from=resume_from, past=rows, job_log=job_log)
        self._open_files()

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:
        """Pass the options of each environment, by its name, to the sinks."""
        self._sinks.set_environment_options(options)

    def log_phase(self, phase: Phase, step: int = 0) -> None:
        """Write the phase that the run enters."""
        _log.info("phase %s, step %d", phase, step)
        self._append("phase", step, phase=phase, num_steps=self.num_steps)

    def log_step(
        self,
        step: int,
        num_games_trained: int,
        values: Mapping[str, float],
        environments: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Write the values of a training step: of the whole run, then of each environment."""
        self._append("train", step, values, num_games_trained=num_games_trained)
        for name, environment_values in environments.items():
            self._append(
                "environment",
                step,
                environment_values,
                num_games_trained=num_games_trained,
                environment=name,
            )

    def log_transcripts(
        self, step: int, transcripts: Iterable[Transcript]
    ) -> tuple[Transcript, ...]:
        """Write the transcripts of a training step; return them with the step's number."""
        numbered = tuple(transcript.model_copy(update={"step": step}) for transcript in transcripts)
        for transcript in numbered:
            self._transcripts.write(transcript.model_dump_json() + "\n")
        return numbered

    def log_evaluation(
        self, step: int, num_games_trained: int, environment: str, report: EvalReport
    ) -> None:
        """Write the results of an evaluation in one environment."""
        values = compute_eval_values(report.policy, report.gap_closed)
        self._append(
            "eval", step, values, num_games_trained=num_games_trained, environment=environment
        )
        for policy, result in report.baselines.items():
            self._append(
                "baseline",
                step,
                compute_eval_values(result),
                num_games_trained=num_games_trained,
                environment=environment,
                policy=policy,
            )

    def log_delivery(self, step: int, weights: Mapping[int, WorkerWeights]) -> None:
        """Write the weights that each worker, by its number, samples from now on."""
        worker_weights = tuple(
            make_weights_row(worker, weights[worker]) for worker in sorted(weights)
        )
        values = compute_delivery_values(list(weights.values()))
        self._append("weights", step, values, weights=worker_weights)

    def log_event(self, step: int, metric: TrainMetric) -> None:
        """Write one event of the kind that `metric` counts."""
        self._append("event", step, {metric: 1})

    def log_unlock(self, step: int, num_games_trained: int, environment: str) -> None:
        """Write that the curriculum has opened an environment."""
        _log.info("step %d: the curriculum opens environment '%s'", step, environment)
        self._append(
            "event",
            step,
            {TrainMetric.NUM_UNLOCKS: 1},
            num_games_trained=num_games_trained,
            environment=environment,
        )

    def log_checkpoint(self, step: int, duration_s: float) -> None:
        """Write that a checkpoint was saved, and for how long training paused."""
        values: dict[str, float] = {
            TrainMetric.NUM_CHECKPOINTS: 1,
            TrainMetric.CHECKPOINT_S: duration_s,
        }
        self._append("event", step, values)

    def rewind(self, step: int) -> None:
        """Drop all rows and transcripts of later steps."""
        self._close_files()
        _drop_later_rows(self._path, step)
        self._open_files()
        self._sinks.rewind(step)

    def close(self) -> None:
        """Close the sinks and the files."""
        self._sinks.close()
        self._close_files()

    def _open_files(self) -> None:
        # Buffered by line, so that a reader always sees whole rows.
        self._metrics = (self._path / METRICS_FILE).open("a", encoding="utf-8", buffering=1)
        self._transcripts = (self._path / TRANSCRIPTS_FILE).open("a", encoding="utf-8", buffering=1)

    def _close_files(self) -> None:
        self._metrics.close()
        self._transcripts.close()

    def _append(
        self,
        kind: RowKind,
        step: int,
        values: Mapping[str, float] | None = None,
        *,
        num_games_trained: int = 0,
        environment: str | None = None,
        policy: str | None = None,
        phase: Phase | None = None,
        num_steps: int | None = None,
        weights: tuple[WorkerWeightsRow, ...] = (),
    ) -> None:
        row = MetricsRow(
            kind=kind,
            step=step,
            environment=environment,
            policy=policy,
            phase=phase,
            num_steps=num_steps,
            weights=weights,
            elapsed_s=self.clock.elapsed_s,
            num_games_trained=num_games_trained,
            values={str(name): float(value) for name, value in (values or {}).items()},
        )
        self._metrics.write(row.model_dump_json(exclude_defaults=True) + "\n")
        self._sinks.write(row)


def _drop_later_rows(path: Path, step: int) -> list[MetricsRow]:
    """Drop the rows and transcripts after `step`; return the rows that remain."""
    rows = [row for row in read_metrics(path) if row.step <= step]
    text = "".join(row.model_dump_json(exclude_defaults=True) + "\n" for row in rows)
    write_atomically(path / METRICS_FILE, text)
    transcripts = [transcript for transcript in read_transcripts(path) if transcript.step <= step]
    text = "".join(transcript.model_dump_json() + "\n" for transcript in transcripts)
    write_atomically(path / TRANSCRIPTS_FILE, text)
    return rows
