"""Kubernetes objects for tests, and a client of the fake cluster."""

from __future__ import annotations

from typing import Any
from uuid import NAMESPACE_DNS, uuid5

from ludus.services.kubernetes.access import ApiAccess
from ludus.services.kubernetes.api import KubernetesApi
from tests.gateway.fake_kubernetes import FakeKubernetes

NAMESPACE = "arena"
SLICES = ("discovery.k8s.io/v1", "endpointslices", NAMESPACE)


def make_api_client(cluster: FakeKubernetes, token: str = "a-token") -> KubernetesApi:
    return KubernetesApi(lambda: ApiAccess(cluster.url, lambda: f"Bearer {token}"), timeout_s=60.0)


def make_pod_uid(pod: str) -> str:
    return str(uuid5(NAMESPACE_DNS, pod))


def make_server_id(pod: str) -> str:
    return make_pod_uid(pod).replace("-", "")


def member(pod: str, address: str = "10.0.0.1", **conditions: bool | None) -> dict[str, Any]:
    """Return an endpoint of an EndpointSlice, ready by default."""
    return {
        "addresses": [address],
        "conditions": {"ready": True, "serving": True, "terminating": False, **conditions},
        "targetRef": {"kind": "Pod", "name": pod, "namespace": NAMESPACE, "uid": make_pod_uid(pod)},
    }


def make_endpoint_slice(
    name: str,
    *endpoints: dict[str, Any],
    service: str = "blackjack",
    family: str = "IPv4",
    ports: dict[str, int] | None = None,
) -> dict[str, Any]:
    ports = {"http": 8000, "grpc": 18000} if ports is None else ports
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in ports.items()],
    }
