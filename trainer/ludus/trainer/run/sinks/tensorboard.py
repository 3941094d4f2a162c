"""Metrics as TensorBoard's event files, by TensorBoard's own writer: torch is not needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ludus.env.types import JsonObject
from ludus.proto.runs import MetricsRow
from ludus.trainer.run.sinks.names import tagged_values

_FLUSH_S = 5
"""How old a value may be when TensorBoard shows it."""


class TensorboardWriter:
    """One event file per process; a resumed run adds one, and voids what came after its step."""

    name = "tensorboard"

    def __init__(self, folder: Path, resume_from: int | None = None) -> None:
        self._writer = EventFileWriter(str(folder), flush_secs=_FLUSH_S)
        if resume_from is not None:
            self.rewind(resume_from)

    def write(self, row: MetricsRow) -> None:
        """Write the row's values to the file."""
        tagged = tagged_values(row)
        if not tagged:
            return
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tagged.items()]
        self._add(Event(step=row.step, summary=Summary(value=values)))

    def set_environment_options(self, options: Mapping[str, JsonObject]) -> None:
        """Do nothing: rows name their environment."""

    def rewind(self, step: int) -> None:
        """Void what was written for later steps: readers drop it."""
        # Readers drop everything from the step of a session's start on.
        self._add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """Write what is pending and close the file."""
        self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
