"""Code of an environment cannot find the secrets of the fleet, with any isolation of the chart."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.env.security.session_ids import (
    derive_server_token,
    make_pod_server_id,
)
from tests.env.polling import wait_until
from tests.env.served import ServerProcess, start_server_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the search reads /proc"),
]

PROGRAM_PATH = str(Path(__file__).with_name("code_env.py"))
POD_UID = "8c5f7a3e-0b1d-4c7e-9a55-2f7d1c0e4b6a"
# The code contains the prefix of the secrets in pieces, so that it does not find itself.
SEARCH_CODE = """
import gc, os, re
pattern = re.compile(b"fleet" + b"-secret-" + b"[0-9a-f]{32}")
found = {}
def look(place, content):
    if isinstance(content, str):
        content = content.encode("utf-8", "replace")
    if pattern.search(content):
        found[place] = True
def look_at_file(path):
    try:
        with open(path, "rb") as file:
            look(path, file.read(1 << 20))
    except (OSError, ValueError):
        pass
look("os.environ", repr(dict(os.environ)))
for pid in [name for name in os.listdir("/proc") if name.isdigit()] + ["self"]:
    for name in ("environ", "cmdline"):
        look_at_file(f"/proc/{pid}/{name}")
    try:
        descriptors = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        descriptors = []
    for path in descriptors:
        try:
            is_file = os.readlink(path).startswith("/") and os.path.isfile(path)
        except OSError:
            continue
        if is_file:
            look_at_file(path)
    try:
        lines = open(f"/proc/{pid}/maps").read().splitlines() if pid in pids else []
        memory = open(f"/proc/{pid}/mem", "rb", 0) if lines else None
    except OSError:
        continue
    for line in lines:
        span, mode, *_ = line.split()
        start, end = (int(text, 16) for text in span.split("-"))
        if "r" not in mode or "w" not in mode or end - start > 1 << 28:
            continue
        try:
            memory.seek(start)
            look(f"memory of {pid}", memory.read(end - start))
        except (OSError, ValueError, OverflowError):
            pass
for thing in gc.get_objects():
    if type(thing) is dict:
        for content in list(thing.values()):
            if type(content) in (str, bytes):
                look("objects", content)
for folder in folders:
    for parent, _, names in os.walk(folder):
        for name in names:
            look_at_file(os.path.join(parent, name))
result = sorted(found)
"""


def make_secret() -> str:
    """Return a new secret that the search recognizes."""
    return f"fleet-secret-{secrets.token_hex(16)}"


class Fleet:
    """The secrets of a fleet in files, and the folder with the derived secrets of one server."""

    def __init__(self, folder: Path) -> None:
        self.session_key, self.token = make_secret(), make_secret()
        self.mount_folder = folder / "mounted"
        self.server_folder = folder / "server"
        self.server_folder.mkdir()
        self.mount_folder.mkdir()
        self.write()

    def write(self) -> None:
        """Write the files of the fleet."""
        (self.mount_folder / "session-key").write_text(self.session_key)
        (self.mount_folder / "environment-token").write_text(self.token)

    @contextmanager
    def run_sidecar(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the program that derives the secrets of the server."""
        command = [sys.executable, "-m", "ludus.env.serving.server_keys"]
        command += ["--session-key-file", str(self.mount_folder / "session-key")]
        command += ["--token-file", str(self.mount_folder / "environment-token")]
        command += ["--folder", str(self.server_folder)]
        process = subprocess.Popen(command, env={**os.environ, "POD_UID": POD_UID})
        try:
            yield process
        finally:
            process.terminate()
            assert process.wait(60) == 0

    @property
    def server_arguments(self) -> list[str]:
        """Arguments of a server in the chart."""
        return [
            *("--token-file", str(self.server_folder / "token")),
            *("--server-key-file", str(self.server_folder / "server-key")),
        ]


async def search(server: ServerProcess, token: str, folder: Path) -> Any:
    """Open a session, search for secrets in it, and return where some are."""
    options = ConnectOptions(token=token)
    async with await AsyncEnvClient.connect(server.grpc_address, options) as client:
        session, _ = await client.open()
        pids = ["self", str(server.process.pid)]
        code = f"pids, folders = {pids!r}, {[str(folder)]!r}\n{SEARCH_CODE}"
        report = (await session.step({"code": code})).info
        await session.close()
    assert "result" in report, report
    return report["result"]


@pytest.mark.parametrize("isolation", ["inline", "pool", "process"])
async def test_environment_code_finds_no_secret_of_the_fleet(
    isolation: str, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path)
    with fleet.run_sidecar() as sidecar:
        await wait_until((fleet.server_folder / "server-key").exists)
        arguments = [*fleet.server_arguments, "--isolation", isolation, "--no-determinism-check"]
        arguments += ["--num-workers", "1"] if isolation == "pool" else []
        variables = {"POD_UID": POD_UID}
        with start_server_process(
            tmp_path, *arguments, module=PROGRAM_PATH, env=variables
        ) as server:
            token = derive_server_token(fleet.token, make_pod_server_id(POD_UID))
            leaks = await search(server, token, fleet.server_folder)
        assert leaks == []
        assert sidecar.poll() is None


async def test_the_search_finds_secrets_in_variables_of_an_inline_server(tmp_path: Path) -> None:
    session_key, token = make_secret(), make_secret()
    variables = {"LUDUS_SESSION_KEY": session_key, "LUDUS_ENV_TOKEN": token, "POD_UID": POD_UID}
    with start_server_process(
        tmp_path, "--no-determinism-check", module=PROGRAM_PATH, env=variables
    ) as server:
        leaks = await search(server, token, tmp_path)
        server.process.terminate()
        log = server.process.stderr.read() if server.process.stderr else ""
    assert {"os.environ", "/proc/self/environ"} <= set(leaks)
    assert "where its code can read the server's session key and token" in log
