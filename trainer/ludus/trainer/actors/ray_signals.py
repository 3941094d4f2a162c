"""Handling of signals while Ray starts.

An exception in the middle of `ray.init` leaves Ray half connected, and the process then ends with a
crash. So a signal waits until Ray has started.

While Ray connects, its C++ code sets a handler of SIGTERM that aborts the process. So the kernel
holds signals back until the connection exists and Python's handlers are set again.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from ray._private import utils as ray_utils
from ray._private import worker

from ludus.trainer.core.output import warn_user

_Handler = Callable[[int, FrameType | None], object]


@contextmanager
def defer_signals() -> Iterator[None]:
    """Call the program's handlers of SIGINT and SIGTERM after the block.

    The second signal calls its handler at once. Ray's own handler of SIGTERM, which exits, is not
    set if the program has one.
    """
    with ExitStack() as stack:
        handlers = _find_handlers()
        received: list[int] = []

        def record(number: int, frame: FrameType | None) -> None:
            received.append(number)
            if len(received) > 1:
                handlers[signal.Signals(number)](number, frame)
            else:
                warn_user("stopping as soon as Ray has started; signal again to stop at once")

        for number, handler in handlers.items():
            signal.signal(number, record)
            stack.callback(signal.signal, number, handler)
        if signal.SIGTERM in handlers:
            stack.callback(setattr, ray_utils, "set_sigterm_handler", ray_utils.set_sigterm_handler)
            ray_utils.set_sigterm_handler = lambda handler: None
        if handlers:
            connect = worker.connect
            stack.callback(setattr, worker, "connect", connect)

            def connect_without_signals(*arguments: Any, **options: Any) -> None:
                with _hold_back(handlers, record):
                    connect(*arguments, **options)

            worker.connect = connect_without_signals
        yield
    if received:
        handlers[signal.Signals(received[0])](received[0], None)


@contextmanager
def _hold_back(numbers: Iterable[signal.Signals], handler: _Handler) -> Iterator[None]:
    """Block signals within the block, then set their handler again and deliver them.

    Threads that start within the block never get these signals.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _find_handlers() -> dict[signal.Signals, _Handler]:
    """Return the handlers that the program has set; none outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {number: handler for number, handler in handlers.items() if callable(handler)}
