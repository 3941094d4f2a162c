"""Rules that run in a forked process, because third-party code may exit or never return.

    run_forked --fork--> child: one rule after another --one line per rule--> run_forked
               --kill--> a child whose rule does not return; the next rule runs in a new child

The child is forked instead of started, so that a rule can be any function.
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
"""A function that returns a rule's fault; empty if the rule is kept."""

MAX_OUTPUT_BYTES = 4 << 20
"""Maximum size of the output of one rule."""
_MAX_FAULT_CHARS = 4_000
_MAX_SHOWN_BYTES = 200
_GRACE_S = 2.0
"""Time after the limit for the child to write its traceback and exit before it is killed."""
_POLL_S = 0.05
_SDK = Path(__file__).parents[1]
_MACHINERY = tuple(
    str(_SDK / part) for part in ("check", "contract", "encoding.py", "targets/targets.py")
)
"""Path prefixes of the code that calls the environment in the rules."""
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


class UncheckableError(LudusError):
    """An environment that cannot be checked at all."""


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """The outcome of one rule."""

    fault: str = ""
    """Expected and actual behavior; empty if the rule is kept."""
    is_uncheckable: bool = False
    """True if the rule raised UncheckableError."""
    is_complete: bool = True
    """False if the rule reached its time limit."""


def run_forked(rules: Sequence[Rule], timeout_s: float) -> Generator[RuleOutcome, None, None]:
    """Yield the outcome of each rule, and stop rules that reach the time limit."""
    child: _RuleProcess | None = None
    try:
        for index in range(len(rules)):
            if child is None:
                child = _RuleProcess(rules[index:], timeout_s)
            outcome = child.next_outcome()
            if child.is_over:
                child.close()
                child = None
            yield outcome
    finally:
        if child is not None:
            child.close()


class _RuleProcess:
    """A forked process that runs the rules in order."""

    def __init__(self, rules: Sequence[Rule], timeout_s: float) -> None:
        self.is_over = False
        """True if the process runs no further rules."""
        self._timeout_s = timeout_s
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - see `close`
        self._tracebacks = tempfile.TemporaryFile()  # noqa: SIM115 - see `close`
        self._num_output_bytes = 0
        """Size of the output of the previous rules."""
        self._received = b""
        self._reader, writer = os.pipe()
        self._status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._reader)
            _run_child(rules, writer, self._output, self._tracebacks, timeout_s)
        os.close(writer)

    def next_outcome(self) -> RuleOutcome:
        deadline_s = time.monotonic() + self._timeout_s + _GRACE_S
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        has_closed = False
        while not (has_closed or b"\n" in self._received):
            if time.monotonic() > deadline_s:
                return self._timed_out()
            if poller.poll(_POLL_S * 1000):
                chunk = os.read(self._reader, 1 << 16)
                self._received += chunk
                has_closed = not chunk
            elif self._has_exceeded_output():
                return self._output_exceeded()
        line, newline, self._received = self._received.partition(b"\n")
        if not newline:
            return (
                self._output_exceeded() if self._has_exceeded_output() else self._process_exited()
            )
        outcome, num_output_bytes = orjson.loads(line)
        if num_output_bytes - self._num_output_bytes > MAX_OUTPUT_BYTES:
            return self._output_exceeded()
        # Output that exists now may already belong to the next rule.
        self._num_output_bytes = num_output_bytes
        return RuleOutcome(**outcome)

    def close(self) -> None:
        self._kill()
        self._output.close()
        self._tracebacks.close()

    def _kill(self) -> None:
        """Kill the process and all processes that it started."""
        self.is_over = True
        if self._status is None:
            for kill in (os.killpg, os.kill):  # a new child may not have its own group yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(self._pid, signal.SIGKILL)
            _, self._status = os.waitpid(self._pid, 0)
            os.close(self._reader)

    def _output_size(self) -> int:
        return os.fstat(self._output.fileno()).st_size

    def _has_exceeded_output(self) -> bool:
        return self._output_size() - self._num_output_bytes > MAX_OUTPUT_BYTES

    def _output_exceeded(self) -> RuleOutcome:
        self._kill()
        start = os.pread(self._output.fileno(), _MAX_SHOWN_BYTES, self._num_output_bytes)
        return RuleOutcome(
            f"expected at most {MAX_OUTPUT_BYTES} bytes of output, got more, starting with"
            f" {start.decode(errors='replace')!r}"
        )

    def _timed_out(self) -> RuleOutcome:
        self._kill()
        traceback = os.pread(self._tracebacks.fileno(), 1 << 20, 0).decode(errors="replace")
        call = _find_call(traceback)
        reason = f": {call} did not return" if call else ""
        return RuleOutcome(
            f"the rule did not end within {self._timeout_s:g} s{reason}", False, False
        )

    def _process_exited(self) -> RuleOutcome:
        """Return the outcome of a rule whose process exited or closed its pipe."""
        if os.fstat(self._tracebacks.fileno()).st_size:
            return self._timed_out()
        self._kill()
        assert self._status is not None, "the process was killed"
        code = os.waitstatus_to_exitcode(self._status)
        status = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        start = max(0, self._output_size() - _MAX_SHOWN_BYTES)
        last = os.pread(self._output.fileno(), _MAX_SHOWN_BYTES, start).decode(errors="replace")
        output = f" after writing {last!r}" if last else ""
        return RuleOutcome(f"the rule's process exited with {status}{output}")


def _run_child(
    rules: Sequence[Rule], writer: int, output: IO[bytes], tracebacks: IO[bytes], timeout_s: float
) -> NoReturn:
    try:
        # Freeing gRPC's garbage from before the fork would wait for threads that do not exist here.
        gc.freeze()
        # The group allows killing all descendants, and keeps Ctrl-C for the parent.
        os.setsid()
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.set_wakeup_fd(-1)
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
        for rule in rules:
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=tracebacks)
            outcome = _run_rule(rule)
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(Exception):  # the rule may have closed it
                sys.stdout.flush()
            message = (outcome, os.fstat(output.fileno()).st_size)
            _write_all(writer, orjson.dumps(message) + b"\n")
    finally:
        os._exit(0)


def _run_rule(rule: Rule) -> RuleOutcome:
    try:
        return RuleOutcome(_make_encodable(rule()))
    except UncheckableError as error:
        return RuleOutcome(_make_encodable(str(error)), is_uncheckable=True)
    except BaseException as error:  # noqa: BLE001 - an error of third-party code is the result
        text = f"{type(error).__name__}: {error_message(error)}"
        return RuleOutcome(_make_encodable(f"expected no error, got {text}"))


def _make_encodable(text: str) -> str:
    return text[:_MAX_FAULT_CHARS].encode(errors="backslashreplace").decode()


def _write_all(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def _find_call(traceback: str) -> str:
    """Return the environment's call in the main thread's traceback; empty if there is none."""
    call = ""
    for path, line, name in _FRAME.findall(traceback.rpartition("\n\n")[2]):  # innermost first
        if path.startswith(_MACHINERY):
            return call
        call = f"{name} ({path}, line {line})"
    return ""
