"""The writer of a run's metrics and transcripts, and the clock that times the run.

training loop --log_step, log_evaluation, ...--> MetricsRow --+-- metrics.jsonl
                                                              +-- sinks
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ludus.env.types import JsonObject
from ludus.proto.config import LanguageModelRun, RecordedRun
from ludus.proto.evaluation_history import EvaluationHistory
from ludus.proto.metrics import EvalMetric, TrainMetric
from ludus.proto.runs import (
    METRICS_FILE,
    SAMPLES_FILE,
    TRACE_FILE,
    TRANSCRIPTS_FILE,
    EvalReport,
    MetricsRow,
    Phase,
    PolicyResult,
    RowKind,
    StepTrace,
    Transcript,
    WorkerWeightsRow,
    read_metrics,
    read_traces,
    read_transcripts,
)
from ludus.trainer.core.output import warn_user, write_atomically
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
        current_s = 0.0 if self._start_s is None else time.monotonic() - self._start_s
        return self._elapsed_s + current_s

    def start(self) -> None:
        """Start or restart the clock."""
        self._start_s = time.monotonic()

    def stop(self) -> None:
        """Stop the clock; `elapsed_s` keeps its value."""
        self._elapsed_s, self._start_s = self.elapsed_s, None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock within the block, if it runs."""
        is_running = self._start_s is not None
        self.stop()
        try:
            yield
        finally:
            if is_running:
                self.start()


class MetricsWriter:
    """Writes the metrics and transcripts of a run to its folder and its sinks."""

    def __init__(
        self,
        run: RecordedRun,
        path: Path,
        *,
        resume_from: int | None = None,
        job_log: TextIO | None = None,
    ) -> None:
        """Open the files and the sinks.

        Args:
            resume_from: step from which the run resumes. Default: a new run. Rows of later steps
                are dropped.
            job_log: stream that also receives the rows. Default: none.
        """
        self._path = path
        self._first_step = resume_from or 0
        self._task_environments: Set[str] = frozenset()
        """Names of the environments that are not games."""
        rows: list[MetricsRow] = []
        if resume_from is not None:
            rows, last_step = _drop_later_rows(path, resume_from)
            _log.info("the run continues from the checkpoint of step %d", resume_from)
            if last_step > resume_from:
                warn_user(
                    f"the run had reached step {last_step}, but its newest checkpoint is of step "
                    f"{resume_from}; what followed is trained again"
                )
        self.evaluations = EvaluationHistory(rows)
        """Results of the evaluations so far."""
        self.clock = Clock(max((row.elapsed_s for row in rows), default=0.0))
        has_epochs = isinstance(run, LanguageModelRun) and run.training.num_epochs is not None
        self.num_steps = None if has_epochs else run.training.num_steps
        """Length of the run in steps; None until the size of the data set is known."""
        self._sinks = open_sinks(
            run, path, resume_from=resume_from, earlier_rows=rows, job_log=job_log
        )
        self._open_files()

    def set_environments(self, options: Mapping[str, JsonObject], games: Set[str]) -> None:
        """Set what rows and sinks say about the environments.

        Args:
            options: options of each environment, by its name.
            games: names of the environments that are games.
        """
        self._task_environments = options.keys() - games
        self._sinks.set_environment_options(options)

    def log_phase(self, phase: Phase, step: int | None = None) -> None:
        """Write that the run enters a phase; the default step is the one it starts from."""
        step = self._first_step if step is None else step
        _log.info("phase %s, step %d", phase, step)
        self._append_row("phase", step, phase=phase, num_steps=self.num_steps)

    def log_step(
        self,
        step: int,
        num_games_trained: int,
        values: Mapping[str, float],
        environments: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Write the values of a training step, for the whole run and for each environment."""
        self._append_row("train", step, values, num_games_trained)
        for name, environment_values in environments.items():
            self._append_row(
                "environment", step, environment_values, num_games_trained, environment=name
            )

    def log_trace(self, trace: StepTrace) -> None:
        """Write when learner, weights and workers were busy in a training step."""
        with (self._path / TRACE_FILE).open("a", encoding="utf-8") as file:
            file.write(trace.model_dump_json(exclude_defaults=True) + "\n")

    def log_transcripts(
        self, step: int, transcripts: Iterable[Transcript]
    ) -> tuple[Transcript, ...]:
        """Write the transcripts of a training step; return them with the step's number."""
        numbered_transcripts = tuple(
            transcript.model_copy(update={"step": step}) for transcript in transcripts
        )
        for transcript in numbered_transcripts:
            self._transcripts_file.write(transcript.model_dump_json() + "\n")
        return numbered_transcripts

    def log_samples(self, step: int, transcripts: Iterable[Transcript]) -> None:
        """Write the transcripts of evaluation episodes after `step` training steps."""
        with (self._path / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            for transcript in transcripts:
                file.write(transcript.model_copy(update={"step": step}).model_dump_json() + "\n")

    def log_evaluation(
        self, step: int, num_games_trained: int, environment: str, report: EvalReport
    ) -> None:
        """Write the results of an evaluation in one environment."""
        values = _make_eval_values(report.policy, report.gap_closed)
        self._append_row("eval", step, values, num_games_trained, environment=environment)
        for policy, result in report.baselines.items():
            values = _make_eval_values(result)
            self._append_row(
                "baseline", step, values, num_games_trained, environment=environment, policy=policy
            )

    def log_delivery(self, step: int, weights: Mapping[int, WorkerWeights]) -> None:
        """Write the weights that each worker now samples from, by worker number."""
        worker_rows = tuple(
            WorkerWeightsRow(
                worker=number,
                version=worker.canary.version,
                content_hash=worker.canary.content_hash,
                canary_error=worker.canary.error,
            )
            for number, worker in sorted(weights.items())
        )
        values: dict[str, float] = {}
        if weights:
            workers = weights.values()
            values = {
                TrainMetric.WEIGHT_FETCH_S: max(worker.fetch_s for worker in workers),
                TrainMetric.SAMPLER_PAUSE_S: max(worker.pause_s for worker in workers),
                TrainMetric.WEIGHT_FETCH_BYTES: sum(worker.num_bytes_fetched for worker in workers),
            }
        self._append_row("weights", step, values, weights=worker_rows)

    def log_event(
        self,
        step: int,
        values: Mapping[str, float],
        *,
        num_games_trained: int = 0,
        environment: str | None = None,
    ) -> None:
        """Write an event as the metrics that count it, for an environment or the whole run."""
        self._append_row("event", step, values, num_games_trained, environment=environment)

    def log_checkpoint(self, step: int, duration_s: float) -> None:
        """Write that a checkpoint was saved, and how long training paused."""
        self.log_event(step, {TrainMetric.NUM_CHECKPOINTS: 1, TrainMetric.CHECKPOINT_S: duration_s})

    def rewind(self, step: int) -> None:
        """Drop all rows and transcripts of steps after `step`."""
        self._close_files()
        _drop_later_rows(self._path, step)
        self._open_files()
        self.evaluations.drop_after(step)
        self._sinks.rewind(step)

    def close(self) -> None:
        """Close the sinks and the files."""
        self._sinks.close()
        self._close_files()

    def _open_files(self) -> None:
        # The files are buffered by line, so that readers always see whole rows.
        self._metrics_file = (self._path / METRICS_FILE).open("a", encoding="utf-8", buffering=1)
        self._transcripts_file = (self._path / TRANSCRIPTS_FILE).open(
            "a", encoding="utf-8", buffering=1
        )

    def _close_files(self) -> None:
        self._metrics_file.close()
        self._transcripts_file.close()

    def _append_row(
        self,
        kind: RowKind,
        step: int,
        values: Mapping[str, float] | None = None,
        num_games_trained: int = 0,
        environment: str | None = None,
        **fields: Any,
    ) -> None:
        row = MetricsRow(
            kind=kind,
            step=step,
            environment=environment,
            is_game=environment not in self._task_environments,
            elapsed_s=self.clock.elapsed_s,
            num_games_trained=num_games_trained,
            values={str(name): float(value) for name, value in (values or {}).items()},
            **fields,
        )
        self._metrics_file.write(row.model_dump_json(exclude_defaults=True) + "\n")
        self._sinks.write(row)
        self.evaluations.add(row)


def _drop_later_rows(path: Path, step: int) -> tuple[list[MetricsRow], int]:
    """Drop the records after `step`; return the other rows of metrics, and the last step."""
    all_rows = read_metrics(path)
    rows = [row for row in all_rows if row.step <= step]
    last_step = max((row.step for row in all_rows if row.kind == "train"), default=0)
    lines = [row.model_dump_json(exclude_defaults=True) + "\n" for row in rows]
    write_atomically(path / METRICS_FILE, "".join(lines))
    transcripts = read_transcripts(path)
    lines = [text.model_dump_json() + "\n" for text in transcripts if text.step <= step]
    write_atomically(path / TRANSCRIPTS_FILE, "".join(lines))
    traces = [trace for trace in read_traces(path) if trace.step <= step]
    lines = [trace.model_dump_json(exclude_defaults=True) + "\n" for trace in traces]
    write_atomically(path / TRACE_FILE, "".join(lines))
    return rows, last_step


def _make_eval_values(result: PolicyResult, gap_closed: float | None = None) -> Mapping[str, float]:
    values: dict[str, float] = {
        EvalMetric.NUM_GAMES: result.num_games,
        EvalMetric.NUM_GAMES_VOID: result.num_void,
        EvalMetric.RETURN_MEAN: result.expected_return,
        EvalMetric.RETURN_CI95_LOW: result.expected_return_ci95[0],
        EvalMetric.RETURN_CI95_HIGH: result.expected_return_ci95[1],
        EvalMetric.INVALID_RATE: result.invalid_rate,
    }
    if result.win_rate is not None and result.win_rate_ci95 is not None:
        values[EvalMetric.WIN_RATE] = result.win_rate
        low, high = result.win_rate_ci95
        values |= {EvalMetric.WIN_RATE_CI95_LOW: low, EvalMetric.WIN_RATE_CI95_HIGH: high}
    if result.draw_rate is not None:
        values[EvalMetric.DRAW_RATE] = result.draw_rate
    if gap_closed is not None:
        values[EvalMetric.GAP_CLOSED] = gap_closed
    return values
