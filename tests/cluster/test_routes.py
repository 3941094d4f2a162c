"""Sessions from outside the cluster's network, through a real edge proxy that terminates TLS.

LUDUS_EDGE is NAMESPACE/SERVICE/CLASS/PORT of an edge proxy for Ingress and the Gateway API. CLASS
is the name of both its ingress class and its gateway class. PORT is the TLS port of its Gateway
listener. Default: a Traefik service in the cluster.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from ludus.env.client import AsyncEnvClient, ConnectOptions
from ludus.proto.errors import UnavailableError
from tests.cluster.installed import (
    CHART,
    Release,
    create_object,
    find_skip_reason,
    install,
    kubectl,
)

DEFAULT_EDGE = "traefik/traefik/traefik/8443"
NAMESPACE, SERVICE, CLASS_NAME, PORT = os.environ.get("LUDUS_EDGE", DEFAULT_EDGE).split("/")
HOST, SECRET_NAME, GATEWAY_NAME = "localhost", "edge-tls", "edge"
ROUTE_VALUES = {"enabled": True, "parentRefs": [{"name": GATEWAY_NAME}], "hostnames": [HOST]}
LONG_IDLE_ENVIRONMENTS = {"blackjack": {"server": {"idleTimeoutSeconds": 1800}}}
EDGE_SELECTOR = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}}
INGRESS_VALUES = {
    "enabled": True,
    "className": CLASS_NAME,
    "host": HOST,
    "tlsSecret": SECRET_NAME,
    # Without this annotation, Traefik completes the TLS handshake but responds with 404.
    "annotations": {"traefik.ingress.kubernetes.io/router.tls": "true"},
}

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(find_skip_reason()), reason=find_skip_reason()),
]


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    classes = kubectl("get", "ingressclass,gatewayclass", "-o", "name").split()
    if [name.rpartition("/")[2] for name in classes].count(CLASS_NAME) < 2:
        pytest.skip(
            f"SKIPPED, NOT PASSED: no ingress and gateway class '{CLASS_NAME}'; see LUDUS_EDGE"
        )
    with install([CHART / "values-cpu.yaml"]) as release:
        yield release


@pytest.fixture(scope="module")
def ca_file(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the edge's TLS Secret; return the path of the certificate of its authority."""
    authority = trustme.CA()
    certificate = authority.issue_cert(HOST)
    chain = b"".join(pem.bytes() for pem in certificate.cert_chain_pems)
    files = {"tls.crt": chain, "tls.key": certificate.private_key_pem.bytes()}
    encoded_files = {name: base64.b64encode(content).decode() for name, content in files.items()}
    create_object(
        "v1", "Secret", SECRET_NAME, release.namespace, type="kubernetes.io/tls", data=encoded_files
    )
    path = tmp_path_factory.mktemp("edge") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture
def idle_s(request: pytest.FixtureRequest) -> float:
    """Return the idle time of a session. Edge proxies close idle connections."""
    return 620.0 if request.config.getoption("--all", default=False) else 30.0


async def test_websocket_sessions_work_through_an_ingress(
    release: Release, ca_file: Path, tmp_path: Path, idle_s: float
) -> None:
    upgrade_release(release, tmp_path, ingress=INGRESS_VALUES)
    with forward_edge_port() as port:
        await play_with_pause(f"https://{HOST}:{port}/envs/blackjack", release, ca_file, idle_s)


async def test_websocket_and_grpc_sessions_work_through_routes(
    release: Release, ca_file: Path, tmp_path: Path, idle_s: float
) -> None:
    certificate = {"certificateRefs": [{"name": SECRET_NAME}]}
    listener = {"name": "tls", "protocol": "HTTPS", "port": int(PORT), "tls": certificate}
    spec = {"gatewayClassName": CLASS_NAME, "listeners": [listener]}
    create_object(
        "gateway.networking.k8s.io/v1", "Gateway", GATEWAY_NAME, release.namespace, spec=spec
    )
    upgrade_release(release, tmp_path, httpRoute=ROUTE_VALUES, grpcRoute=ROUTE_VALUES)
    with forward_edge_port() as port:
        async with asyncio.TaskGroup() as group:
            for address in (
                f"https://{HOST}:{port}/envs/blackjack",
                f"grpcs://{HOST}:{port}/blackjack",
            ):
                group.create_task(play_with_pause(address, release, ca_file, idle_s))


async def play_with_pause(address: str, release: Release, ca_file: Path, idle_s: float) -> None:
    """Play an episode with a pause of `idle_s` seconds."""
    secret = release.get("secret", "ludus-auth")["data"]["gateway-token"]
    token = base64.b64decode(secret).decode()
    client = await AsyncEnvClient.connect(
        address, ConnectOptions(token=token, ca_file=str(ca_file))
    )
    async with client:
        await wait_for_route(client)
        for seed in range(20):
            session, result = await client.open(seed=seed)
            if not result.done:
                break
            await session.close()
        previous_state = await session.state()
        await asyncio.sleep(idle_s)
        assert await session.state() == previous_state
        while not result.done:
            result = await session.step({"action_id": 1})
        await session.close()


async def wait_for_route(client: AsyncEnvClient) -> None:
    """Wait until the edge serves the route."""
    async with asyncio.timeout(60):
        while True:
            try:
                session, _ = await client.open()
                return await session.close()
            except UnavailableError:
                await asyncio.sleep(0.5)


# Cluster setup.


def upgrade_release(release: Release, folder: Path, **values: Any) -> None:
    """Upgrade the release to `values`, with network access for the edge proxy."""
    values_path = folder / "values.yaml"
    base_values = {
        "environments": LONG_IDLE_ENVIRONMENTS,
        "networkPolicy": {"clients": [EDGE_SELECTOR]},
    }
    values_path.write_text(yaml.safe_dump(base_values | values))
    release.upgrade([CHART / "values-cpu.yaml", values_path])


@contextmanager
def forward_edge_port() -> Iterator[int]:
    """Forward a local port to the edge's TLS port; yield the local port."""
    arguments = ("port-forward", "--address", "127.0.0.1", f"service/{SERVICE}", ":443")
    process = subprocess.Popen(
        ["kubectl", "-n", NAMESPACE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        output = process.stdout.readline()
        match = re.search(r"127\.0\.0\.1:(\d+)", output)
        assert match, f"kubectl {' '.join(arguments)} printed {output!r}"
        yield int(match[1])
    finally:
        process.kill()
        process.wait()
