"""Programs that nobody has read, each run in a process of its own: `runner.py` beside this file.

Python's start takes longer than most programs, so there is one process that has started and is
copied for each of them. It has seen none of them, and knows nothing else either.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.env import sandbox
from ludus.proto.errors import ConfigError, InfrastructureError

from ..problems import FUNCTION, Arguments

_RUNNER = Path(__file__).with_name("runner.py")
_MAX_OUTCOME_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_WALL_PER_CPU = 3
"""How much longer than its time of computing a program may take: others compute, too."""
_START_S = 30
_PASSED_VARIABLES = ("LD_LIBRARY_PATH", "PATH")
_SDK = Path(sandbox.__path__[0]).parents[2]
"""All that the runner needs beside the standard library."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    cpu_s: int
    memory_bytes: int
    output_bytes: int
    """Kept of each of stdout and stderr; what is written beyond is dropped."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call came to."""

    has_returned: bool = False
    value: Any = None
    error: str = "nothing that can be read"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    exit_code: int
    timed_out: bool
    stdout: str
    stderr: str
    outcomes: tuple[Outcome, ...]
    """By call, as far as they were reached."""


@dataclass(slots=True)
class _Pipe:
    """The first bytes of what comes out of one."""

    limit: int
    kept: bytearray


class _Runner:
    """The process that is copied for each program."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair()
        variables = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
        with theirs:
            process = subprocess.Popen(
                # Without what is installed: it would be looked for, and then taken away again.
                [sys.executable, "-S", "-P", "-B", str(_RUNNER), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env={
                    **variables,
                    "PYTHONPATH": str(_SDK),
                    "PYTHONHASHSEED": "0",  # sets of texts have the same order in every run
                    "PYTHONUTF8": "1",
                },
                start_new_session=True,
            )
        weakref.finalize(self, _end, self._requests, process, os.getpid())

    def copy(self, descriptors: Sequence[int]) -> None:
        """Make it run a program that reads and writes these.

        Raises:
            OSError: it has ended.
        """
        socket.send_fds(self._requests, [b"\0"], descriptors)


def _end(requests: socket.socket, process: subprocess.Popen[bytes], made_in: int) -> None:
    """Let a runner end, unless this is only a copy of the process that made it."""
    if os.getpid() == made_in:
        with contextlib.suppress(OSError):
            requests.shutdown(socket.SHUT_RDWR)
        process.wait()
    requests.close()


@functools.lru_cache(maxsize=1)
def _runner_of(pid: int) -> _Runner:
    """The runner of this process; what is forked off may be confined in another way."""
    return _Runner()


def run_program(code: str, calls: Sequence[Arguments], limits: Limits) -> Ended:
    """How the program ended, and what its function returned for each call.

    Raises:
        ConfigError: this system cannot confine it.
        InfrastructureError: its process did not come up.
    """
    job = {
        "code": code,
        "function": FUNCTION,
        "calls": list(calls),
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_bytes,
    }
    with contextlib.ExitStack() as stack:
        (its_job, job_file), *rest = [_pipe(stack) for _ in range(5)]
        its_files = [its_job, *(writer for _, writer in rest)]
        _copy(its_files)
        for one in its_files:
            one.close()
        with contextlib.suppress(BrokenPipeError), job_file:
            job_file.write(json.dumps(job).encode())
        return _followed(*(reader for reader, _ in rest), limits)


def _pipe(stack: contextlib.ExitStack) -> tuple[io.FileIO, io.BufferedWriter]:
    reader, writer = os.pipe()
    return (
        stack.enter_context(open(reader, "rb", buffering=0)),
        stack.enter_context(open(writer, "wb")),
    )


def _copy(files: Sequence[io.IOBase]) -> None:
    descriptors = [one.fileno() for one in files]
    try:
        _runner_of(os.getpid()).copy(descriptors)
    except OSError:  # something has ended it since
        _runner_of.cache_clear()
        _runner_of(os.getpid()).copy(descriptors)


def _followed(
    stdout: io.FileIO, stderr: io.FileIO, outcomes: io.FileIO, end: io.FileIO, limits: Limits
) -> Ended:
    pipes = {
        stdout: _Pipe(limits.output_bytes, bytearray()),
        stderr: _Pipe(limits.output_bytes, bytearray()),
        outcomes: _Pipe(_MAX_OUTCOME_BYTES, bytearray()),
        end: _Pipe(_READ_BYTES, bytearray()),
    }
    in_time = _read(pipes, pipes[outcomes], limits.cpu_s * _WALL_PER_CPU)
    first, *rest = bytes(pipes[outcomes].kept).split(b"\n")[:-1] or [b""]
    said = {file: bytes(pipes[file].kept).decode(errors="replace") for file in (stdout, stderr)}
    pid = _pid_in(first, said[stderr])
    if not in_time:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    told = bytes(pipes[end].kept) or end.readall()
    if not told:
        raise InfrastructureError(
            "expected the exit code of the program, got none: something has ended the process "
            "that waits for it; see whether the machine is out of memory"
        )
    exit_code = int(told)
    return Ended(
        exit_code,
        # It can send itself no signal, so that this one is the limit's.
        timed_out=not in_time or exit_code == -signal.SIGKILL,
        stdout=said[stdout],
        stderr=said[stderr],
        outcomes=tuple(map(_outcome_of, rest)),
    )


def _read(pipes: dict[Any, _Pipe], told: _Pipe, wall_s: float) -> bool:
    """Read until all are closed; False where that takes longer than it may.

    The time of a program counts from when it runs, not from when its process is made.
    """
    deadline, has_begun = time.monotonic() + _START_S, False
    with selectors.DefaultSelector() as selector:
        for source in pipes:
            selector.register(source, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in selector.select(left):
                data = os.read(key.fd, _READ_BYTES)
                pipe = pipes[key.fileobj]
                pipe.kept += data[: pipe.limit - len(pipe.kept)]
                if not data:
                    selector.unregister(key.fileobj)
            if told.kept and not has_begun:
                deadline, has_begun = time.monotonic() + wall_s, True
    return True


def _pid_in(first: bytes, stderr: str) -> int:
    """The program's process, from the line that says it has come up."""
    if not first:
        _runner_of.cache_clear()
        said = stderr.strip().splitlines() or ["see what the server has written to stderr"]
        raise InfrastructureError(
            f"expected a process for the program to come up within {_START_S} s, got none: "
            f"{said[-1]}"
        )
    started = json.loads(first)
    if "refused" in started:
        raise ConfigError(
            f"programs of a policy cannot be confined here: {started['refused']}; serve coding_env "
            "on Linux and play it there by its address"
        )
    return int(started["pid"])


def _outcome_of(line: bytes) -> Outcome:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # the program has written there itself
        return Outcome()
    if not isinstance(found, dict):
        return Outcome()
    if "value" in found:
        return Outcome(True, found["value"], "")
    return Outcome(error=str(found.get("error")))
