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

_MAX_WAIT_S = 2
"""Largest wait for a later second. A file that a faster clock named is not waited for."""


class TensorboardWriter(MetricsSink):
    """A sink that writes an event file; a resumed run adds another file."""

    name = "tensorboard"

    def __init__(self, folder: Path, resume_from: int | None = None) -> None:
        _wait_for_next_second(folder)
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


def _wait_for_next_second(folder: Path) -> None:
    """Wait until a new event file has a later second in its name than all files of the folder.

    Readers read the files in the order of their names, events.out.tfevents.<second>.<host>.<pid>.
    <number>, and "10" sorts before "9".
    """
    names = [path.name for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(name.split(".")[3]) for name in names), default=0)
    while newest >= int(time.time()) > newest - _MAX_WAIT_S:
        time.sleep(0.02)
