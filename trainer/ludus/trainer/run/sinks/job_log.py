"""Where a run stands, line by line, for whoever follows the log of a job in a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from ludus.env.types import JsonObject
from ludus.proto.runs import LOG_ROW_PREFIX, MetricsRow

_KINDS = ("phase", "train", "eval", "event")
"""Rows that say where a run stands; metrics.jsonl has the others."""


class JobLog:
    """One line for each step and evaluation, for what happens, and for what the run turns to."""

    name = "the job's log"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, row: MetricsRow) -> None:
        """Write the row as a line."""
        if row.kind in _KINDS:
            self._stream.write(f"{LOG_ROW_PREFIX}{row.model_dump_json(exclude_defaults=True)}\n")
            self._stream.flush()

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:
        """Do nothing: a row names its environment."""

    def rewind(self, step: int) -> None:
        """Do nothing: rows that come once more say so by their step."""

    def close(self) -> None:
        """Do nothing: every line is out."""
