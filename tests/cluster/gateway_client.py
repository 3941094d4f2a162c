"""Clients of a release's gateway, through a kubectl tunnel that bypasses every NetworkPolicy."""

from __future__ import annotations

import base64
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from ludus.env.client import AsyncEnvClient, ConnectOptions
from tests.cluster.installed import Release

GATEWAY_SERVICE = "service/ludus-gateway"
GRPC_PORT = 18000


@contextmanager
def open_tunnel(release: Release, target: str) -> Iterator[int]:
    """Forward a local port to the gRPC port of a pod or service; yield the local port."""
    command = ["kubectl", "-n", release.namespace, "port-forward", target, f":{GRPC_PORT}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            match = re.search(r":(\d+) ->", process.stdout.readline())
            assert match is not None, "kubectl port-forward printed no port"
            yield int(match[1])
        finally:
            process.terminate()


@asynccontextmanager
async def connect_client(
    release: Release, environment: str, gateway: str = GATEWAY_SERVICE, timeout_s: float = 60.0
) -> AsyncIterator[AsyncEnvClient]:
    """Connect a client to an environment of one of the gateways."""
    with open_tunnel(release, gateway) as port:
        options = ConnectOptions(token=read_gateway_token(release), timeout_s=timeout_s)
        address = f"grpc://127.0.0.1:{port}/{environment}"
        async with await AsyncEnvClient.connect(address, options) as client:
            yield client


def read_gateway_token(release: Release) -> str:
    """Return the token that clients send to the gateway."""
    secret = release.get("secret", "ludus-auth")["data"]["gateway-token"]
    return base64.b64decode(secret).decode()
