"""The trainer as a child process: started, listened to, stopped, never left behind.

The child leads a session of its own, so a terminal's Ctrl-C reaches only this process, which
forwards it exactly once. The child then writes its checkpoint and ends; after STOP_GRACE_S its
whole process group is killed.

What the child says on stdout and stderr is piped here. Lines that start with `warning: ` are
shown as they come; `error: ` lines, each with the indented lines that follow it, at the end.
Rows of metrics, which a run in a cluster prints, are passed over: they are read from its folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from ludus.proto.runs import LOG_ROW_PREFIX

STOP_GRACE_S = 60.0
"""How long the child may take to write its checkpoint after Ctrl-C."""
LAST_WORDS_S = 10.0
"""How long the reading of what the child said may take beyond its end: its errors are there."""
TICK_S = 0.2
"""Time between two looks at the child."""
NUM_TAIL_LINES = 25
"""Last lines kept for the case that the child crashes."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def trainer_command(arguments: Sequence[str]) -> list[str]:
    """The command that starts the trainer."""
    return [sys.executable, "-m", "ludus.trainer", *arguments]


@dataclass
class TrainerOutput:
    """What the child said so far."""

    errors: list[str] = field(default_factory=list)
    warnings: deque[str] = field(default_factory=deque)
    """Not yet shown."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_TAIL_LINES))
    """The last lines of any kind."""
    _within_error: bool = False

    def feed(self, line: str) -> None:
        """Sort one line, given without its newline."""
        if line.startswith(LOG_ROW_PREFIX):
            return
        self.tail.append(line)
        if self._within_error and line.startswith(" "):
            self.errors[-1] += f"\n{line}"
            return
        self._within_error = line.startswith("error: ")
        if self._within_error:
            self.errors.append(line.removeprefix("error: "))
        elif line.startswith("warning: "):
            self.warnings.append(line.removeprefix("warning: "))


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """How the child ended."""

    exit_code: int
    """Negative where a signal ended it."""
    was_stopped: bool
    """True where somebody asked it to stop."""
    was_killed: bool
    """True where it did not stop in time."""
    output: TrainerOutput


def run_trainer(
    arguments: Sequence[str],
    *,
    on_tick: Callable[[TrainerOutput], None],
    on_stopping: Callable[[], None],
) -> TrainerEnd:
    """How the trainer ended; no process of its group is left then.

    Args:
        on_tick: called several times a second while the child runs, and once at the end.
        on_stopping: called when a stop has been asked for and forwarded.
    """
    output = TrainerOutput()
    with _stop_requests() as requested, _child(trainer_command(arguments), output) as child:
        deadline: float | None = None
        was_killed = False
        while child.poll() is None:
            on_tick(output)
            if requested and deadline is None:
                child.send_signal(requested[0])
                deadline = time.monotonic() + STOP_GRACE_S
                on_stopping()
            if deadline is not None and time.monotonic() > deadline:
                was_killed = True
                break
            time.sleep(TICK_S)
    on_tick(output)
    return TrainerEnd(child.returncode, bool(requested), was_killed, output)


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[signal.Signals]]:
    """A list that receives the signal to forward when somebody asks to stop."""
    requested: list[signal.Signals] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        # A terminal that hangs up is no reason to look for a terminal's signal.
        requested.append(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    before = {number: signal.signal(number, remember) for number in _STOP_SIGNALS}
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _child(command: Sequence[str], output: TrainerOutput) -> Iterator[subprocess.Popen[str]]:
    """The running child; its whole group is gone afterwards."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    assert child.stdout is not None
    listener = threading.Thread(target=_listen, args=(child.stdout, output), daemon=True)
    listener.start()
    try:
        yield child
    finally:
        # Also after a good end: what the trainer may have left behind is in its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        # A grandchild in another group could hold the pipe open: do not wait for it for long.
        listener.join(LAST_WORDS_S)


def _listen(stream: IO[str], output: TrainerOutput) -> None:
    with stream:
        for line in stream:
            output.feed(line.rstrip("\n"))
