"""Routing, draining and deletion costs of pods in a fake Kubernetes cluster."""

import pytest

from ludus.env.encoding import ResetArgs
from ludus.env.sessions.interface import OpenArgs
from ludus.proto.errors import SessionLostError
from ludus.services.gateway.config import KubernetesEnvironment
from ludus.services.gateway.gateway import Gateway
from ludus.services.gateway.kubernetes.deletion_cost import COST_ANNOTATION
from ludus.services.gateway.kubernetes.source import EndpointSliceSource
from tests.env.polling import wait_until
from tests.gateway.cluster_objects import (
    NAMESPACE,
    SLICES,
    make_api_client,
    make_endpoint_slice,
    make_server_id,
    member,
)
from tests.gateway.fake_kubernetes import FakeKubernetes
from tests.gateway.gateways import NAME, get_sessions, make_config, make_server

pytestmark = pytest.mark.slow

OPEN_ARGS = OpenArgs(ResetArgs(seed=1))
ENVIRONMENT = KubernetesEnvironment(namespace=NAMESPACE, service="blackjack", lease="gateway")


def make_slice(pod: str, server, **conditions):
    ports = {
        "http": int(server.http_address.rpartition(":")[2]),
        "grpc": int(server.grpc_address.rpartition(":")[2]),
    }
    return make_endpoint_slice(f"slice-{pod}", member(pod, "127.0.0.1", **conditions), ports=ports)


async def test_draining_pod_keeps_sessions_but_receives_no_new_sessions():
    server_a, server_b = (
        make_server(server_id=make_server_id("a")),
        make_server(server_id=make_server_id("b")),
    )
    async with FakeKubernetes() as cluster, server_a, server_b:
        pod_resource = ("v1", "pods", NAMESPACE)
        for pod, server in (("a", server_a), ("b", server_b)):
            cluster.put(make_slice(pod, server))
            cluster.put(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": pod, "namespace": NAMESPACE},
                }
            )
        loads: dict = {}
        source = EndpointSliceSource(make_api_client(cluster), ENVIRONMENT, lambda: loads)
        async with Gateway(make_config("grpc://unused:1"), {NAME: source}) as gateway:
            sessions = get_sessions(gateway)
            opened_sessions = [await sessions.open(OPEN_ARGS) for _ in range(8)]
            sessions_on_a = [
                session
                for session in opened_sessions
                if session.session_id.split("~")[1] == make_server_id("a")
            ]
            assert 0 < len(sessions_on_a) < 8
            loads.update(sessions.fleet.read_pod_loads())
            assert set(loads) == {"a", "b"}
            await wait_until(lambda: COST_ANNOTATION in str(cluster.get(*pod_resource, "a")))

            cluster.put(make_slice("a", server_a, ready=False, terminating=True))
            await wait_until(lambda: sessions.environment_load.num_draining_servers == 1)
            for _ in range(4):
                await sessions.open(OPEN_ARGS)
            assert server_a.core.load.num_sessions == len(sessions_on_a)
            await sessions.step(sessions_on_a[0].session_id, b'{"add": 1}', 1)

            cluster.remove(*SLICES, "slice-a")
            await wait_until(lambda: len(sessions.fleet.links) == 1)
            with pytest.raises(SessionLostError, match="removed"):
                await sessions.step(sessions_on_a[0].session_id, b'{"add": 1}', 2)
