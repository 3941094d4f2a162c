"""Rules that run in a forked process, because third-party code may exit or never return.

    run_forked --fork--> child: one rule after another --one line per rule--> run_forked
               --kill--> a child whose rule does not return; the next rule runs in a new child

The child is forked, not started as a new program, so that a rule can be any function.
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

from ludus.env.sandbox.processes import kill_group
from ludus.proto.errors import LudusError, read_error_message

Rule = Callable[[], str]
"""Function that checks a rule, and returns its fault; empty if the rule is kept."""

MAX_OUTPUT_BYTES = 4 << 20
"""Maximum size of the output of one rule."""
_MAX_FAULT_CHARS = 4_000
_MAX_SHOWN_BYTES = 200
_EXIT_GRACE_S = 2.0
"""Time for the child to write its traceback and exit after the time limit. It is then killed."""
_POLL_INTERVAL_S = 0.05
_SDK_FOLDER = Path(__file__).parents[1]
_CHECKER_PATHS = tuple(
    str(_SDK_FOLDER / relative_path)
    for relative_path in ("check", "contract", "encoding.py", "targets/targets.py")
)
"""Path prefixes of the checker's own code, which calls the environment."""
_FRAME_PATTERN = re.compile(r'  File "(.+)", line (\d+) in (.+)')


class UncheckableError(LudusError):
    """The environment cannot be checked at all."""


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
    """Yield the outcome of each rule. A rule that reaches the time limit is stopped."""
    process: _RuleProcess | None = None
    try:
        for index in range(len(rules)):
            if process is None:
                process = _RuleProcess(rules[index:], timeout_s)
            outcome = process.next_outcome()
            if process.has_stopped:
                process.close()
                process = None
            yield outcome
    finally:
        if process is not None:
            process.close()


class _RuleProcess:
    """A forked process that runs the rules in order."""

    def __init__(self, rules: Sequence[Rule], timeout_s: float) -> None:
        self.has_stopped = False
        """True if the process cannot run more rules."""
        self._timeout_s = timeout_s
        self._output_file = tempfile.TemporaryFile()  # noqa: SIM115 - see `close`
        self._traceback_file = tempfile.TemporaryFile()  # noqa: SIM115 - see `close`
        self._num_output_bytes = 0
        """Size in bytes of the output of the previous rules."""
        self._unread_bytes = b""
        self._read_descriptor, write_descriptor = os.pipe()
        self._wait_status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._read_descriptor)
            _run_child_process(
                rules, write_descriptor, self._output_file, self._traceback_file, timeout_s
            )
        os.close(write_descriptor)

    def next_outcome(self) -> RuleOutcome:
        deadline_s = time.monotonic() + self._timeout_s + _EXIT_GRACE_S
        poller = select.poll()
        poller.register(self._read_descriptor, select.POLLIN)
        is_pipe_closed = False
        while not (is_pipe_closed or b"\n" in self._unread_bytes):
            if time.monotonic() > deadline_s:
                return self._stop_after_timeout()
            if poller.poll(_POLL_INTERVAL_S * 1000):
                chunk = os.read(self._read_descriptor, 1 << 16)
                self._unread_bytes += chunk
                is_pipe_closed = not chunk
            elif self._has_exceeded_output():
                return self._stop_after_excess_output()
        line, newline, self._unread_bytes = self._unread_bytes.partition(b"\n")
        if not newline:
            has_exceeded = self._has_exceeded_output()
            return self._stop_after_excess_output() if has_exceeded else self._stop_after_exit()
        outcome, num_output_bytes = orjson.loads(line)
        if num_output_bytes - self._num_output_bytes > MAX_OUTPUT_BYTES:
            return self._stop_after_excess_output()
        # The file may already contain output of the next rule, so its current size is not used.
        self._num_output_bytes = num_output_bytes
        return RuleOutcome(**outcome)

    def close(self) -> None:
        self._kill()
        self._output_file.close()
        self._traceback_file.close()

    def _kill(self) -> None:
        """Kill the process and all processes that it started."""
        self.has_stopped = True
        if self._wait_status is None:
            kill_group(self._pid)
            _, self._wait_status = os.waitpid(self._pid, 0)
            os.close(self._read_descriptor)

    def _measure_output(self) -> int:
        return os.fstat(self._output_file.fileno()).st_size

    def _read_output(self, offset: int) -> str:
        output = os.pread(self._output_file.fileno(), _MAX_SHOWN_BYTES, offset)
        return output.decode(errors="replace")

    def _has_exceeded_output(self) -> bool:
        return self._measure_output() - self._num_output_bytes > MAX_OUTPUT_BYTES

    def _stop_after_excess_output(self) -> RuleOutcome:
        self._kill()
        first_output = self._read_output(self._num_output_bytes)
        return RuleOutcome(
            f"expected at most {MAX_OUTPUT_BYTES} bytes of output, got more, starting with"
            f" {first_output!r}"
        )

    def _stop_after_timeout(self) -> RuleOutcome:
        self._kill()
        traceback = os.pread(self._traceback_file.fileno(), 1 << 20, 0).decode(errors="replace")
        call_text = _find_call(traceback)
        reason = f": {call_text} did not return" if call_text else ""
        fault = f"the rule did not end within {self._timeout_s:g} s{reason}"
        return RuleOutcome(fault, is_complete=False)

    def _stop_after_exit(self) -> RuleOutcome:
        """Return the outcome of a rule whose process exited or closed its pipe."""
        if os.fstat(self._traceback_file.fileno()).st_size:
            return self._stop_after_timeout()
        self._kill()
        assert self._wait_status is not None, "the process was killed"
        exit_code = os.waitstatus_to_exitcode(self._wait_status)
        exit_text = f"exit code {exit_code}" if exit_code >= 0 else signal.Signals(-exit_code).name
        last_output = self._read_output(max(0, self._measure_output() - _MAX_SHOWN_BYTES))
        output_text = f" after writing {last_output!r}" if last_output else ""
        return RuleOutcome(f"the rule's process exited with {exit_text}{output_text}")


def _run_child_process(
    rules: Sequence[Rule],
    write_descriptor: int,
    output_file: IO[bytes],
    traceback_file: IO[bytes],
    timeout_s: float,
) -> NoReturn:
    try:
        # Freeing gRPC objects from before the fork would wait for threads that do not exist here.
        gc.freeze()
        # A new process group can be killed with all descendants, and does not receive Ctrl-C.
        os.setsid()
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.set_wakeup_fd(-1)
        for descriptor in (1, 2):
            os.dup2(output_file.fileno(), descriptor)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
        pipe = open(write_descriptor, "wb")  # noqa: SIM115 - this process exits in this function
        for rule in rules:
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=traceback_file)
            outcome = _run_rule(rule)
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(Exception):  # the rule may have closed stdout
                sys.stdout.flush()
            outcome_message = (outcome, os.fstat(output_file.fileno()).st_size)
            pipe.write(orjson.dumps(outcome_message) + b"\n")
            pipe.flush()
    finally:
        os._exit(0)


def _run_rule(rule: Rule) -> RuleOutcome:
    try:
        return RuleOutcome(_limit_text(rule()))
    except UncheckableError as error:
        return RuleOutcome(_limit_text(str(error)), is_uncheckable=True)
    except BaseException as error:  # noqa: BLE001 - an error of third-party code is the result
        error_text = f"{type(error).__name__}: {read_error_message(error)}"
        return RuleOutcome(_limit_text(f"expected no error, got {error_text}"))


def _limit_text(text: str) -> str:
    return text[:_MAX_FAULT_CHARS].encode(errors="backslashreplace").decode()


def _find_call(traceback: str) -> str:
    """Return the call of the environment in the main thread's traceback, or an empty text."""
    call_text = ""
    main_thread_text = traceback.rpartition("\n\n")[2]
    for file_path, line_number, function_name in _FRAME_PATTERN.findall(main_thread_text):
        # The innermost frame is first.
        if file_path.startswith(_CHECKER_PATHS):
            return call_text
        call_text = f"{function_name} ({file_path}, line {line_number})"
    return ""
