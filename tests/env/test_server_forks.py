"""Closing of the server ports when the environment has forked child processes."""

from __future__ import annotations

import os
import socket
from functools import partial
from urllib.parse import urlsplit

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.serving.server import EnvServer, ServerOptions
from tests.env.counting_env import CountingEnv
from tests.env.polling import wait_until
from tests.env.processes import is_alive
from tests.env.served import WIRES


def is_port_free(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
async def test_forked_child_does_not_keep_server_ports_open(wire: str) -> None:
    read_fd, write_fd = os.pipe()
    child_pids = []

    class ForkingEnv(CountingEnv):
        def step(self, action):
            child_pid = os.fork()
            if child_pid == 0:
                os.close(write_fd)
                os.read(read_fd, 1)  # blocks until the test closes the pipe
                os._exit(0)
            child_pids.append(child_pid)
            return super().step(action)

    try:
        options = ServerOptions(port=0, admin_port=0)
        async with EnvServer(ForkingEnv, options) as server:
            address = server.grpc_address if wire == "grpc" else server.http_address
            async with await AsyncEnvClient.connect(address) as client:
                session, _ = await client.open(seed=1)
                result = await session.step({"add": 1})
                assert (await session.step({"add": 2})).step_index == result.step_index + 1
            addresses = server.addresses
        for address in (addresses.http, addresses.grpc, addresses.admin):
            # gRPC's threads may close a port shortly after the server has stopped.
            await wait_until(partial(is_port_free, urlsplit(address).port))
        # gRPC does not support forks while its threads run, so a forked child may crash.
        live_pids = [child_pid for child_pid in child_pids if is_alive(child_pid)]
        assert len(child_pids) == 2 and (live_pids == child_pids or wire == "grpc")
    finally:
        os.close(write_fd)
        os.close(read_fd)
        for child_pid in child_pids:
            os.waitpid(child_pid, 0)
