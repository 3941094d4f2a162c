"""A source for the environment servers behind a Kubernetes Service.

    ListFollower --changed slices--> slices by name --merge by pod--> publish(endpoints)
    loads -------DeletionCostWriter-----------> annotations of the pods, if this gateway leads

A Service's endpoints are spread over EndpointSlices of about 100 pods each. During a rebalance a
pod may be in two slices, or briefly have old conditions. Each change therefore rebuilds the whole
list from all slices. For 2,000 pods this takes about a millisecond.

Nothing is published before the first LIST has succeeded, so a gateway never becomes ready with an
incomplete list. After that an unreachable API server changes nothing: the last list stays valid,
and sessions continue.

Meaning of a pod's conditions:

    ready  serving  terminating
    true   true     false        accepts new sessions (`ready` unknown counts as true)
    any    false    false        unready: keeps its sessions, accepts no new ones
    any    any      true         terminating: keeps its sessions until it is gone

One gateway of a release has the Lease and writes annotations; all of them route calls.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ludus.env.security.session_ids import pod_server_id
from ludus.env.sessions.options import GRPC_PORT_OFFSET
from ludus.env.types import JsonObject
from ludus.proto.errors import ConfigError
from ludus.services.gateway.config import KubernetesEnvironment
from ludus.services.gateway.fleet.sources import Publish, ServerEndpoint
from ludus.services.gateway.kubernetes.deletion_cost import DeletionCostWriter, ReadLoads
from ludus.services.gateway.kubernetes.follower import RETRY_PAUSES_S, ListFollower
from ludus.services.gateway.kubernetes.leadership import Leadership
from ludus.services.kubernetes.api import EventType, KubernetesApi, WatchEvent, resource_path

_log = logging.getLogger(__name__)

_API_VERSION = "discovery.k8s.io/v1"
_HTTP, _GRPC = "http", "grpc"
"""Names of a Service's ports."""
_H2C = "kubernetes.io/h2c"
"""The appProtocol of a port for HTTP/2 without TLS, which gRPC uses."""
_FAMILY_RANKS = {"FQDN": 0, "IPv6": 1, "IPv4": 2}
"""Rank of address types; a dual-stack pod is reached at the address with the highest rank."""


@dataclass(frozen=True, slots=True)
class SliceEndpoints:
    """The endpoints of one EndpointSlice."""

    name: str
    family_rank: int
    revision: int
    """Version of the slice; if two slices contain a pod, the higher version is newer."""
    endpoints: tuple[ServerEndpoint, ...]


class EndpointSliceSource:
    """An `EndpointSource` for the pods behind a Service.

    Args:
        api: client that `close` closes.
        read_loads: returns the number of sessions and the capacity by pod.
        pauses_s: the first and the longest pause before a retry, in seconds.
        sleep: waits between two attempts.
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
        self._namespace, self._lease = environment.namespace, environment.lease
        self._service = f"{environment.namespace}/{environment.service}"
        self._follower = ListFollower(
            api,
            resource_path(_API_VERSION, environment.namespace, "endpointslices"),
            f"kubernetes.io/service-name={environment.service}",
            f"endpoints of {self._service}",
            self._handle_list,
            self._handle_event,
            pauses_s=pauses_s,
            sleep=sleep,
        )
        self._slices: dict[str, SliceEndpoints] = {}
        self._published: dict[str, ServerEndpoint] | None = None
        self._publish: Publish | None = None

    async def watch(self, publish: Publish) -> None:
        """Publish the pods, and write their deletion costs while leading, until cancelled.

        Raises:
            ConfigError: the first LIST contains no valid slice. A slice that is not valid later
                is logged and keeps its last valid state.
        """
        self._publish = publish
        if not self._lease:
            await self._follower.run()
            return
        leadership = Leadership(self._api, self._namespace, self._lease, socket.gethostname())
        costs = DeletionCostWriter(
            self._api, self._namespace, self._read_loads, lambda: leadership.is_leader
        )
        async with leadership:
            cost_task = asyncio.create_task(costs.run())
            try:
                await self._follower.run()
            finally:
                cost_task.cancel()
                await asyncio.gather(cost_task, return_exceptions=True)

    async def close(self) -> None:
        """Close all requests to the cluster."""
        await self._api.close()

    def _handle_list(self, items: Sequence[JsonObject]) -> None:
        slices: dict[str, SliceEndpoints] = {}
        problems: list[ConfigError] = []
        for item in items:
            try:
                endpoint_slice = parse_slice(item)
                slices[endpoint_slice.name] = endpoint_slice
            except ConfigError as error:
                problems.append(error)
                name = item["metadata"]["name"]
                if name in self._slices:
                    slices[name] = self._slices[name]
        if problems and self._published is None and not slices:
            raise problems[0]
        for problem in problems:
            _log.error("%s: %s", self._service, problem)
        self._slices = slices
        self._publish_changes()

    def _handle_event(self, event: WatchEvent) -> None:
        if event.type == EventType.DELETED:
            self._slices.pop(event.object["metadata"]["name"], None)
        else:
            try:
                endpoint_slice = parse_slice(event.object)
            except ConfigError as error:
                _log.error("%s: %s", self._service, error)
                return
            self._slices[endpoint_slice.name] = endpoint_slice
        self._publish_changes()

    def _publish_changes(self) -> None:
        endpoints = merge_slices(self._slices.values())
        if endpoints != self._published:
            assert self._publish is not None, "`watch` has started"
            self._published = endpoints
            self._publish(tuple(endpoints.values()))


def parse_slice(raw: JsonObject) -> SliceEndpoints:
    """Parse the endpoints of an EndpointSlice object."""
    members = raw.get("endpoints") or ()
    http_port, grpc_port = _choose_ports(raw) if members else (None, 0)
    version = str(raw["metadata"].get("resourceVersion", ""))
    return SliceEndpoints(
        name=raw["metadata"]["name"],
        family_rank=_FAMILY_RANKS.get(raw["addressType"], 0),
        # Versions of one kind of object increase.
        revision=int(version) if version.isdecimal() else 0,
        endpoints=tuple(_make_endpoint(member, http_port, grpc_port) for member in members),
    )


def merge_slices(slices: Iterable[SliceEndpoints]) -> dict[str, ServerEndpoint]:
    """Merge the slices into one endpoint per pod, by key.

    The newest slice with a pod counts. A pod that terminates in any slice counts as terminating,
    because termination is final.
    """
    result: dict[str, ServerEndpoint] = {}
    terminating: set[str] = set()
    for slice_ in sorted(slices, key=lambda slice_: (slice_.family_rank, slice_.revision)):
        for endpoint in slice_.endpoints:
            result[endpoint.key] = endpoint
            if endpoint.is_terminating:
                terminating.add(endpoint.key)
    for key in terminating:
        if not result[key].is_terminating:
            result[key] = replace(result[key], is_ready=False, is_terminating=True)
    return result


def _choose_ports(raw: JsonObject) -> tuple[int | None, int]:
    """Return the HTTP port, if known, and the gRPC port.

    The HTTP port is the port with its name, or the only port. The gRPC port is the port with its
    name or protocol, otherwise the HTTP port plus the default offset.
    """
    listed = [port for port in raw.get("ports") or () if port.get("port")]
    ports: dict[str, int] = {port.get("name") or "": port["port"] for port in listed}
    h2c_ports = [port["port"] for port in listed if port.get("appProtocol") == _H2C]
    grpc_port = ports.get(_GRPC) or next(iter(h2c_ports), None)
    http_port = ports.get(_HTTP)
    if grpc_port is None and http_port is None and len(ports) == 1:
        (http_port,) = ports.values()
    if grpc_port is None and http_port is not None:
        grpc_port = http_port + GRPC_PORT_OFFSET
    if grpc_port is None or grpc_port > 65_535:
        names = ", ".join(f"{name or 'unnamed'}={port}" for name, port in ports.items())
        raise ConfigError(
            f"EndpointSlice {raw['metadata']['name']} needs a port named {_GRPC!r} or {_HTTP!r}, or"
            f" only one port, got {names or 'none'}; rename the Service's ports"
        )
    return http_port, grpc_port


def _make_endpoint(member: JsonObject, http_port: int | None, grpc_port: int) -> ServerEndpoint:
    address = member["addresses"][0]
    host = f"[{address}]" if ":" in address else address
    conditions = member.get("conditions") or {}
    is_terminating = conditions.get("terminating") is True
    pod = member.get("targetRef") or {}
    http_address = f"http://{host}:{http_port}" if http_port is not None else ""
    grpc_address = f"grpc://{host}:{grpc_port}"
    server_id = pod_server_id(pod["uid"]) if pod.get("uid") else ""
    return ServerEndpoint(
        key=server_id or http_address or grpc_address,
        grpc_address=grpc_address,
        http_address=http_address,
        # publishNotReadyAddresses makes `ready` always true, so `serving` decides.
        is_ready=conditions.get("ready") is not False
        and conditions.get("serving") is not False
        and not is_terminating,
        is_terminating=is_terminating,
        server_id=server_id,
        pod_name=pod["name"] if pod.get("kind") == "Pod" else "",
    )
