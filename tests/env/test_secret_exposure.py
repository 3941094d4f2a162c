"""Code of an environment cannot find the secrets of the fleet, with any isolation of the chart."""

from __future__ import annotations

import os
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
from tests.env.secret_search import make_search_code, make_secret
from tests.env.served import ServerProcess, start_server_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the search reads /proc"),
]

PROGRAM_PATH = str(Path(__file__).with_name("code_env.py"))
POD_UID = "8c5f7a3e-0b1d-4c7e-9a55-2f7d1c0e4b6a"


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
        code = make_search_code(pids, [str(folder)])
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
