"""Control of a process of the soak: start, kill, pause, restart and measure it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.env.processes import list_child_pids
from tests.soak.memory import Sample, measure_process

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
_POLL_S = 0.05
_MAX_LINE_CHARS = 300


@dataclass(slots=True)
class Lifetime:
    """One operating-system process of a FleetProcess, from start to exit."""

    name: str
    pid: int
    started_s: float
    samples: list[Sample] = field(default_factory=list)


class FleetProcess:
    """A process of the fleet that can be killed and started again.

    Args:
        admin: URL of the admin port, whose /readyz is polled at the start; "" if there is none.
        is_protected: whether no fault may kill the process.
        reads_commands: whether the process reads commands from its standard input.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        admin: str = "",
        is_protected: bool = True,
        reads_commands: bool = False,
    ) -> None:
        self.name = name
        self.admin = admin
        self.is_protected = is_protected
        self.lifetimes: list[Lifetime] = []
        self.is_up = False
        """True if the process is ready and is not being killed."""
        self.process: asyncio.subprocess.Process | None = None
        self._arguments = arguments
        self._environment = dict(environment)
        self._log = log
        self._pipe = asyncio.subprocess.PIPE if reads_commands else None
        self._is_exit_expected = False

    @property
    def pid(self) -> int:
        """Id of the latest process."""
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid

    @property
    def unexpected_exit(self) -> str:
        """Description of an unexpected exit of the process; "" if there was none."""
        code = None if self.process is None else self.process.returncode
        if code is None or self._is_exit_expected:
            return ""
        log_lines = self._read_last_lines()
        return f"{self.name} (pid {self.pid}) exited unexpectedly with {code}: {log_lines}"

    async def start(self) -> None:
        """Start the process and wait until it is ready."""
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._arguments,
                stdin=self._pipe or asyncio.subprocess.DEVNULL,
                stdout=self._pipe or log,
                stderr=log,
                cwd=ROOT,
                env=self._environment,
                limit=2**22,
            )
        self.process, self._is_exit_expected = process, False
        self.lifetimes.append(Lifetime(self.name, self.process.pid, time.monotonic()))
        if self.admin:
            await self._wait_until_ready()
        self.is_up = True

    def take_sample(self) -> None:
        """Record the memory of the process."""
        if self.process is not None and self.process.returncode is None:
            new_sample = measure_process(self.pid, time.monotonic())
            if new_sample is not None:
                self.lifetimes[-1].samples.append(new_sample)

    async def kill(self) -> None:
        """Kill the process."""
        self.is_up, self._is_exit_expected = False, True
        assert self.process is not None, f"{self.name} was never started"
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def pause(self, duration_s: float) -> None:
        """Pause the process, so that its monotonic clock jumps."""
        pid = self.pid
        send_signal(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(duration_s)
        finally:
            send_signal(pid, signal.SIGCONT)

    async def stop(self) -> str:
        """Stop the process with SIGTERM; return an error if it does not exit with 0, or ""."""
        self.is_up, self._is_exit_expected = False, True
        process = self.process
        if process is None or process.returncode is not None:
            return ""
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            await self.kill()
            return f"{self.name} did not exit within {STOP_TIMEOUT_S:g} s of SIGTERM"
        return "" if process.returncode == 0 else f"{self.name} exited with {process.returncode}"

    async def send_command(self, command: str, *, is_last: bool = False) -> None:
        """Write a command to the standard input; after the last command, the process may exit."""
        if self.process is None or self.process.returncode is not None:
            return
        if is_last:
            self.is_up, self._is_exit_expected = False, True
        assert self.process.stdin is not None, f"{self.name} reads no commands"
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{command}\n".encode())
            await self.process.stdin.drain()

    async def iterate_output(self) -> AsyncIterator[bytes]:
        """Yield the lines of the standard output."""
        assert self.process is not None and self.process.stdout is not None
        stdout = self.process.stdout
        while line := await stdout.readline():
            yield line

    async def wait(self, timeout_s: float) -> bool:
        """Return whether the process exits within `timeout_s`."""
        assert self.process is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), timeout_s)
            return True
        return False

    async def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        process = self.process
        async with httpx.AsyncClient(timeout=5) as http:
            while time.monotonic() < deadline_s:
                if process is None or process.returncode is not None:
                    raise RuntimeError(f"{self.name} did not start: {self._read_last_lines()}")
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{self.admin}/readyz")).status_code == 200:
                        return
                await asyncio.sleep(_POLL_S)
        raise RuntimeError(f"{self.name} was not ready within {START_TIMEOUT_S:g} s")

    def _read_last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " | ".join(line[:_MAX_LINE_CHARS] for line in lines[-3:])


def send_signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return False if the process has exited."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def list_workers(server: FleetProcess) -> list[int]:
    """Return the worker processes of a server, without the first processes of their namespaces."""
    children = [pid for fork in list_child_pids(server.pid) for pid in list_child_pids(fork)]
    return sorted(pid for pid in children if not _is_first_of_namespace(pid))


def _is_first_of_namespace(pid: int) -> bool:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        ids = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
        return len(ids) > 1 and ids[-1] == "1"
    return True
