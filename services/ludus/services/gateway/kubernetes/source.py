"""A source that lists the environment servers behind a Kubernetes Service.

    ListFollower --changed slices--> slices by name --merge by pod--> publish(endpoints)
    loads -------DeletionCostWriter-----------> annotations of the pods, if this gateway leads

A Service's endpoints are spread over EndpointSlices of about 100 pods each. While slices
are rebalanced, a pod may be in two slices, or briefly have outdated conditions. Each change
therefore rebuilds the whole list from all slices, which takes about a millisecond for 2,000 pods.

Nothing is published before the first LIST has succeeded, so a gateway never becomes ready with an
incomplete list. If the API server is unreachable later, the last list stays valid and sessions
continue.

Meaning of a pod's conditions:

    ready  serving  terminating
    true   true     false        accepts new sessions (`ready` unknown counts as true)
    any    false    false        unready: keeps its sessions, accepts no new ones
    any    any      true         terminating: keeps its sessions until it is gone

Only the gateway that holds the Lease writes annotations; all gateways route calls.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ludus.env.security.session_ids import make_pod_server_id
from ludus.env.sessions.options import GRPC_PORT_OFFSET
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError
from ludus.services.gateway.config import KubernetesEnvironment
from ludus.services.gateway.fleet.sources import PublishCallback, ServerEndpoint
from ludus.services.gateway.kubernetes.deletion_cost import DeletionCostWriter, ReadLoads
from ludus.services.gateway.kubernetes.follower import RETRY_PAUSES_S, ListFollower
from ludus.services.gateway.kubernetes.leadership import Leadership
from ludus.services.kubernetes.api import EventType, KubernetesApi, WatchEvent, make_resource_path

_log = logging.getLogger(__name__)

_API_VERSION = "discovery.k8s.io/v1"
_HTTP_PORT_NAME, _GRPC_PORT_NAME = "http", "grpc"
"""Names of a Service's ports."""
_H2C_PROTOCOL = "kubernetes.io/h2c"
"""The appProtocol of a port for HTTP/2 without TLS, which gRPC uses."""
_FAMILY_RANKS = {"FQDN": 0, "IPv6": 1, "IPv4": 2}
"""Ranks of address types. A dual-stack pod is called at its address with the highest rank."""


@dataclass(frozen=True, slots=True)
class SliceEndpoints:
    """The endpoints of one EndpointSlice."""

    precedence: tuple[int, int]
    """Rank of the address type, and resource version. If two slices contain a pod, the slice with
    the higher precedence is used."""
    endpoints: tuple[ServerEndpoint, ...]


class EndpointSliceSource:
    """An `EndpointSource` for the pods behind a Service.

    Args:
        api: API client, which `close` closes.
        read_loads: returns (number of sessions, capacity) by pod name.
        pauses_s: the first and the longest pause before a retry, in seconds.
        sleep: function that waits between two attempts.
    """

    def __init__(
        self,
        api: KubernetesApi,
        environment: KubernetesEnvironment,
        read_loads: ReadLoads,
        *,
        pauses_s: tuple[float, float] = RETRY_PAUSES_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._read_loads = read_loads
        self._namespace, self._lease_name = environment.namespace, environment.lease
        self._service = f"{environment.namespace}/{environment.service}"
        self._follower = ListFollower(
            api,
            make_resource_path(_API_VERSION, environment.namespace, "endpointslices"),
            f"kubernetes.io/service-name={environment.service}",
            f"endpoints of {self._service}",
            self._handle_list,
            self._handle_event,
            pauses_s=pauses_s,
            sleep=sleep,
        )
        self._slices: dict[str, SliceEndpoints] = {}
        self._published_endpoints: dict[str, ServerEndpoint] | None = None
        self._publish: PublishCallback | None = None

    async def watch(self, publish: PublishCallback) -> None:
        """Publish the pods, and write their deletion costs while leading, until cancelled.

        Raises:
            ConfigError: the first LIST contains slices, but no valid slice. A slice that becomes
                invalid later is logged, and its last valid version stays in use.
        """
        self._publish = publish
        if not self._lease_name:
            await self._follower.run()
            return
        leadership = Leadership(self._api, self._namespace, self._lease_name, socket.gethostname())
        cost_writer = DeletionCostWriter(
            self._api, self._namespace, self._read_loads, lambda: leadership.is_leader
        )
        async with leadership:
            cost_task = asyncio.create_task(cost_writer.run())
            try:
                await self._follower.run()
            finally:
                cost_task.cancel()
                await asyncio.gather(cost_task, return_exceptions=True)

    async def close(self) -> None:
        """Close all requests to the cluster."""
        await self._api.close()

    def _handle_list(self, slice_objects: Sequence[JsonObject]) -> None:
        slices: dict[str, SliceEndpoints] = {}
        problems: list[ConfigError] = []
        for slice_object in slice_objects:
            name = slice_object["metadata"]["name"]
            try:
                slices[name] = parse_slice(slice_object)
            except ConfigError as error:
                problems.append(error)
                if name in self._slices:
                    slices[name] = self._slices[name]
        if problems and self._published_endpoints is None and not slices:
            raise problems[0]
        for problem in problems:
            _log.error("%s: %s", self._service, problem)
        self._slices = slices
        self._publish_changes()

    def _handle_event(self, event: WatchEvent) -> None:
        name = event.object["metadata"]["name"]
        try:
            if event.type == EventType.DELETED:
                self._slices.pop(name, None)
            else:
                self._slices[name] = parse_slice(event.object)
        except ConfigError as error:
            _log.error("%s: %s", self._service, error)
        self._publish_changes()

    def _publish_changes(self) -> None:
        endpoints = merge_slices(self._slices.values())
        if endpoints != self._published_endpoints:
            assert self._publish is not None, "`watch` has started"
            self._published_endpoints = endpoints
            self._publish(tuple(endpoints.values()))


def parse_slice(slice_object: JsonObject) -> SliceEndpoints:
    """Parse the endpoints of an EndpointSlice object."""
    raw_endpoints = slice_object.get("endpoints") or ()
    http_port, grpc_port = _choose_ports(slice_object) if raw_endpoints else (None, 0)
    version = str(slice_object["metadata"].get("resourceVersion", ""))
    # Resource versions of slices increase with time.
    revision = int(version) if version.isdecimal() else 0
    precedence = (_FAMILY_RANKS.get(slice_object["addressType"], 0), revision)
    endpoints = [_make_endpoint(endpoint, http_port, grpc_port) for endpoint in raw_endpoints]
    return SliceEndpoints(precedence, tuple(endpoints))


def merge_slices(slices: Iterable[SliceEndpoints]) -> dict[str, ServerEndpoint]:
    """Merge the slices into one endpoint per pod, by key.

    If several slices contain a pod, the newest one is used. A pod that is terminating in any slice
    counts as terminating, because termination is final.
    """
    endpoint_by_key: dict[str, ServerEndpoint] = {}
    terminating_keys: set[str] = set()
    for endpoint_slice in sorted(slices, key=lambda endpoint_slice: endpoint_slice.precedence):
        for endpoint in endpoint_slice.endpoints:
            endpoint_by_key[endpoint.key] = endpoint
            if endpoint.is_terminating:
                terminating_keys.add(endpoint.key)
    for key in terminating_keys:
        endpoint_by_key[key] = replace(endpoint_by_key[key], is_ready=False, is_terminating=True)
    return endpoint_by_key


def _choose_ports(slice_object: JsonObject) -> tuple[int | None, int]:
    """Return the HTTP port, or None, and the gRPC port.

    The HTTP port is the one named `http`, or the only port. The gRPC port is the one named `grpc`,
    or the one with the protocol of gRPC, or the HTTP port plus the default offset.
    """
    ports = [port for port in slice_object.get("ports") or () if port.get("port")]
    port_by_name: dict[str, int] = {port.get("name") or "": port["port"] for port in ports}
    h2c_ports = [port["port"] for port in ports if port.get("appProtocol") == _H2C_PROTOCOL]
    grpc_port = port_by_name.get(_GRPC_PORT_NAME) or next(iter(h2c_ports), None)
    http_port = port_by_name.get(_HTTP_PORT_NAME)
    if grpc_port is None and http_port is None and len(port_by_name) == 1:
        (http_port,) = port_by_name.values()
    if grpc_port is None and http_port is not None:
        grpc_port = http_port + GRPC_PORT_OFFSET
    if grpc_port is None or grpc_port > 65_535:
        names = ", ".join(f"{name or 'unnamed'}={port}" for name, port in port_by_name.items())
        raise ConfigError(
            f"EndpointSlice {slice_object['metadata']['name']} needs a port named"
            f" {_GRPC_PORT_NAME!r} or {_HTTP_PORT_NAME!r}, or only one port, got"
            f" {names or 'none'}; rename the Service's ports"
        )
    return http_port, grpc_port


def _make_endpoint(endpoint: JsonObject, http_port: int | None, grpc_port: int) -> ServerEndpoint:
    address = endpoint["addresses"][0]
    host = f"[{address}]" if ":" in address else address
    conditions = endpoint.get("conditions") or {}
    is_terminating = conditions.get("terminating") is True
    pod = endpoint.get("targetRef") or {}
    http_address = f"http://{host}:{http_port}" if http_port is not None else ""
    grpc_address = f"grpc://{host}:{grpc_port}"
    server_id = make_pod_server_id(pod["uid"]) if pod.get("uid") else ""
    return ServerEndpoint(
        key=server_id or http_address or grpc_address,
        grpc_address=grpc_address,
        http_address=http_address,
        # `serving` is checked, too, because publishNotReadyAddresses makes `ready` always true.
        is_ready=conditions.get("ready") is not False
        and conditions.get("serving") is not False
        and not is_terminating,
        is_terminating=is_terminating,
        server_id=server_id,
        pod_name=pod["name"] if pod.get("kind") == "Pod" else "",
    )
