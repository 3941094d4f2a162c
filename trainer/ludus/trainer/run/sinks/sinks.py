"""All sinks of a run as one sink."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from ludus.env.types import JsonObject
from ludus.proto.config import RunConfig
from ludus.proto.runs import TENSORBOARD_FOLDER, WANDB_FOLDER, MetricsRow
from ludus.trainer.run.sinks.job_log import JobLog
from ludus.trainer.run.sinks.sink import MetricsSink

_log = logging.getLogger(__name__)


class Sinks:
    """Passes rows to all sinks of a run that have not failed."""

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

    def _call_each(self, call: Callable[[MetricsSink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001 - third-party code may raise anything
                _log.warning(
                    "%s failed and gets no more metrics; metrics.jsonl has all of them: %r",
                    sink.name,
                    error,
                )
                self._sinks.remove(sink)


def open_sinks(
    run: RunConfig,
    folder: Path,
    *,
    resume_from: int | None = None,
    past: Sequence[MetricsRow] = (),
    job_log: TextIO | None = None,
) -> Sinks:
    """Open the sinks of a run's configuration.

    Args:
        folder: the run's folder. Each sink writes into its own subfolder.
        resume_from: step from which the run resumes; None for a new run.
        past: rows up to that step, for sinks that do not store rows.
        job_log: stream that receives a line for each step; None for no such lines.

    Raises:
        ConfigError: a sink cannot start as configured. All sinks are closed.
    """
    # Imported here, because most runs use none of these packages.
    sinks: list[MetricsSink] = []
    try:
        if job_log is not None:
            sinks.append(JobLog(job_log))
        if run.metrics.tensorboard:
            from ludus.trainer.run.sinks.tensorboard import TensorboardWriter

            sinks.append(TensorboardWriter(folder / TENSORBOARD_FOLDER, resume_from))
        if run.metrics.prometheus is not None:
            from ludus.trainer.run.sinks.prometheus import PrometheusExporter

            sinks.append(PrometheusExporter(run, run.metrics.prometheus))
            for row in past:
                sinks[-1].write(row)
        if run.metrics.wandb is not None:
            from ludus.trainer.run.sinks.wandb import WandbWriter

            sinks.append(WandbWriter.start(run, run.metrics.wandb, folder / WANDB_FOLDER))
    except BaseException:
        Sinks(sinks).close()
        raise
    return Sinks(sinks)
