"""A gateway over the pods of a (fake) cluster."""

import pytest

from ludus.env.encoding import ResetArgs
from ludus.env.sessions.interface import OpenArgs
from ludus.proto.errors import SessionLostError
from ludus.services.gateway.config import KubernetesEnvironment
from ludus.services.gateway.gateway import Gateway
from ludus.services.gateway.kubernetes.cluster import ClusterSource
from ludus.services.gateway.kubernetes.deletion_cost import ANNOTATION
from tests.env.polling import eventually
from tests.gateway.cluster_objects import (
    NAMESPACE,
    SLICES,
    client_of,
    endpoint_slice,
    id_of,
    member,
)
from tests.gateway.fake_kubernetes import FakeKubernetes
from tests.gateway.gateways import NAME, config_of, env_server, sessions_of

pytestmark = pytest.mark.slow

SEEDED = OpenArgs(ResetArgs(seed=1))
FLEET = KubernetesEnvironment(namespace=NAMESPACE, service="blackjack", lease="gateway")


def slice_of(pod: str, server, **conditions):
    ports = {
        "http": int(server.http_address.rpartition(":")[2]),
        "grpc": int(server.grpc_address.rpartition(":")[2]),
    }
    return endpoint_slice(f"slice-{pod}", member(pod, "127.0.0.1", **conditions), ports=ports)


async def test_pods_are_routed_to_drained_and_ranked_for_deletion():
    one, other = env_server(server_id=id_of("a")), env_server(server_id=id_of("b"))
    async with FakeKubernetes() as cluster, one, other:
        pods = ("v1", "pods", NAMESPACE)
        for pod, server in (("a", one), ("b", other)):
            cluster.put(slice_of(pod, server))
            cluster.put(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": pod, "namespace": NAMESPACE},
                }
            )
        loads: dict = {}
        source = ClusterSource(client_of(cluster), FLEET, lambda: loads)
        async with Gateway(config_of("grpc://unused:1"), {NAME: source}) as gateway:
            sessions = sessions_of(gateway)
            opened = [await sessions.open(SEEDED) for _ in range(8)]
            on_a = [s for s in opened if s.session_id.split("~")[1] == id_of("a")]
            assert 0 < len(on_a) < 8
            loads.update(sessions.fleet.pod_loads())
            assert set(loads) == {"a", "b"}
            await eventually(lambda: ANNOTATION in str(cluster.get(*pods, "a")))

            cluster.put(slice_of("a", one, ready=False, terminating=True))
            await eventually(lambda: sessions.environment_load.num_draining_servers == 1)
            for _ in range(4):
                await sessions.open(SEEDED)
            assert one.core.load.num_sessions == len(on_a)
            await sessions.step(on_a[0].session_id, b'{"add": 1}', 1)

            cluster.remove(*SLICES, "slice-a")
            await eventually(lambda: len(sessions.fleet.links) == 1)
            with pytest.raises(SessionLostError, match="removed"):
                await sessions.step(on_a[0].session_id, b'{"add": 1}', 2)
