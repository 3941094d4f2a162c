"""How a long-running process of servers lives: its event loop, its signals, its heap."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

_log = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.05
_TRIM_EVERY_S = 60.0
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3  # mallopt(3)
_LARGE_BLOCK = 128 * 1024


class Service(AbstractAsyncContextManager[Any], Protocol):
    """A server or gateway: it listens while it is entered."""

    @property
    def num_sessions(self) -> int:
        """Those that it would end if it stopped now."""

    def drain(self) -> None:
        """Take no new sessions from now on."""


def run_until_signal(
    service: Service,
    *,
    drain_grace_s: float,
    on_ready: Callable[[], None] | None = None,
    sigint_drains: bool = False,
) -> None:
    """Run it until SIGTERM or SIGINT.

    SIGTERM drains: the service stops as soon as its last session has ended, at most
    `drain_grace_s` later. A second signal stops it at once.

    Args:
        on_ready: called when it listens.
        sigint_drains: treats SIGINT as SIGTERM; else it stops the service at once.
    """
    _map_large_blocks()
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(_run_until_signal(service, drain_grace_s, on_ready, sigint_drains))


async def _run_until_signal(
    service: Service, drain_grace_s: float, on_ready: Callable[[], None] | None, sigint_drains: bool
) -> None:
    draining, stopping = asyncio.Event(), asyncio.Event()

    def drain_or_stop() -> None:
        (stopping if draining.is_set() else draining).set()

    def stop() -> None:
        draining.set()
        stopping.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, drain_or_stop)
    loop.add_signal_handler(signal.SIGINT, drain_or_stop if sigint_drains else stop)
    async with service:
        freeze_heap()
        trimming = asyncio.create_task(_trim_forever())
        if on_ready is not None:
            on_ready()
        await draining.wait()
        trimming.cancel()
        if drain_grace_s <= 0 or stopping.is_set():
            return
        service.drain()
        if service.num_sessions:
            _log.warning(
                "draining: waiting for %d sessions, at most %g s; a second signal ends the wait",
                service.num_sessions,
                drain_grace_s,
            )
        deadline_s = loop.time() + drain_grace_s
        while service.num_sessions and loop.time() < deadline_s and not stopping.is_set():
            await asyncio.sleep(_DRAIN_POLL_S)


def freeze_heap() -> None:
    """Keep Python's collector off all that exists now.

    Call it once a long-running process has started. A process that has imported torch and ray
    holds 400,000 objects, and every full collection walks over all of them with the
    event loop standing still, for 0.2 s: the blackjack demo took half as long again.
    """
    gc.collect()
    gc.freeze()


def _map_large_blocks() -> None:
    """Give every large block pages of its own, which go back as soon as it is freed.

    glibc raises its threshold to the largest block that was ever freed, up to 32 MiB: after one
    oversized message the next ones lie between small blocks in the heap, in an arena of each
    thread.
    """
    with contextlib.suppress(AttributeError):  # only glibc has it
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        mallopt(_M_ARENA_MAX, 2)


async def _trim_forever() -> None:
    """Give memory back that a burst of large messages has left free in the midst of the heap.

    glibc by itself gives back the end of its heap alone, so one small block that is still in use
    keeps all before it: a gateway stayed at the most that it had ever needed.
    """
    with contextlib.suppress(AttributeError):  # only glibc has it
        trim = ctypes.CDLL(None).malloc_trim
        while True:
            await asyncio.sleep(_TRIM_EVERY_S)
            trim(0)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
