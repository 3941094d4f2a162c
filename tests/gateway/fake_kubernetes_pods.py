"""Logs of the pods in the fake cluster, and commands that run in the pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from aiohttp import web

from tests.gateway.fake_kubernetes_store import StatusError

PROTOCOL = "v4.channel.k8s.io"
_LOG_START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class CommandResult:
    """The result of a command in a pod."""

    output: bytes = b""
    error_output: str = ""
    exit_code: int = 0


CommandRunner = Callable[[str, list[str]], CommandResult]
"""Function that runs a command in the named pod and returns its result."""


@dataclass
class FakePods:
    """Pods that have a log and can run commands."""

    run: CommandRunner = lambda pod, command: CommandResult(
        error_output="no such command", exit_code=127
    )
    logs: dict[str, list[str]] = field(default_factory=dict)
    """Log lines with timestamps, by pod name."""
    num_cut_logs: int = 0
    """Number of remaining log streams that end after one line, like a broken connection."""
    num_silent_logs: int = 0
    """Number of remaining log streams that send nothing and never end."""
    log_error_text: str = ""
    """Error text sent instead of the log, with status 200, as if the node could not read it."""
    num_log_requests: int = 0

    def append_log(self, pod: str, *lines: str) -> None:
        """Append lines to a log, three per second of log time."""
        log = self.logs.setdefault(pod, [])
        for line in lines:
            time = _LOG_START + timedelta(seconds=len(log) // 3)
            log.append(f"{time:%Y-%m-%dT%H:%M:%S}.{len(log):09d}Z {line}")

    async def send_log(self, request: web.Request, pod: str) -> web.StreamResponse:
        """Send the log from a start time, and later lines if the client follows the log."""
        self.num_log_requests += 1
        if pod not in self.logs:
            raise StatusError(400, f'container "ray-head" in pod "{pod}" is waiting to start')
        start_time = request.query.get("sinceTime", "")[:19]
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        if self.log_error_text:
            await response.write(self.log_error_text.encode())
            return response
        is_cut, is_silent, line_index = self.num_cut_logs > 0, self.num_silent_logs > 0, 0
        if "tailLines" in request.query:
            line_index = max(0, len(self.logs[pod]) - int(request.query["tailLines"]))
        self.num_cut_logs -= is_cut
        self.num_silent_logs -= is_silent
        while True:
            for line in [] if is_silent else self.logs.get(pod, [])[line_index:]:
                line_index += 1
                if line[:19] >= start_time:
                    text = line if "timestamps" in request.query else line.partition(" ")[2]
                    await response.write(text.encode() + b"\n")
                    if is_cut:
                        return response
            is_followed = request.query.get("follow") == "true" or is_silent
            if not is_followed or pod not in self.logs:
                return response
            await asyncio.sleep(0.01)

    async def send_exec(self, request: web.Request, pod: str) -> web.StreamResponse:
        """Run a command; send its output in chunks, and then its status."""
        result = self.run(pod, request.query.getall("command"))
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        for start in range(0, len(result.output), 1000):
            await socket.send_bytes(b"\x01" + result.output[start : start + 1000])
        if result.error_output:
            await socket.send_bytes(b"\x02" + result.error_output.encode())
        status = {"status": "Success" if result.exit_code == 0 else "Failure"}
        if result.exit_code:
            status["message"] = f"command terminated with non-zero exit code {result.exit_code}"
        await socket.send_bytes(b"\x03" + json.dumps(status).encode())
        await socket.close()
        return socket
