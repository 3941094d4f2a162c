"""Stops a server process that its environment has blocked, so that it is started again.

    event loop --answers each second--> watchdog thread --silence, or no usable thread--> exit 70

A gateway, a run or Kubernetes then starts the process again. The thread counts its own seconds, so
a pause of the whole machine has no effect.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)

EXIT_CODE = 70
"""EX_SOFTWARE: the environment's code is faulty."""
_TICK_S = 1.0


class Watchdog:
    """Watches the event loop in which it is made, until `stop`.

    Args:
        limit_s: maximum silence of the event loop; 0 sets no limit.
        find_fault: returns why only a new process could serve sessions, or "".
        end: called once with the fault.
    """

    def __init__(
        self,
        limit_s: float,
        find_fault: Callable[[], str],
        end: Callable[[str], None] | None = None,
        tick_s: float = _TICK_S,
    ) -> None:
        self._limit_s = limit_s
        self._find_fault = find_fault
        self._end = end or _end_process
        self._tick_s = tick_s
        self._loop = asyncio.get_running_loop()
        self._silent_s = 0.0
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="ludus-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._tick_s):
            fault = self._check()
            if fault:
                self._end(fault)
                return

    def _check(self) -> str:
        try:
            self._loop.call_soon_threadsafe(self._reset_silence)
        except RuntimeError:  # the event loop is closed
            self._stopped.set()
            return ""
        self._silent_s += self._tick_s
        if self._limit_s and self._silent_s > self._limit_s + self._tick_s:
            return (
                f"the environment has blocked the event loop for more than {self._limit_s:g} s"
                " (step_timeout_s); isolate its sessions (isolation='pool')"
            )
        return self._find_fault()

    def _reset_silence(self) -> None:
        self._silent_s = 0.0


def _end_process(reason: str) -> None:
    _log.critical("this server stops: %s", reason)
    faulthandler.dump_traceback(sys.stderr)
    logging.shutdown()
    os._exit(EXIT_CODE)
