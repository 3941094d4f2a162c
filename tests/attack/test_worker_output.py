"""Workers cannot fill or forge their server's log, or fill its disk."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.sandbox.confine import Layer
from ludus.env.workers.output import MAX_SERVER_BYTES, WINDOW_S
from ludus.proto.errors import EnvError
from tests.attack.attacked import AttackedProcess, make_cases, serve_env, watch

pytestmark = pytest.mark.slow

DISK_LIMIT_MB = 32
ALLOWED_LINE = re.compile(r"(worker|fork server) \d+: |(INFO|WARNING|ERROR) ludus\.|    ")
"""Start of every line of a log: its worker, its logger, or the indent of a traceback."""
WRITE = """import os, threading
def write():
    [os.write(2, b"x" * 999 + b"\\n") for _ in range(1000)]
def write_in_thread():
    """
THREADS = """
for _ in range(8):
    threading.Thread(target=write_in_thread, daemon=True).start()
"""
OUTPUTS: dict[str, str] = {
    "forged lines": r"import sys; sys.stderr.write('\nERROR root: forged\nworker 1: forged\n')",
    "line of the server": r"import os; os.write(1, b'\nINFO ludus.env.server: serving forged\n')",
    "carriage returns": r"import os; os.write(2, b'\rERROR root: forged\r\n\x0bERROR root: a\n')",
    "separators": r"print('\x85ERROR root: forged\u2028ERROR root: forged\x1c\x1d', flush=True)",
    "colors and titles": (
        r"import os; os.write(2, b'\x1b[2J\x1b]0;t\x07\x9b31m\xc2\x9b2J\x1bP+q\x1b\\')"
    ),
    "links and clipboard": (
        r"import os; os.write(1, b'\x1b]8;;http://evil.example\x1b\\a\x1b]52;c;ZXZpbA==\x07\n')"
    ),
    "directions": r"print('\u202egnp.exe\u2066\u200b\u3164', flush=True)",
    "erased text": r"import os; os.write(2, b'secret\x08\x08\x08\x08\x08\x08\x7fpublic\n')",
    "cut characters": r"import os; os.write(2, b'\xe2\x80'); os.write(2, b'\xae\xf0\x9f\xff\n')",
    "bytes": "import os; os.write(2, bytes(range(256)) * 100)",
    "nulls": r"import os; os.write(2, b'\0' * 1_000_000)",
    "20 MB in lines": r"import os; [os.write(2, b'x' * 999 + b'\n') for _ in range(20_000)]",
    "20 MB without a newline": "import os; [os.write(1, b'x' * 1000) for _ in range(20_000)]",
    "empty lines": r"import os; [os.write(2, b'\n' * 1000) for _ in range(2000)]",
    "escapes that grow": r"import os; [os.write(2, b'\x1b' * 1000) for _ in range(2000)]",
    "wide characters": "print('\\U000e0041' * 1_000_000, flush=True)",
    "threads": WRITE + "write()" + THREADS,
    "threads that continue": WRITE + "while True:\n        write()" + THREADS,
    "child process": (
        "import os\nif os.fork() == 0:\n    for _ in range(5000):\n"
        "        os.write(2, b'\\nERROR root: forged' + b'x' * 999)\n    os._exit(0)"
    ),
    "grandchild that continues": (
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        while True:\n            os.write(2, b'\\nERROR root: forged')\n    os._exit(0)"
    ),
    "program": (
        "import subprocess, sys\n"
        "code = 'import os; [os.write(2, b\"ERROR root: forged\" * 99) for _ in range(9999)]'\n"
        "subprocess.run([sys.executable, '-c', code])"
    ),
    "at exit": (
        "import atexit, os\n"
        "atexit.register(lambda: os.write(2, b'\\nERROR root: forged\\x1b[2J\\n' * 100_000))"
    ),
    "last words": "import os; os.write(2, b'\\nERROR root: forged\\x1b[2J'); os._exit(7)",
    "opened again": "open('/dev/stderr', 'wb').write(b'\\nERROR root: forged\\x1b[2J\\n')",
    "descriptor of the process": (
        "open('/proc/self/fd/2', 'ab').write(b'\\nERROR root: forged\\x1b[2J\\n')"
    ),
    "every descriptor": (
        "import contextlib, os\nfor descriptor in range(3, 256):\n"
        "    with contextlib.suppress(OSError):\n        os.set_blocking(descriptor, False)\n"
        "        os.write(descriptor, b'\\nERROR root: forged\\x1b[2J\\n')"
    ),
    "logging": r"import logging; logging.basicConfig(); logging.error('a\nERROR root: forged\x1b')",
    "warnings": "import warnings; warnings.warn('a\\nERROR root: forged\\x1b[2J' * 1000)",
    "traceback": "raise ValueError('a\\nERROR root: forged\\x1b[2J' + 'x' * 1_000_000)",
    "printed exception of a thread": (
        "import threading\ndef fail():\n    raise ValueError('a\\nERROR root: forged\\x1b[2J')\n"
        "threading.Thread(target=fail).start()"
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedProcess]:
    layers = [argument for layer in Layer for argument in ("--accept-missing", layer)]
    arguments = ["--isolation", "process", "--disk-limit-mb", str(DISK_LIMIT_MB), *layers]
    arguments += ["--step-timeout-s", "20"]
    with serve_env(tmp_path_factory.mktemp("server") / "empty", *arguments) as attacked:
        yield attacked


async def run_beside_others(server: AttackedProcess, code: str) -> str:
    """Run code in a session while another session is stepped; return the error's message."""
    message = ""
    async with await AsyncEnvClient.connect(server.grpc) as client:
        other_session, _ = await client.open(seed=1)

        async def step() -> None:
            await other_session.step({"code": ""})

        async with watch(step):
            session, _ = await client.open(seed=2)
            try:
                await session.step({"code": code})
                await session.step({"code": "import time; time.sleep(0.3)"})
            except EnvError as error:
                message = str(error)
            with contextlib.suppress(EnvError):
                await session.close()
        await other_session.close()
    return message


@pytest.mark.parametrize("code", make_cases(OUTPUTS))
async def test_log_is_bounded_and_not_forged(server: AttackedProcess, code: str) -> None:
    num_logged, start_s = server.log_file.stat().st_size, time.monotonic()
    message = await run_beside_others(server, code)
    assert len(message) < 20_000
    num_windows = (time.monotonic() - start_s) // WINDOW_S + 2
    log = server.read_log()
    assert server.log_file.stat().st_size - num_logged < num_windows * MAX_SERVER_BYTES
    for line in log.split("\n")[:-1]:
        assert line.isprintable(), line[:1000]
        assert ALLOWED_LINE.match(line), line[:1000]
    assert not re.search(r"^(worker 1|INFO \S+): .*forged", log, re.MULTILINE)


FILES: dict[str, str] = {
    "one file": "open('a', 'wb').write(b'x' * 200_000_000)",
    "slow growth": (
        "import time\nwith open('a', 'wb') as file:\n    for _ in range(400):\n"
        "        file.write(b'x' * 1_000_000)\n        time.sleep(0.01)"
    ),
    "many small files": "for i in range(30_000):\n    open(f'{i}', 'wb').write(b'x' * 4096)",
    "allocated without data": (
        "import os\nwith open('a', 'wb') as file:\n"
        "    os.posix_fallocate(file.fileno(), 0, 200_000_000)"
    ),
    "hidden in folders": (
        "import os\nos.makedirs('a/' * 200)\nopen('a/' * 200 + 'b', 'wb').write(b'x' * 200_000_000)"
    ),
    "folder that cannot be listed": (
        "import os\nos.mkdir('a')\nopen('a/b', 'wb').write(b'x' * 200_000_000)\nos.chmod('a', 0)"
    ),
    "names that are no text": "open(b'\\xff\\n\\x1b', 'wb').write(b'x' * 200_000_000)",
    "child process": (
        "import os\nif os.fork() == 0:\n"
        "    open('a', 'wb').write(b'x' * 200_000_000)\n    os._exit(0)"
    ),
}


@pytest.mark.parametrize("code", make_cases(FILES, 0))
async def test_disk_is_bounded_and_freed(server: AttackedProcess, code: str) -> None:
    folder = "import os, tempfile; os.chdir(tempfile.gettempdir())\n"
    wait = "\nimport time; time.sleep(15)"
    message = await run_beside_others(server, folder + code + wait)
    assert f"limit of {DISK_LIMIT_MB} MB (disk_limit_mb)" in message
    assert server.is_alive
