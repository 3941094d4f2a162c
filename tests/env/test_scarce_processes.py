"""Effects of failed forks on opens and on running sessions."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from ludus.env.encoding import ResetArgs
from ludus.env.sandbox.confine import Layer
from ludus.env.sessions.interface import OpenArgs
from ludus.proto.errors import EnvError
from tests.env.polling import wait_until
from tests.env.scarce_env import FOLDER_VARIABLE, FORK_SERVER, FORKED_COPY, NO_FORK_FILE, ScarceEnv
from tests.env.served import serve

pytestmark = pytest.mark.slow

POOL_OPTIONS = {"pool": {"num_workers": 1}}
ADD_1 = b'{"add": 1}'


@pytest.mark.parametrize("process_name", [FORK_SERVER, FORKED_COPY])
@pytest.mark.parametrize("isolation", ["pool", "process"])
async def test_opens_are_refused_after_a_failed_fork_until_a_fork_succeeds(
    isolation: str, process_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    options = {"isolation": isolation, "pass_env": (FOLDER_VARIABLE,)}
    async with (
        serve(ScarceEnv, **options, **POOL_OPTIONS.get(isolation, {})) as server,
        httpx.AsyncClient(base_url=server.http_address) as http_client,
        asyncio.timeout(120),
    ):
        host = server.core.host
        if process_name == FORKED_COPY and not host.layers[Layer.NAMESPACES]:
            pytest.skip("workers are forked without an intermediate process")

        async def open_session() -> str:
            return (await server.core.open(OpenArgs(ResetArgs(seed=1)))).session_id

        running_session_id = await open_session()
        fork_server_pid = host.fork_server.pid
        (tmp_path / NO_FORK_FILE).write_text(process_name)
        if isolation == "pool":
            await wait_until(lambda: host.pids)  # pids may be reported later than readiness
            os.kill(host.pids[0], signal.SIGKILL)
            await wait_until(lambda: not server.core.load.num_sessions)
        with pytest.raises(EnvError) as exc_info:
            while True:  # the first opens may get workers that are already running
                await open_session()
        assert exc_info.value.code == "UNAVAILABLE"
        assert "Resource temporarily unavailable" in exc_info.value.message
        if isolation == "pool":
            response = await http_client.get("/readyz")
            assert response.status_code == 503
            assert "Resource temporarily unavailable" in response.json()["status"]
        else:
            assert (await server.core.step(running_session_id, ADD_1)).reward == 1.0

        (tmp_path / NO_FORK_FILE).unlink()
        while True:
            try:
                session_id = await open_session()
            except EnvError as error:
                assert error.code == "UNAVAILABLE"
                await asyncio.sleep(0.05)
            else:
                break
        assert (await server.core.step(session_id, ADD_1)).reward == 1.0
        assert host.fork_server.pid == fork_server_pid
