"""The progress of a run as lines, for the log of a job in a cluster."""

from __future__ import annotations

from typing import TextIO

from ludus.proto.runs import LOG_ROW_PREFIX, MetricsRow
from ludus.trainer.run.sinks.sink import MetricsSink

_KINDS = ("phase", "train", "eval", "event")
"""Kinds of rows that show progress; metrics.jsonl has all kinds."""


class JobLog(MetricsSink):
    """Writes a line for each phase, step, evaluation and event."""

    name = "the job's log"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, row: MetricsRow) -> None:
        """Write the row as a line."""
        if row.kind in _KINDS:
            self._stream.write(f"{LOG_ROW_PREFIX}{row.model_dump_json(exclude_defaults=True)}\n")
            self._stream.flush()
