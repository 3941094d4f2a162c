"""Running of programs, each in a separate process (`runner.py`).

    run_program --descriptors--> runner process --fork--> program process --outcomes--> CallOutcome

Python's start takes longer than most programs. Therefore one runner process starts once and is
forked for each program. The runner never runs a program itself, so programs cannot affect each
other.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.env import sandbox
from ludus.env.text.unicode import replace_surrogates
from ludus.proto.errors import ConfigError, InfrastructureError

from ..problems import FUNCTION_NAME, Arguments

_RUNNER_FILE = Path(__file__).with_name("runner.py")
_MAX_OUTCOME_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_WALL_PER_CPU_S = 3
"""Wall-clock limit per second of CPU time; other processes use the CPUs too."""
_START_TIMEOUT_S = 30
_INHERITED_VARIABLES = ("LD_LIBRARY_PATH", "PATH")
_SDK_FOLDER = Path(sandbox.__path__[0]).absolute().parent
"""Folder of the package `ludus.env`. The runner imports its sandbox and the standard library."""


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Resource limits of a program."""

    cpu_s: int
    memory_bytes: int
    output_bytes: int
    """Maximum size of stdout, and of stderr. Further output is dropped."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The result of one call of the function."""

    has_returned: bool = False
    value: Any = None
    error: str = "the outcome is not readable"


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The exit, the output and the call outcomes of a program."""

    exit_code: int
    timed_out: bool
    stdout: str
    stderr: str
    outcomes: tuple[CallOutcome, ...]
    """One outcome per call, up to the last call that was reached."""


@dataclass(slots=True)
class _Pipe:
    """The bytes read from a pipe, up to a limit."""

    max_bytes: int
    content: bytearray = field(default_factory=bytearray)

    def append(self, chunk: bytes) -> None:
        self.content += chunk[: self.max_bytes - len(self.content)]

    def decode(self) -> str:
        return self.content.decode(errors="replace")


class _Runner:
    """The process that is forked for each program."""

    def __init__(self) -> None:
        self._requests, runner_socket = socket.socketpair()
        variables = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
        arguments = [str(_RUNNER_FILE), str(runner_socket.fileno()), str(_SDK_FOLDER)]
        with runner_socket:
            process = subprocess.Popen(
                # -S -P: programs may not use installed packages, so do not search for them.
                [sys.executable, "-S", "-P", "-B", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[runner_socket.fileno()],
                cwd="/",
                env={
                    **variables,
                    "PYTHONHASHSEED": "0",  # sets of strings have the same order in every run
                    "PYTHONUTF8": "1",
                },
                start_new_session=True,
            )
        weakref.finalize(self, _stop_runner, self._requests, process, os.getpid())

    def fork(self, descriptors: Sequence[int]) -> None:
        """Start a process for a program that uses these file descriptors.

        Raises:
            OSError: The runner has exited.
        """
        socket.send_fds(self._requests, [b"\0"], descriptors)


def _stop_runner(requests: socket.socket, process: subprocess.Popen[bytes], owner_pid: int) -> None:
    """Stop a runner. A forked copy of its owner only closes the socket."""
    if os.getpid() == owner_pid:
        with contextlib.suppress(OSError):
            requests.shutdown(socket.SHUT_RDWR)
        process.wait()
    requests.close()


@functools.lru_cache(maxsize=1)
def _get_runner(pid: int) -> _Runner:
    """Return the runner of the process with id `pid`.

    A forked process needs a new runner, because its sandbox may be different.
    """
    return _Runner()


def run_program(code: str, calls: Sequence[Arguments], limits: ProgramLimits) -> ProgramResult:
    """Run a program, call its function with each of `calls`, and return the result.

    Raises:
        ConfigError: This system cannot sandbox the program.
        InfrastructureError: The program's process did not start.
    """
    job = {
        "code": code,
        "function": FUNCTION_NAME,
        "calls": list(calls),
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_bytes,
    }
    with contextlib.ExitStack() as stack:
        (job_reader, job_writer), *output_pipes = [_open_pipe(stack) for _ in range(5)]
        program_files = [job_reader, *(writer for _, writer in output_pipes)]
        _start_program(program_files)
        for file in program_files:
            file.close()
        with contextlib.suppress(BrokenPipeError), job_writer:
            job_writer.write(json.dumps(job).encode())
        return _collect_result([reader for reader, _ in output_pipes], limits)


def _open_pipe(stack: contextlib.ExitStack) -> tuple[io.FileIO, io.BufferedWriter]:
    reader, writer = os.pipe()
    return (
        stack.enter_context(open(reader, "rb", buffering=0)),
        stack.enter_context(open(writer, "wb")),
    )


def _start_program(files: Sequence[io.IOBase]) -> None:
    descriptors = [file.fileno() for file in files]
    try:
        _get_runner(os.getpid()).fork(descriptors)
    except OSError:  # the runner was killed
        _get_runner.cache_clear()
        _get_runner(os.getpid()).fork(descriptors)


def _collect_result(files: Sequence[io.FileIO], limits: ProgramLimits) -> ProgramResult:
    """Read stdout, stderr, the outcomes and the exit status of a program from `files`."""
    stdout_file, stderr_file, outcomes_file, exit_status_file = files
    pipes = {
        stdout_file: _Pipe(limits.output_bytes),
        stderr_file: _Pipe(limits.output_bytes),
        outcomes_file: _Pipe(_MAX_OUTCOME_BYTES),
        exit_status_file: _Pipe(_READ_BYTES),
    }
    is_in_time = _read_pipes(pipes, pipes[outcomes_file], limits.cpu_s * _WALL_PER_CPU_S)
    start_line, *outcome_lines = bytes(pipes[outcomes_file].content).split(b"\n")[:-1] or [b""]
    pid = _read_pid(start_line, pipes[stderr_file].decode())
    if not is_in_time:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    exit_text = bytes(pipes[exit_status_file].content) or exit_status_file.readall()
    if not exit_text:
        raise InfrastructureError(
            "the exit code of the program is missing because its parent process was killed; check"
            " whether the machine is out of memory"
        )
    exit_code = int(exit_text)
    return ProgramResult(
        exit_code,
        # A program cannot send itself a signal, so SIGKILL means a limit.
        timed_out=not is_in_time or exit_code == -signal.SIGKILL,
        stdout=pipes[stdout_file].decode(),
        stderr=pipes[stderr_file].decode(),
        outcomes=tuple(map(_parse_outcome, outcome_lines)),
    )


def _read_pipes(pipes: dict[Any, _Pipe], outcomes_pipe: _Pipe, wall_s: float) -> bool:
    """Read until all pipes are closed. Return False if that exceeds the time limit.

    The time limit of the program starts when the program runs, not when its process is forked.
    """
    deadline, has_started = time.monotonic() + _START_TIMEOUT_S, False
    with selectors.DefaultSelector() as selector:
        for file in pipes:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            for key, _ in selector.select(remaining_s):
                chunk = os.read(key.fd, _READ_BYTES)
                pipes[key.fileobj].append(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
            if outcomes_pipe.content and not has_started:
                deadline, has_started = time.monotonic() + wall_s, True
    return True


def _read_pid(start_line: bytes, stderr: str) -> int:
    """Return the program's process id from the first line of its outcomes."""
    if not start_line:
        _get_runner.cache_clear()
        error_lines = stderr.strip().splitlines() or ["see the server's stderr"]
        raise InfrastructureError(
            f"the program's process did not start within {_START_TIMEOUT_S} s: {error_lines[-1]}"
        )
    start_message = json.loads(start_line)
    if "refused" in start_message:
        raise ConfigError(
            f"this machine cannot sandbox programs: {start_message['refused']}; serve coding_env "
            "on Linux and connect to its address"
        )
    return int(start_message["pid"])


def _parse_outcome(line: bytes) -> CallOutcome:
    try:
        outcome = json.loads(line)
        if not isinstance(outcome, dict):
            return CallOutcome()
        if "value" in outcome:
            return CallOutcome(True, outcome["value"], "")
        return CallOutcome(error=replace_surrogates(str(outcome.get("error"))))
    except (ValueError, RecursionError):  # the program itself wrote to this pipe
        return CallOutcome()
