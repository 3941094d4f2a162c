"""Layers that isolated workers need, and limits of the network and the number of processes."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

import pytest

from ludus.env.client import AsyncEnvClient
from ludus.env.sandbox.confine import Layer, Sandbox
from ludus.env.serving.server import EnvServer
from ludus.env.workers.describe import require_layers
from ludus.proto.errors import ConfigError
from tests.env.code_env import CodeEnv, OfflineCodeEnv
from tests.env.served import serve

linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the sandbox needs Linux"
)


async def run(server: EnvServer, *code: str) -> dict[str, Any]:
    """Run code in a new session, and return the report of the step."""
    client = await AsyncEnvClient.connect(server.grpc_address)
    try:
        session, _ = await client.open()
        lines = "\n".join(["import os", *map(textwrap.dedent, code)])
        return dict((await session.step({"code": lines})).info)
    finally:
        await client.close()


SIGNAL_LAYERS = (Layer.NAMESPACES, Layer.USER_ID, Layer.SIGNAL_SCOPE)


@pytest.mark.parametrize(
    ("missing_layers", "flags"),
    [
        ((Layer.SECCOMP,), "--accept-missing seccomp"),
        (
            (Layer.SECCOMP, Layer.LANDLOCK),
            "--accept-missing landlock --accept-missing seccomp",
        ),
        ((Layer.NO_NEW_PRIVILEGES,), "--accept-missing no-new-privileges"),
        ((Layer.NON_DUMPABLE, Layer.USER_ID), "--accept-missing non-dumpable"),
        (SIGNAL_LAYERS, "--accept-missing signal-scope"),
        ((*SIGNAL_LAYERS, Layer.READ_ONLY, Layer.LANDLOCK), "landlock --accept-missing signal-sc"),
        (tuple(Layer), "--accept-missing"),
    ],
)
def test_workers_that_are_not_isolated_are_refused_unless_accepted(
    missing_layers: tuple[Layer, ...], flags: str
) -> None:
    reasons = dict.fromkeys(missing_layers, "an old kernel")
    with pytest.raises(ConfigError) as error_info:
        require_layers(reasons, Sandbox("/tmp"))
    assert "workers would not be isolated" in str(error_info.value)
    assert "an old kernel" in str(error_info.value) and flags in str(error_info.value)
    accepted_layers = str(error_info.value).split("--accept-missing ")[1:]
    sandbox = Sandbox("/tmp", accepted_layers=[layer.strip() for layer in accepted_layers])
    require_layers(reasons, sandbox)


@pytest.mark.parametrize(
    "missing_layers",
    [
        (),
        (Layer.USER_ID, Layer.PROCESS_LIMIT),
        (Layer.NAMESPACES, Layer.READ_ONLY, Layer.USER_ID, Layer.PROCESS_LIMIT),
        (Layer.NAMESPACES, Layer.SIGNAL_SCOPE),
        (Layer.USER_ID, Layer.SIGNAL_SCOPE),
    ],
)
def test_layers_that_others_replace_may_be_missing(missing_layers: tuple[Layer, ...]) -> None:
    require_layers(dict.fromkeys(missing_layers, "an old kernel"), Sandbox("/tmp"))


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"])
async def test_workers_of_environments_without_network_open_only_local_sockets(family: str) -> None:
    code = """
        import socket
        socket.socketpair()
        socket.socket(socket.AF_UNIX)
        socket.socket(getattr(socket, family))
    """
    async with serve(OfflineCodeEnv, isolation="pool", num_workers=1) as server:
        report = await run(server, f"family = {family!r}", code)
        assert report["error"] in {"OSError", "PermissionError"}


@linux_only
@pytest.mark.slow
async def test_number_of_processes_is_limited() -> None:
    code = """
        import time
        result = 0
        try:
            while result < 100:
                if not os.fork():
                    time.sleep(600)
                    os._exit(0)
                result += 1
        except BlockingIOError:
            pass
    """
    async with serve(CodeEnv, isolation="pool", num_workers=1, max_processes=20) as server:
        num_processes = (await run(server, code))["result"]
        assert server.core.worker_counts is not None
        if server.core.worker_counts.layers[Layer.PROCESS_LIMIT]:
            assert 1 <= num_processes <= 20
        else:
            assert "other processes have the same user id" in server.missing_layers
