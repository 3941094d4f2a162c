"""The sink that writes TensorBoard event files, with TensorBoard's writer instead of torch's."""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ludus.proto.runs import MetricsRow
from ludus.trainer.run.sinks import MetricsSink, tag_values

_FLUSH_S = 5
"""Maximum delay before values are written, in seconds."""


class TensorboardWriter(MetricsSink):
    """A sink that writes an event file; a resumed run adds another file."""

    name = "tensorboard"

    def __init__(self, folder: Path, resume_from: int | None = None) -> None:
        self._writer = EventFileWriter(str(folder), flush_secs=_FLUSH_S)
        if resume_from is not None:
            self.rewind(resume_from)

    def write(self, row: MetricsRow) -> None:
        """Write the row's values."""
        values = [
            Summary.Value(tag=tag, simple_value=value) for tag, value in tag_values(row).items()
        ]
        if values:
            self._add_event(Event(step=row.step, summary=Summary(value=values)))

    def rewind(self, step: int) -> None:
        """Make readers drop the values of later steps."""
        # Readers drop all values from the step of a session start onwards.
        self._add_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """Write pending values and close the file."""
        self._writer.close()

    def _add_event(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
