"""Workers start from every folder and with every setting that a server may have inherited."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.env.client import AsyncEnvClient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux"),
]
_LAUNCHER = "import os, signal, sys\n{code}\nos.execvp(sys.argv[1], sys.argv[1:])"
_MODULE = [sys.executable, "-m", "ludus.env"]
_PROGRAM = [str(Path(sys.executable).with_name("ludus")), "env", "serve"]
STARTS = {
    "removed folder": ("os.rmdir(os.getcwd())", _MODULE),
    "name that is no UTF-8": ("os.mkdir(b'\\xff'); os.chdir(b'\\xff')", _MODULE),
    "ignored exits of child processes": (
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        _MODULE,
    ),
    "folder with files that have the names of modules": (
        "for n in ('json', 'socket', 'ludus'):\n"
        "    open(n + '.py', 'w').write('import os; os._exit(9)')",
        _PROGRAM,
    ),
}


@contextlib.contextmanager
def serve_after(code: str, command: list[str], folder: Path) -> Iterator[str]:
    """Serve an environment from an empty folder in which `code` ran; yield the gRPC address."""
    ready_file, output_file = folder / "ready.json", folder / "output"
    (folder / "empty").mkdir()
    options = ["echo_env", "--port", "0", "--isolation", "pool", "--no-determinism-check"]
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", _LAUNCHER.format(code=code)),
                *(*command, *options, "--ready-file", str(ready_file)),
            ],
            cwd=folder / "empty",
            env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
            stdout=output,
            stderr=output,
        )
    try:
        deadline_s = time.monotonic() + 120
        while not ready_file.exists():
            assert process.poll() is None, output_file.read_text()
            assert time.monotonic() < deadline_s, "the server is not ready"
            time.sleep(0.02)
        yield json.loads(ready_file.read_bytes())["grpc"]
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("name", STARTS)
async def test_worker_serves_a_session(name: str, tmp_path: Path) -> None:
    with serve_after(*STARTS[name], tmp_path) as address:
        async with await AsyncEnvClient.connect(address) as client:
            session, _ = await client.open(seed=1)
            result = await session.step({"message": "hello"})
            assert "hello" in json.dumps(result.observation)
