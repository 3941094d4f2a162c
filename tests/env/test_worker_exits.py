"""Exit reasons of workers on a slow machine."""

import asyncio
import os
import signal

import pytest

from ludus.env.encoding import ResetArgs
from ludus.env.sessions.interface import OpenArgs
from ludus.proto.errors import SessionLostError
from tests.env.counting_env import Misbehavior, UnrulyEnv
from tests.env.served import serve

pytestmark = pytest.mark.slow


async def test_exit_reason_is_reported_even_if_the_report_is_late() -> None:
    async with serve(UnrulyEnv, isolation="pool", num_workers=1) as server:
        core = server.core
        session_id = (await core.open(OpenArgs(ResetArgs()))).session_id
        os.kill(core.host.fork_server.pid, signal.SIGSTOP)  # delays the report
        step_task = asyncio.create_task(core.step(session_id, b'{"add": %d}' % Misbehavior.EXIT))
        await asyncio.sleep(1)
        os.kill(core.host.fork_server.pid, signal.SIGCONT)
        with pytest.raises(SessionLostError, match="its worker exited with code 7"):
            await step_task
