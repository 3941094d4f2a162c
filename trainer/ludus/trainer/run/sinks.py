"""Sinks: destinations of a run's metrics in addition to metrics.jsonl.

    MetricsWriter --MetricsRow--> Sinks --+-- PrometheusExporter  scraped over HTTP
                                          +-- TensorboardWriter   event files in the run's folder
                                          +-- WandbWriter         a service, or the run's folder
                                          +-- JobLog              standard output, in a cluster

A sink that cannot start as configured stops the run from starting. A sink that fails later gets no
more rows, with one warning. Training continues, because a sink only receives copies.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from ludus.env.text.terminal import clean_json_for_terminal
from ludus.env.types import JsonObject
from ludus.proto.config import RecordedRun
from ludus.proto.runs import LOG_ROW_PREFIX, TENSORBOARD_FOLDER, WANDB_FOLDER, MetricsRow

_log = logging.getLogger(__name__)

_PROGRESS_KINDS = ("phase", "train", "eval", "event")
"""Kinds of rows that the job's log shows; metrics.jsonl has all kinds."""


class MetricsSink(ABC):
    """A destination that receives the rows of a run in chronological order."""

    name: str

    @abstractmethod
    def write(self, row: MetricsRow) -> None:
        """Write a row."""

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:  # noqa: B027
        """Receive the options of each environment, by its name."""

    def rewind(self, step: int) -> None:  # noqa: B027
        """Invalidate the rows of later steps, because the run continues from `step`."""

    def close(self) -> None:  # noqa: B027
        """Write pending rows and release resources."""


class JobLog(MetricsSink):
    """A sink that writes a line per phase, step, evaluation and event into the log of a job."""

    name = "the job's log"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, row: MetricsRow) -> None:
        """Write the row as a line."""
        if row.kind in _PROGRESS_KINDS:
            row_json = clean_json_for_terminal(row.model_dump_json(exclude_defaults=True))
            self._stream.write(f"{LOG_ROW_PREFIX}{row_json}\n")
            self._stream.flush()


class Sinks:
    """All sinks of a run that have not failed."""

    def __init__(self, sinks: list[MetricsSink]) -> None:
        self._sinks = sinks

    def __len__(self) -> int:
        return len(self._sinks)

    def __iter__(self) -> Iterator[MetricsSink]:
        return iter(self._sinks)

    def write(self, row: MetricsRow) -> None:
        """Pass a row to every sink."""
        self._call_each(lambda sink: sink.write(row))

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:
        """Pass the options of each environment, by its name, to every sink."""
        self._call_each(lambda sink: sink.set_environment_options(options))

    def rewind(self, step: int) -> None:
        """Invalidate the rows of later steps in every sink."""
        self._call_each(lambda sink: sink.rewind(step))

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - third-party code may raise anything
                _log.warning("closing %s failed: %r", sink.name, error)
        self._sinks = []

    def _call_each(self, call_sink: Callable[[MetricsSink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                call_sink(sink)
            except Exception as error:  # noqa: BLE001 - third-party code may raise anything
                _log.warning(
                    "%s failed and gets no more metrics; metrics.jsonl has all of them: %r",
                    sink.name,
                    error,
                )
                self._sinks.remove(sink)


def open_sinks(
    run: RecordedRun,
    folder: Path,
    *,
    resume_from: int | None = None,
    earlier_rows: Sequence[MetricsRow] = (),
    job_log: TextIO | None = None,
) -> Sinks:
    """Open the sinks of a run's configuration.

    Args:
        resume_from: step from which the run resumes; None for a new run.
        earlier_rows: rows up to that step, for sinks that do not store rows.

    Raises:
        ConfigError: a sink cannot start as configured. All sinks are closed.
    """
    # Imported here, because most runs use none of these packages.
    sinks: list[MetricsSink] = []
    try:
        if job_log is not None:
            sinks.append(JobLog(job_log))
        if run.metrics.tensorboard:
            from ludus.trainer.run.tensorboard import TensorboardWriter

            sinks.append(TensorboardWriter(folder / TENSORBOARD_FOLDER, resume_from))
        if run.metrics.prometheus is not None:
            from ludus.trainer.run.prometheus import PrometheusExporter

            sinks.append(PrometheusExporter(run, run.metrics.prometheus))
            for row in earlier_rows:
                sinks[-1].write(row)
        if run.metrics.wandb is not None:
            from ludus.trainer.run.wandb import WandbWriter

            sinks.append(WandbWriter(run, run.metrics.wandb, folder / WANDB_FOLDER))
    except BaseException:
        Sinks(sinks).close()
        raise
    return Sinks(sinks)


def tag_values(row: MetricsRow) -> Mapping[str, float]:
    """Return the row's values by tag.

    train/loss                      value of the whole run
    train/blackjack/win_rate        value of one environment
    eval/blackjack/win_rate         result of the trained policy
    eval/blackjack/random/win_rate  result of a fixed policy
    """
    section = "eval" if row.kind in ("eval", "baseline") else "train"
    tag_parts = (section, row.environment, row.policy)
    prefix = "/".join(tag_part for tag_part in tag_parts if tag_part is not None)
    return {f"{prefix}/{name}": value for name, value in row.values.items()}
