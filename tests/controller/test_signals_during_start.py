"""A signal that arrives while Ray starts ends the process without a crash."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROGRAM = """
import os, signal, sys, threading
import ray._private.worker
from ludus.trainer.actors.cluster import start_ray

connect = ray._private.worker.connect

def connect_with_signal(*arguments, **options):
    send = lambda: os.kill(os.getpid(), int(sys.argv[1]))
    threading.Timer(0.05, send).start()
    connect(*arguments, **options)

ray._private.worker.connect = connect_with_signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
try:
    start_ray()
except KeyboardInterrupt:
    is_own_handler = signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    sys.exit(130 if is_own_handler and ray.is_initialized() else 1)
sys.exit(0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_ray_connects_is_handled_after_the_start(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(int(number))]
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 130, outcome.stderr
    assert "stopping as soon as Ray has started" in outcome.stderr
