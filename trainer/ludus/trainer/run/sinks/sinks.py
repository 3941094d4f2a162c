"""The sinks of a run as one: each row goes to all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from ludus.env.types import JsonObject
from ludus.proto.config import RunConfig
from ludus.proto.runs import TENSORBOARD_FOLDER, WANDB_FOLDER, MetricsRow
from ludus.trainer.run.sinks.job_log import JobLog

_log = logging.getLogger(__name__)


class MetricsSink(Protocol):
    """Takes the rows of a run, in the order of time."""

    name: str

    def write(self, row: MetricsRow) -> None:
        """Show the row."""

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:
        """Take in what each environment, by its name, was built with."""

    def rewind(self, step: int) -> None:
        """Void what was written for later steps: the run continues from `step`."""

    def close(self) -> None:
        """Bring all that was written to safety."""


class Sinks:
    """The sinks that still work."""

    def __init__(self, sinks: list[MetricsSink]) -> None:
        self._sinks = sinks

    def __len__(self) -> int:
        return len(self._sinks)

    def __iter__(self) -> Iterator[MetricsSink]:
        return iter(self._sinks)

    def write(self, row: MetricsRow) -> None:
        """Hand the row to every sink."""
        self._each(lambda sink: sink.write(row))

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:
        """Tell every sink what each environment, by its name, was built with."""
        self._each(lambda sink: sink.set_environment_options(options))

    def rewind(self, step: int) -> None:
        """Void the rows of later steps in every sink."""
        self._each(lambda sink: sink.rewind(step))

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - the boundary to foreign code
                _log.warning("closing %s failed: %r", sink.name, error)
        self._sinks = []

    def _each(self, call: Callable[[MetricsSink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001 - the boundary to foreign code
                _log.warning(
                    "%s failed and gets no more metrics, metrics.jsonl has them all: %r",
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
    """The sinks that the run's configuration names.

    Args:
        folder: of the run; files go into folders of their own there.
        resume_from: the step that the run continues from; None for a new run.
        past: the rows up to that step; sinks that keep nothing themselves take them in again.
        job_log: takes a line for each step, where it is given.

    Raises:
        ConfigError: one of them cannot start as configured; none is left open.
    """
    # Their packages are loaded by the runs that use them only.
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
