"""The trainer as a child process, which always ends before this process does.

The child has its own process session. Ctrl-C on a terminal therefore reaches only this process,
which forwards each signal once. After the first signal, the child ends its step, writes its
checkpoint and exits; the second makes it abandon the step, the third stops it without a checkpoint.
If it has not exited in time, or after a fourth signal, its whole process group is killed.

The child's stdout and stderr are piped to this process. Lines that start with `warning: ` are shown
immediately. Lines that start with `error: `, and indented lines after them, are shown at the end.
Metrics rows are ignored, because this process reads them from the run folder; they are printed for
runs on a cluster.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from pydantic import BaseModel

from ludus.proto.memory_plan import MEMORY_PLAN_PREFIX, MemoryPlan
from ludus.proto.runs import (
    CONFIG_FILE,
    LOG_ROW_PREFIX,
    MODEL_SIZE_PREFIX,
    RESOLVED_PREFIX,
    STEP_TIME_PREFIX,
    ModelSize,
)

STOP_GRACES_S = (900.0, 900.0, 20.0, 0.0)
"""Seconds that the child has to exit after the first, second, third and fourth signal. It may have
to write a large checkpoint."""
OUTPUT_GRACE_S = 10.0
"""Seconds to wait, after the child's exit, for its remaining output, which contains its errors."""
POLL_INTERVAL_S = 0.2
"""Seconds between two polls of the child."""
NUM_LAST_LINES = 25
"""Number of last output lines to show if the child crashes."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def build_trainer_command(arguments: Sequence[str]) -> list[str]:
    """Build the command that starts the trainer."""
    return [sys.executable, "-m", "ludus.trainer", *arguments]


@dataclass
class TrainerOutput:
    """The child's output so far, separated into errors, warnings and other lines."""

    errors: list[str] = field(default_factory=list)
    warnings: deque[str] = field(default_factory=deque)
    """Warnings that have not been shown yet."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LAST_LINES))
    """Latest lines of any kind."""
    resolved_config: str = ""
    """JSON of the configuration that a check has resolved; empty if there is none."""
    model_size: ModelSize | None = None
    """Size of a pretrained model that a check has measured."""
    memory_plan: MemoryPlan | None = None
    """Memory plan of a language-model run that a check has computed."""
    step_s: float | None = None
    """Seconds of a training step that a check has measured."""
    _is_in_error: bool = False

    def add_line(self, line: str) -> None:
        """Add a line, which is passed without its newline."""
        if line.startswith(LOG_ROW_PREFIX):
            return
        if line.startswith(RESOLVED_PREFIX):
            self.resolved_config = line.removeprefix(RESOLVED_PREFIX)
            return
        if line.startswith(MODEL_SIZE_PREFIX):
            size_json = line.removeprefix(MODEL_SIZE_PREFIX)
            self.model_size = ModelSize.model_validate_json(size_json)
            return
        if line.startswith(MEMORY_PLAN_PREFIX):
            plan_json = line.removeprefix(MEMORY_PLAN_PREFIX)
            self.memory_plan = MemoryPlan.model_validate_json(plan_json)
            return
        if line.startswith(STEP_TIME_PREFIX):
            self.step_s = float(line.removeprefix(STEP_TIME_PREFIX))
            return
        self.last_lines.append(line)
        if self._is_in_error and line.startswith(" "):
            self.errors[-1] += f"\n{line}"
            return
        self._is_in_error = line.startswith("error: ")
        if self._is_in_error:
            self.errors.append(line.removeprefix("error: "))
        elif line.startswith("warning: "):
            self.warnings.append(line.removeprefix("warning: "))


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """Exit status and output of the child."""

    exit_code: int
    """Exit code; the negative signal number if a signal killed the child."""
    was_stopped: bool
    """True if a stop was requested."""
    was_killed: bool
    """True if the child was killed because it did not stop in time."""
    output: TrainerOutput


def run_trainer(
    arguments: Sequence[str],
    config: BaseModel | None = None,
    *,
    warn: Callable[[str], None],
    on_tick: Callable[[], None],
    on_stopping: Callable[[], None],
) -> TrainerEnd:
    """Run the trainer until it exits, then kill what remains of its process group.

    Args:
        config: configuration that the trainer reads from a temporary file (option --config).
        warn: called with each warning of the child.
        on_tick: called several times per second while the child runs, and once at the end.
        on_stopping: called when a stop request has been forwarded.
    """
    output = TrainerOutput()

    def poll_output() -> None:
        while output.warnings:
            warn(output.warnings.popleft())
        on_tick()

    with (
        _write_config(config) as config_arguments,
        _record_signals() as signals,
        _start_child(build_trainer_command([*arguments, *config_arguments]), output) as child,
    ):
        kill_deadline_s = math.inf
        num_forwarded = 0
        was_killed = False
        while child.poll() is None:
            poll_output()
            for signal_number in signals[num_forwarded : len(STOP_GRACES_S)]:
                child.send_signal(signal_number)
                kill_deadline_s = time.monotonic() + STOP_GRACES_S[num_forwarded]
                num_forwarded += 1
                on_stopping()
            if time.monotonic() > kill_deadline_s:
                was_killed = True
                break
            time.sleep(POLL_INTERVAL_S)
    poll_output()
    return TrainerEnd(child.returncode, bool(signals), was_killed, output)


@contextlib.contextmanager
def _write_config(config: BaseModel | None) -> Iterator[list[str]]:
    """Yield the option --config with a temporary file, or [] if there is no configuration."""
    if config is None:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="ludus-") as folder:
        path = Path(folder) / CONFIG_FILE
        path.write_text(config.model_dump_json(indent=2), encoding="utf-8")
        yield ["--config", str(path)]


@contextlib.contextmanager
def _record_signals() -> Iterator[list[signal.Signals]]:
    """Yield a list to which each signal that must be forwarded to the child is appended."""
    signals: list[signal.Signals] = []

    def record(signal_number: int, _frame: FrameType | None) -> None:
        # SIGHUP is forwarded as SIGTERM, because the child has no terminal.
        signals.append(signal.SIGINT if signal_number == signal.SIGINT else signal.SIGTERM)

    previous_handlers = {
        signal_number: signal.signal(signal_number, record) for signal_number in _STOP_SIGNALS
    }
    try:
        yield signals
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)


@contextlib.contextmanager
def _start_child(command: Sequence[str], output: TrainerOutput) -> Iterator[subprocess.Popen[str]]:
    """Yield the running child; kill its whole group afterwards."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    assert child.stdout is not None
    reader = threading.Thread(target=collect_output, args=(child.stdout, output), daemon=True)
    reader.start()
    try:
        yield child
    finally:
        # Also after success, because the trainer may have left processes in its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        # The wait has a timeout, because a grandchild in another group could keep the pipe open.
        reader.join(OUTPUT_GRACE_S)


def collect_output(stream: IO[str], output: TrainerOutput) -> None:
    """Add the child's lines to `output` until the child closes its stream."""
    with stream:
        for line in stream:
            output.add_line(line.rstrip("\n"))
