"""Programs that nobody has read, each run in a process of its own: `runner.py` beside this file."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.proto.errors import ConfigError, InfrastructureError

from ..problems import FUNCTION, Arguments

_RUNNER = Path(__file__).with_name("runner.py")
_MAX_OUTCOME_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_WALL_PER_CPU = 3
"""How much longer than its time of computing a program may take: others compute, too."""
_START_S = 30
_PASSED_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH")


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
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as told:
        try:
            process = _start(writer)
        finally:
            os.close(writer)
        try:
            return _followed(process, told, json.dumps(job).encode(), limits)
        finally:
            _end(process)


def _start(writer: int) -> subprocess.Popen[bytes]:
    variables = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-B", str(_RUNNER), str(writer)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[writer],
        cwd="/",
        # Sets of texts have the same order in every run.
        env={**variables, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
        start_new_session=True,
    )


def _followed(process: subprocess.Popen[bytes], told: Any, job: bytes, limits: Limits) -> Ended:
    assert process.stdin and process.stdout and process.stderr
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(job)
    pipes = {
        process.stdout: _Pipe(limits.output_bytes, bytearray()),
        process.stderr: _Pipe(limits.output_bytes, bytearray()),
        told: _Pipe(_MAX_OUTCOME_BYTES, bytearray()),
    }
    in_time = _read(pipes, pipes[told], limits.cpu_s * _WALL_PER_CPU)
    if not in_time:
        _kill(process)
    exit_code = process.wait()
    stdout, stderr, lines = (bytes(pipe.kept) for pipe in pipes.values())
    first, *rest = lines.split(b"\n")[:-1] or [b""]
    _check_started(first, stderr)
    return Ended(
        exit_code,
        # It can send itself no signal, so that this one is the limit's.
        timed_out=not in_time or exit_code == -signal.SIGKILL,
        stdout=stdout.decode(errors="replace"),
        stderr=stderr.decode(errors="replace"),
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


def _check_started(first: bytes, stderr: bytes) -> None:
    if not first:
        last = stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise InfrastructureError(
            f"expected a process for the program to come up within {_START_S} s, got none: "
            f"{''.join(last) or 'it said nothing'}"
        )
    why = json.loads(first).get("refused")
    if why:
        raise ConfigError(
            f"programs of a policy cannot be confined here: {why}; serve coding_env on Linux and "
            "play it there by its address"
        )


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


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of it, whatever happened."""
    if process.returncode is None:
        _kill(process)
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
