"""Ends a server process that its environment has brought to a stand, so that it is started again.

    event loop --answers each second--> watchdog thread --silence, or no thread is left--> exit 70

Whoever started the process starts it again: a gateway, a run, Kubernetes. The thread counts its
own seconds, so that a machine that stands still as a whole ends nothing.
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
"""EX_SOFTWARE: the environment's code is at fault."""
_TICK_S = 1.0


class Watchdog:
    """Watches the event loop in which it is made, until it is stopped.

    Args:
        limit_s: how long the event loop may be silent; 0 is for ever.
        trouble: why only another process could go on; empty while this one can.
        end: told what is wrong, once.
    """

    def __init__(
        self,
        limit_s: float,
        trouble: Callable[[], str],
        end: Callable[[str], None] | None = None,
        tick_s: float = _TICK_S,
    ) -> None:
        self._limit_s = limit_s
        self._trouble = trouble
        self._end = end or _end_process
        self._tick_s = tick_s
        self._loop = asyncio.get_running_loop()
        self._silent_s = 0.0
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="ludus-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._tick_s):
            reason = self._reason()
            if reason:
                self._end(reason)
                return

    def _reason(self) -> str:
        try:
            self._loop.call_soon_threadsafe(self._heard)
        except RuntimeError:  # the event loop has ended
            self._stopped.set()
            return ""
        self._silent_s += self._tick_s
        if self._limit_s and self._silent_s > self._limit_s + self._tick_s:
            return (
                f"the environment has kept the event loop for more than {self._limit_s:g} s"
                " (step_timeout_s); isolate its sessions (isolation='pool')"
            )
        return self._trouble()

    def _heard(self) -> None:
        self._silent_s = 0.0


def _end_process(reason: str) -> None:
    _log.critical("this server ends: %s", reason)
    faulthandler.dump_traceback(sys.stderr)
    logging.shutdown()
    os._exit(EXIT_CODE)
