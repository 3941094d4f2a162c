"""Rules that run in a process of their own: foreign code may end it, or never return.

    outcomes --fork--> child: rule after rule --a line for each--> outcomes
             --kill--> a child whose rule has no end; the next rule begins in another one

The child is forked, not started, so that a rule may be any function of any environment.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import re
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import orjson

from ludus.proto.errors import LudusError, error_message

Rule = Callable[[], str]
"""What was expected and what was found instead; empty where it held."""

MAX_OUTPUT_BYTES = 4 << 20
"""Of one rule."""
_MAX_FAULT_CHARS = 4_000
_MAX_SHOWN_BYTES = 200
_GRACE_S = 2.0
"""A child ends itself and says where it was; after this it is killed."""
_LOOK_EVERY_S = 0.05
_SDK = Path(__file__).parents[1]
_MACHINERY = tuple(
    str(_SDK / part) for part in ("check", "contract", "encoding.py", "targets/targets.py")
)
"""What calls the environment in these rules."""
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


class MistakeError(LudusError):
    """What was asked for cannot be checked at all."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rule went."""

    fault: str = ""
    """What was expected and what was found; empty where it held."""
    is_mistake: bool = False
    """The rule raised MistakeError."""
    has_ended: bool = True
    """False where it took too long."""


def outcomes(rules: Sequence[Rule], timeout_s: float) -> Generator[Outcome, None, None]:
    """How each rule went, as it comes; one that takes longer than the limit is ended."""
    child: _Child | None = None
    try:
        for index in range(len(rules)):
            if child is None:
                child = _Child(rules[index:], timeout_s)
            outcome = child.next_outcome()
            if child.is_over:
                child.close()
                child = None
            yield outcome
    finally:
        if child is not None:
            child.close()


class _Child:
    """A forked process that runs the rules in order."""

    def __init__(self, rules: Sequence[Rule], timeout_s: float) -> None:
        self.is_over = False
        """True when it runs no more rules."""
        self._timeout_s = timeout_s
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - see `close`
        self._places = tempfile.TemporaryFile()  # noqa: SIM115 - see `close`
        self._num_output_bytes = 0
        """Of the rules before."""
        self._told = b""
        self._reader, writer = os.pipe()
        self._status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._reader)
            _become_child(rules, writer, self._output, self._places, timeout_s)
        os.close(writer)

    def next_outcome(self) -> Outcome:
        """How its next rule went."""
        deadline_s = time.monotonic() + self._timeout_s + _GRACE_S
        waiting = select.poll()
        waiting.register(self._reader, select.POLLIN)
        has_left = False
        while not (has_left or b"\n" in self._told):
            if time.monotonic() > deadline_s:
                return self._endless()
            if waiting.poll(_LOOK_EVERY_S * 1000):
                more = os.read(self._reader, 1 << 16)
                self._told += more
                has_left = not more
            elif self._is_flooded():
                return self._flooded()
        line, newline, self._told = self._told.partition(b"\n")
        if not newline:
            return self._flooded() if self._is_flooded() else self._departed()
        outcome, num_output_bytes = orjson.loads(line)
        if num_output_bytes - self._num_output_bytes > MAX_OUTPUT_BYTES:
            return self._flooded()
        # What is there by now may be of the rule after.
        self._num_output_bytes = num_output_bytes
        return Outcome(**outcome)

    def close(self) -> None:
        """End it, and free what it was watched with."""
        self._end()
        self._output.close()
        self._places.close()

    def _end(self) -> None:
        """Kill it, with what it has started."""
        self.is_over = True
        if self._status is None:
            for kill in (os.killpg, os.kill):  # a young child has no group of its own yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(self._pid, signal.SIGKILL)
            _, self._status = os.waitpid(self._pid, 0)
            os.close(self._reader)

    def _output_size(self) -> int:
        return os.fstat(self._output.fileno()).st_size

    def _is_flooded(self) -> bool:
        return self._output_size() - self._num_output_bytes > MAX_OUTPUT_BYTES

    def _flooded(self) -> Outcome:
        self._end()
        start = os.pread(self._output.fileno(), _MAX_SHOWN_BYTES, self._num_output_bytes)
        return Outcome(
            f"expected at most {MAX_OUTPUT_BYTES} bytes of output, got more, which begins with"
            f" {start.decode(errors='replace')!r}"
        )

    def _endless(self) -> Outcome:
        self._end()
        place = _place_of(os.pread(self._places.fileno(), 1 << 20, 0).decode(errors="replace"))
        said = f": {place} did not return" if place else ""
        return Outcome(
            f"expected an end within {self._timeout_s:g} s, got none{said}", False, False
        )

    def _departed(self) -> Outcome:
        """It has ended, or has nothing more to say."""
        if os.fstat(self._places.fileno()).st_size:
            return self._endless()
        self._end()
        assert self._status is not None, "it has ended"
        code = os.waitstatus_to_exitcode(self._status)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        start = max(0, self._output_size() - _MAX_SHOWN_BYTES)
        last = os.pread(self._output.fileno(), _MAX_SHOWN_BYTES, start).decode(errors="replace")
        said = f", after it had written {last!r}" if last else ""
        return Outcome(f"expected an end of the rule, but its process ended with {how}{said}")


def _become_child(
    rules: Sequence[Rule], writer: int, output: IO[bytes], places: IO[bytes], timeout_s: float
) -> NoReturn:
    try:
        # Garbage of before may be gRPC's, and freeing it wait for threads that are not here.
        gc.freeze()
        os.setsid()  # so that all it starts can be killed, and Ctrl-C is its parent's
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.set_wakeup_fd(-1)
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
        for rule in rules:
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=places)
            outcome = _outcome_of(rule)
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(Exception):  # it may have been closed
                sys.stdout.flush()
            told = (outcome, os.fstat(output.fileno()).st_size)
            _write_all(writer, orjson.dumps(told) + b"\n")
    finally:
        os._exit(0)


def _outcome_of(rule: Rule) -> Outcome:
    try:
        return Outcome(_sayable(rule()))
    except MistakeError as error:
        return Outcome(_sayable(str(error)), is_mistake=True)
    except BaseException as error:  # noqa: BLE001 - foreign code: what it raises is the finding
        found = f"{type(error).__name__}: {error_message(error)}"
        return Outcome(_sayable(f"expected no error, got {found}"))


def _sayable(text: str) -> str:
    return text[:_MAX_FAULT_CHARS].encode(errors="backslashreplace").decode()


def _write_all(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def _place_of(traceback: str) -> str:
    """Which call of the environment the main thread was in; empty where that is not told."""
    called = ""
    for path, line, name in _FRAME.findall(traceback.rpartition("\n\n")[2]):  # innermost first
        if path.startswith(_MACHINERY):
            return called
        called = f"{name} ({path}, line {line})"
    return ""
