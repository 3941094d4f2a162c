"""The life of a server process: its event loop, its signals, its heap and its watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Protocol

_log = logging.getLogger(__name__)

STUCK_EXIT_CODE = 70
"""Exit code after a fault of the environment's code (EX_SOFTWARE)."""
_TICK_S = 1.0
_DRAIN_POLL_S = 0.05
_TRIM_PERIOD_S = 60.0
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3  # mallopt(3)
_LARGE_BLOCK_BYTES = 128 * 1024


def make_module_command(module_name: str) -> list[str]:
    """Return the command that runs a module as a process, without imports from its working folder.

    A file of that folder may have the name of a module, such as `json.py`. Only if this process
    itself was started with `python -m`, Python searches that folder first in the new process too.
    """
    try:
        searches_folder = sys.path[:1] in ([""], [os.getcwd()])
    except FileNotFoundError:  # the folder was removed
        searches_folder = False
    return [sys.executable, *([] if searches_folder else ["-P"]), "-m", module_name]


class DrainableServer(AbstractAsyncContextManager[Any], Protocol):
    """A server or gateway, which listens while its context is entered."""

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""

    def drain(self) -> None:
        """Refuse new sessions from now on."""


def run_until_signal(
    server: DrainableServer,
    *,
    drain_grace_s: float,
    on_ready: Callable[[], None] | None = None,
    sigint_drains: bool = False,
) -> None:
    """Run a server until SIGTERM or SIGINT.

    SIGTERM drains: the server stops when its last session has closed, at most `drain_grace_s`
    later. A second signal stops it at once.

    Args:
        on_ready: called when the server listens.
        sigint_drains: True if SIGINT drains like SIGTERM; by default SIGINT stops the server.
    """
    _map_large_blocks()
    with asyncio.Runner(loop_factory=_build_event_loop) as runner:
        runner.run(_serve_and_drain(server, drain_grace_s, on_ready, sigint_drains))


async def _serve_and_drain(
    server: DrainableServer,
    drain_grace_s: float,
    on_ready: Callable[[], None] | None,
    sigint_drains: bool,
) -> None:
    drain_event, stop_event = asyncio.Event(), asyncio.Event()

    def drain_or_stop() -> None:
        (stop_event if drain_event.is_set() else drain_event).set()

    def stop() -> None:
        drain_event.set()
        stop_event.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, drain_or_stop)
    loop.add_signal_handler(signal.SIGINT, drain_or_stop if sigint_drains else stop)
    async with server:
        freeze_heap()
        trim_task = asyncio.create_task(_trim_forever())
        if on_ready is not None:
            on_ready()
        await drain_event.wait()
        trim_task.cancel()
        if drain_grace_s <= 0 or stop_event.is_set():
            return
        server.drain()
        if num_sessions := server.num_sessions:
            message = f"waiting for {num_sessions} sessions, at most {drain_grace_s:g} s"
            _log.warning("draining: %s; a second signal ends the wait", message)
        deadline_s = loop.time() + drain_grace_s
        while server.num_sessions and loop.time() < deadline_s and not stop_event.is_set():
            await asyncio.sleep(_DRAIN_POLL_S)


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pause garbage collection while the block imports large packages, and freeze their objects.

    These objects live as long as the process. Visiting them again and again, during the imports and
    at the exit, takes two fifths of the processor time of a process that imports torch and
    transformers and does nothing else.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def freeze_heap() -> None:
    """Exclude all existing objects from Python's garbage collection.

    Call this once a long-running process has started. A process that has imported torch and ray
    has 400,000 objects. Every full collection visits all of them and pauses the event loop for
    0.2 s, which made the blackjack demo take 1.5 times as long.
    """
    gc.collect()
    gc.freeze()


def _map_large_blocks() -> None:
    """Allocate every large block separately, so that freeing it returns memory to the system.

    By default glibc raises this threshold to the size of the largest freed block, up to 32 MiB.
    After one oversized message, later messages would fragment the heaps of all threads.
    """
    with contextlib.suppress(AttributeError):  # only glibc has mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        mallopt(_M_ARENA_MAX, 2)


async def _trim_forever() -> None:
    """Return free memory in the middle of the heap to the system every minute.

    Without it glibc only returns the end of the heap, and one small block in use keeps everything
    before it. A gateway then never used less memory than at its peak.
    """
    with contextlib.suppress(AttributeError):  # only glibc has malloc_trim
        trim = ctypes.CDLL(None).malloc_trim
        while True:
            await asyncio.sleep(_TRIM_PERIOD_S)
            trim(0)


def _build_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not available on Windows
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Watchdog:
    """Stops a process whose event loop is blocked.

    A gateway, a run or Kubernetes then starts it again. The watchdog's thread counts its own
    seconds, so a pause of the whole machine has no effect. It watches the event loop in which it
    was made, until `stop`.

    Args:
        limit_s: maximum silence of the event loop; 0 sets no limit.
        find_session_fault: returns the reason why a new process is needed, or "".
        end_process: called once with the fault; exits with `STUCK_EXIT_CODE` by default.
    """

    def __init__(
        self,
        limit_s: float,
        find_session_fault: Callable[[], str],
        end_process: Callable[[str], None] | None = None,
        tick_s: float = _TICK_S,
    ) -> None:
        self._limit_s = limit_s
        self._find_session_fault = find_session_fault
        self._end_process = end_process or _end_process
        self._tick_s = tick_s
        self._loop = asyncio.get_running_loop()
        self._silent_s = 0.0
        self._stop_event = threading.Event()
        threading.Thread(target=self._watch, name="ludus-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop_event.set()

    def _watch(self) -> None:
        while not self._stop_event.wait(self._tick_s):
            fault = self._find_current_fault()
            if fault:
                self._end_process(fault)
                return

    def _find_current_fault(self) -> str:
        try:
            self._loop.call_soon_threadsafe(self._reset_silence)
        except RuntimeError:  # the event loop is closed
            self._stop_event.set()
            return ""
        self._silent_s += self._tick_s
        if self._limit_s and self._silent_s > self._limit_s + self._tick_s:
            return (
                f"the environment has blocked the event loop for more than {self._limit_s:g} s"
                " (step_timeout_s); isolate its sessions (isolation='pool')"
            )
        return self._find_session_fault()

    def _reset_silence(self) -> None:
        self._silent_s = 0.0


def _end_process(reason: str) -> None:
    _log.critical("this server stops: %s", reason)
    faulthandler.dump_traceback(sys.stderr)
    logging.shutdown()
    os._exit(STUCK_EXIT_CODE)
